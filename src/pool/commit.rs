//! Commits completions in groups. Completions that arrive during a write wait for the next one, so
//! groups grow with the load, and an idle system has no added latency. In a cluster each server has
//! its own writes: a frozen server does not delay the others. With `redis.wait_replicas`, renewals
//! have their own writes too: they do not wait for replicas. Completions that may wait are on the shelf:
//! see [`super::shelf`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{info, warn};

use super::board::Board;
use super::shelf::{Shelf, Watch};
use crate::id::{BotId, Shard};
use crate::metrics::PipelineMetrics;
use crate::queue::{Lease, Queue};
use crate::redis::RedisError;
use crate::redis::scripts::{Complete, Completion, Verdict};
use crate::telemetry::{Outage, Recovered};

/// Maximum number of completions per script call.
const CALL_MAX: usize = 64;
/// Maximum number of accounts that one script call changes, so that it stays short.
const CALL_ACCOUNTS: usize = 500;
/// Maximum number of exceptions in one script call, for the same reason. A completion with more is
/// committed in parts. A slice by lanes ends with one completion, so it has at most this number of events.
pub(super) const CALL_EXCEPTIONS: usize = 500;
/// Maximum number of bytes of the slices with exceptions in one script call, unless one slice has more: the
/// script reads these events and writes them elsewhere.
const CALL_BYTES: u64 = 4 << 20;
/// Maximum number of completions per write.
const GROUP_MAX: usize = 2_048;
/// A completion waits only if its lease lasts longer than this.
const WAIT_MARGIN: Duration = Duration::from_millis(500);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_millis(500);

/// The log state of completions that fail, shared by all pipelines.
static COMPLETIONS: Outage = Outage::shared();

/// The result of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    /// The script committed it.
    Done,
    /// Another lease is current: nothing was changed.
    Stale,
    /// The lease stays with the worker: receivers hold too many already.
    Full,
    /// An earlier attempt got no answer, and the lease has ended since: it may have been committed.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Item {
    shard: Shard,
    pub(super) completion: Completion,
    /// No attempt is sent after this moment: another worker may hold the lease.
    deadline: Instant,
    /// An attempt was sent and got no answer.
    unanswered: bool,
    reply: oneshot::Sender<Committed>,
}

impl Item {
    fn new(
        shard: Shard,
        completion: Completion,
        deadline: Instant,
    ) -> (Self, oneshot::Receiver<Committed>) {
        let (reply, verdict) = oneshot::channel();
        (Self { shard, completion, deadline, unanswered: false, reply }, verdict)
    }
}

#[cfg(test)]
impl Item {
    /// A release of a bot, for tests.
    pub(super) fn of(bot: &BotId) -> Self {
        let completion = Completion {
            bot: bot.clone(),
            run: "run".into(),
            fence: crate::id::Fence::new(1),
            before: 0,
            n: 1,
            bytes: 1,
            mode: crate::redis::scripts::Mode::Release,
            cost: 1,
            exceptions: Vec::new(),
            leaving: None,
            aside: None,
        };
        let shard = bot.shard(crate::id::ShardCount::new(1).expect("in bounds"));
        Self::new(shard, completion, Instant::now()).0
    }
}

/// Sends completions to the committer.
#[derive(Clone)]
pub(super) struct Commits {
    sender: mpsc::Sender<Item>,
    shelf: Arc<Shelf>,
    dead_max: u64,
    board: Arc<Board>,
    metrics: PipelineMetrics,
}

impl Commits {
    /// Commits and waits for the result.
    ///
    /// # Cancel safety
    /// The completion is committed all the same, and the result is lost. A renewal or a handover that
    /// was not sent yet is dropped.
    pub(super) async fn commit(
        &self,
        shard: Shard,
        completion: Completion,
        deadline: Instant,
    ) -> Committed {
        let (item, verdict) = Item::new(shard, completion, deadline);
        self.send(item, verdict).await
    }

    /// As [`Self::commit`], but returns immediately, without the result.
    pub(super) fn commit_unheard(&self, shard: Shard, completion: Completion, deadline: Instant) {
        let (item, _) = Item::new(shard, completion, deadline);
        self.shelf.put_due(vec![item]);
    }

    async fn send(&self, item: Item, verdict: oneshot::Receiver<Committed>) -> Committed {
        if self.sender.send(item).await.is_err() {
            // The committer outlives every sender, unless it was aborted.
            return Committed::Unknown;
        }
        verdict.await.unwrap_or(Committed::Unknown)
    }

    /// Notes copies for the bot of this lease, for [`Self::commit_soon`].
    pub(super) fn watch(&self, lease: &Lease) -> Watch {
        self.shelf.watch(&lease.bot, lease.fence)
    }

    /// Whether [`Self::commit_soon`] is likely to save a call.
    pub(super) fn may_wait(&self, deadline: Instant) -> bool {
        deadline > Instant::now() + WAIT_MARGIN && self.shelf.is_worthwhile()
    }

    /// As [`Self::commit`], but the completion may wait for others.
    pub(super) async fn commit_soon(
        &self,
        shard: Shard,
        completion: Completion,
        deadline: Instant,
    ) -> Committed {
        let (item, verdict) = Item::new(shard, completion, deadline);
        match self.shelf.put(item) {
            Ok(()) => verdict.await.unwrap_or(Committed::Unknown),
            Err(item) => self.send(*item, verdict).await,
        }
    }

    /// Commits the waiting completions that should travel with a copy for these bots, over the link of
    /// `queue`. The committer repeats those that fail.
    ///
    /// # Cancel safety
    /// The committer commits them.
    pub(super) async fn commit_along<'a>(
        &self,
        queue: &Queue,
        bots: impl Iterator<Item = &'a BotId>,
    ) {
        let items = self.shelf.take_along(bots);
        if items.is_empty() {
            return;
        }
        let mut along = Along { shelf: &self.shelf, items, is_cut: true };
        let Self { dead_max, board, metrics, .. } = self;
        // Logged by the committer, if it fails there, too.
        let _ = commit_group(queue, *dead_max, board, metrics, &mut along.items).await;
        along.is_cut = false;
    }
}

/// Completions that travel with a copy. Those that are left when it is dropped go to the committer.
struct Along<'a> {
    shelf: &'a Shelf,
    items: Vec<Item>,
    /// Whether the call did not end.
    is_cut: bool,
}

impl Drop for Along<'_> {
    fn drop(&mut self) {
        for item in &mut self.items {
            item.unanswered |= self.is_cut;
        }
        self.shelf.put_due(std::mem::take(&mut self.items));
    }
}

/// The committer of one pipeline: a handle and a task. The task ends after every handle is dropped
/// and everything is committed.
pub(super) fn committer(
    queue: Queue,
    dead_max: u64,
    board: Arc<Board>,
    metrics: PipelineMetrics,
) -> (Commits, impl Future<Output = ()> + Send) {
    let (sender, mut receiver) = mpsc::channel(GROUP_MAX);
    let shelf = Arc::new(Shelf::default());
    let commits = Commits {
        sender,
        shelf: Arc::clone(&shelf),
        dead_max,
        board: Arc::clone(&board),
        metrics: metrics.clone(),
    };
    let task = async move {
        let target = queue.link().target();
        let apart = target.wait_replicas() > 0;
        let several = target.is_cluster() || apart;
        let outlet = Writer { queue: &queue, dead_max, board: &board, metrics: &metrics };
        let mut waiting: Vec<Item> = Vec::new();
        // At most one write per way. A write after a failure starts with a pause.
        let mut writes = FuturesUnordered::new();
        let mut busy: BTreeMap<Way, Duration> = BTreeMap::new();
        let mut pauses: BTreeMap<Way, Duration> = BTreeMap::new();
        let mut closed = false;
        loop {
            if writes.is_empty() {
                if waiting.is_empty() && !closed {
                    tokio::select! {
                        biased;
                        count = receiver.recv_many(&mut waiting, GROUP_MAX) => {
                            closed = count == 0;
                        }
                        () = shelf.due() => waiting.append(&mut shelf.take()),
                    }
                }
                if closed {
                    waiting.append(&mut shelf.take());
                    if waiting.is_empty() {
                        return;
                    }
                }
            } else {
                // With one way, new completions cannot be sent before the current write ends.
                let others = several && !closed && waiting.len() < GROUP_MAX;
                tokio::select! {
                    biased;
                    Some(Written { way, mut left, failed }) = writes.next() => {
                        let pause = busy.remove(&way).filter(|_| failed);
                        pause.map(|pause| pauses.insert(way, (pause * 2).min(RETRY_MAX)));
                        if failed && receiver.is_closed() {
                            // The process stops: it does not wait for a Redis that does not answer.
                            left.retain(|item| !item.reply.is_closed());
                        }
                        waiting.splice(0..0, left);
                    }
                    count = receiver.recv_many(&mut waiting, GROUP_MAX), if others => {
                        closed = count == 0;
                    }
                    () = shelf.due(), if others => waiting.append(&mut shelf.take()),
                }
            }
            if shelf.is_due() {
                waiting.append(&mut shelf.take());
            }
            while waiting.len() < GROUP_MAX {
                match receiver.try_recv() {
                    Ok(item) => waiting.push(item),
                    Err(_) => break,
                }
            }
            give_up_late(&mut waiting);
            let mut ready: BTreeMap<Way, Vec<Item>> = BTreeMap::new();
            for item in std::mem::take(&mut waiting) {
                let server = queue.link().holder(queue.keys(item.shard));
                let way = Way { server, lasting: apart && item.completion.is_lasting() };
                if busy.contains_key(&way) {
                    waiting.push(item);
                } else {
                    ready.entry(way).or_default().push(item);
                }
            }
            for (way, items) in ready {
                let pause = pauses.remove(&way).unwrap_or(RETRY_FIRST);
                busy.insert(way, pause);
                writes.push(outlet.write(way, items, pause));
            }
        }
    };
    (commits, task)
}

/// Drops completions that must not be sent any more. Their leases expire, and their events are
/// handed out again. Also drops renewals and handovers for which no worker waits any more: it ends the
/// lease, and a completion on another way may overtake them.
fn give_up_late(waiting: &mut Vec<Item>) {
    let now = Instant::now();
    for item in std::mem::take(waiting) {
        let is_idle = item.reply.is_closed() && !item.completion.is_lasting();
        if item.deadline > now && !is_idle {
            waiting.push(item);
        } else {
            let verdict = if item.unanswered { Committed::Unknown } else { Committed::Stale };
            // The worker may have stopped waiting.
            let _ = item.reply.send(verdict);
        }
    }
}

/// The writes of one way follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    /// The number of the server.
    server: usize,
    /// Whether the results wait for replicas.
    lasting: bool,
}

/// The state of a write.
#[derive(Clone, Copy)]
struct Writer<'a> {
    queue: &'a Queue,
    dead_max: u64,
    board: &'a Board,
    metrics: &'a PipelineMetrics,
}

/// The result of a write.
struct Written {
    way: Way,
    /// The completions to send again.
    left: Vec<Item>,
    failed: bool,
}

impl Writer<'_> {
    /// Sends completions in one write. After a failure it waits for `pause`.
    async fn write(self, way: Way, mut items: Vec<Item>, pause: Duration) -> Written {
        let Self { queue, dead_max, board, metrics } = self;
        let written = commit_group(queue, dead_max, board, metrics, &mut items).await;
        if let Err(error) = &written {
            if let Some(suppressed) = COMPLETIONS.failed() {
                warn!(pipeline = %queue.name(), completions = items.len(), %error, suppressed,
                    "completions failed; retrying while the leases are valid");
            }
            tokio::time::sleep(pause).await;
        } else if (way.lasting || queue.link().target().wait_replicas() == 0)
            && let Some(Recovered { lasted, failures }) = COMPLETIONS.succeeded()
        {
            // Renewals that do not wait for replicas succeed also while no completion does.
            info!(?lasted, failures, "completions succeed again");
        }
        Written { way, left: items, failed: written.is_err() }
    }
}

/// Sends all of `waiting` in one write. Completions without an answer stay in it.
///
/// # Cancel safety
/// All of them stay in it, and may or may not be committed.
async fn commit_group(
    queue: &Queue,
    dead_max: u64,
    board: &Board,
    metrics: &PipelineMetrics,
    waiting: &mut Vec<Item>,
) -> Result<(), RedisError> {
    let groups = grouped(waiting);
    if groups.is_empty() {
        return Ok(());
    }
    let completions: Vec<Vec<Completion>> = groups
        .iter()
        .map(|(_, group)| group.iter().map(|&place| waiting[place].completion.clone()).collect())
        .collect();
    let ledger = queue.ledger().is_some();
    let calls: Vec<Complete<'_>> = groups
        .iter()
        .zip(&completions)
        .map(|((shard, _), items)| Complete {
            keys: queue.keys(*shard),
            dead_max,
            quotas: queue.quotas(),
            ledger,
            items,
        })
        .collect();
    let replies = match queue.link().call_all(&calls).await {
        Ok(replies) => replies,
        Err(error) => {
            // Only if the connection was never made it is certain that nothing was sent.
            let unanswered = !matches!(error, RedisError::Connect { .. });
            for item in waiting {
                item.unanswered |= unanswered;
            }
            return Err(error);
        }
    };
    let mut sent: Vec<Option<Item>> = std::mem::take(waiting).into_iter().map(Some).collect();
    let mut failed = None;
    for ((shard, group), reply) in groups.into_iter().zip(replies) {
        let group = group.into_iter().filter_map(|place| sent[place].take());
        match reply {
            Ok(completed) => {
                board.completed(shard, &completed);
                metrics.letters_removed.increment(completed.letters_removed);
                queue.letters_over_quota(completed.letters_over_quota);
                for (item, verdict) in group.zip(&completed.verdicts) {
                    answer(item, *verdict);
                }
            }
            Err(error) => {
                // A call with an unintelligible answer ran. A call without an answer may or may not
                // have run.
                let may_have = matches!(error, RedisError::Reply { .. }) || error.may_have_run();
                waiting.extend(group.map(|mut item| {
                    item.unanswered |= may_have;
                    item
                }));
                failed = Some(error);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The calls of a write: of each its shard, and the places of its completions. Completions of one bot
/// keep their order.
fn grouped(waiting: &[Item]) -> Vec<(Shard, Vec<usize>)> {
    let mut shards: BTreeMap<Shard, Vec<Vec<usize>>> = BTreeMap::new();
    for (place, item) in waiting.iter().enumerate() {
        let groups = shards.entry(item.shard).or_default();
        // The script accepts each bot once, so a renewal and the end of its slice need separate
        // calls.
        let accounts = |item: &Item| {
            item.completion.leaving.as_ref().map_or(0, |leaving| leaving.accounts.len())
        };
        let exceptions = |item: &Item| item.completion.exceptions.len();
        let bytes = |item: &Item| if exceptions(item) > 0 { item.completion.bytes } else { 0 };
        let fits = |group: &Vec<usize>| {
            let others = || group.iter().map(|&place| &waiting[place]);
            group.len() < CALL_MAX
                && others().map(accounts).sum::<usize>() + accounts(item) <= CALL_ACCOUNTS
                && others().map(exceptions).sum::<usize>() + exceptions(item) <= CALL_EXCEPTIONS
                && others().map(bytes).sum::<u64>() + bytes(item) <= CALL_BYTES
                && !others().any(|other| other.completion.bot == item.completion.bot)
        };
        match groups.last_mut() {
            Some(group) if fits(group) => group.push(place),
            _ => groups.push(vec![place]),
        }
    }
    let calls = |(shard, groups): (Shard, Vec<Vec<usize>>)| {
        groups.into_iter().map(move |group| (shard, group))
    };
    shards.into_iter().flat_map(calls).collect()
}

fn answer(item: Item, verdict: Verdict) {
    let committed = match verdict {
        Verdict::Ok => Committed::Done,
        Verdict::Full => Committed::Full,
        // A renewal may arrive after the end of its slice, which does not wait for it.
        Verdict::Stale | Verdict::Bad if item.unanswered || item.reply.is_closed() => {
            Committed::Unknown
        }
        Verdict::Stale => Committed::Stale,
        Verdict::Bad => {
            tracing::error!(bot = %item.completion.bot, fence = %item.completion.fence,
                "a completion does not fit its lease; please report this defect of Fairlane");
            Committed::Stale
        }
    };
    let _ = item.reply.send(committed);
}

#[cfg(test)]
mod tests;
