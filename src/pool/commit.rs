//! Commits completions in groups: while one write is under way, what comes in waits for the next,
//! so the group grows with the load and costs no waiting without it. In a cluster each server has
//! writes of its own: one that is frozen holds up nobody else's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{info, warn};

use super::board::Board;
use crate::id::Shard;
use crate::keyspace::StoreError;
use crate::keyspace::scripts::{Complete, Completion, Verdict};
use crate::metrics::PipelineMetrics;
use crate::queue::Queue;
use crate::telemetry::{Outage, Recovered};

/// Most completions of one script call.
const CALL_MAX: usize = 64;
/// Maximum number of accounts that one script call changes, so that it stays short.
const CALL_ACCOUNTS: usize = 500;
/// Most completions taken into one write.
const GROUP_MAX: usize = 2_048;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_millis(500);

/// Completions that Redis does not answer or refuses: one story for all pipelines.
static COMPLETIONS: Outage = Outage::shared();

/// What became of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    /// The script did it.
    Done,
    /// Another lease is current: nothing was changed.
    Stale,
    /// Kept, but not handed over: too many are.
    Full,
    /// An earlier try was not answered and the lease is gone now: it may have been done then.
    Unknown,
}

struct Item {
    shard: Shard,
    completion: Completion,
    /// No try is sent after this moment: the lease may be somebody else's.
    deadline: Instant,
    /// A try was sent and not answered.
    unanswered: bool,
    reply: oneshot::Sender<Committed>,
}

/// Hands completions to the committer.
#[derive(Clone)]
pub(super) struct Commits(mpsc::Sender<Item>);

impl Commits {
    /// Commits and waits for the verdict.
    ///
    /// # Cancel safety
    /// The completion is committed all the same; the verdict is lost.
    pub(super) async fn commit(
        &self,
        shard: Shard,
        completion: Completion,
        deadline: Instant,
    ) -> Committed {
        let (reply, verdict) = oneshot::channel();
        let item = Item { shard, completion, deadline, unanswered: false, reply };
        if self.0.send(item).await.is_err() {
            // The committer ends only after every sender: it can have been stopped by force.
            return Committed::Unknown;
        }
        verdict.await.unwrap_or(Committed::Unknown)
    }
}

/// The committer of one pipeline: a handle, and the task to run. The task ends when every handle
/// is gone and everything is committed.
pub(super) fn committer(
    queue: Queue,
    dead_max: u64,
    board: Arc<Board>,
    metrics: PipelineMetrics,
) -> (Commits, impl Future<Output = ()> + Send) {
    let (sender, mut receiver) = mpsc::channel(GROUP_MAX);
    let task = async move {
        let cluster = queue.link().target().is_cluster();
        let outlet = Writer { queue: &queue, dead_max, board: &board, metrics: &metrics };
        let mut waiting: Vec<Item> = Vec::new();
        // One at most for each server; the next pause after one that fails.
        let mut writes = FuturesUnordered::new();
        let mut busy: BTreeMap<usize, Duration> = BTreeMap::new();
        let mut pauses: BTreeMap<usize, Duration> = BTreeMap::new();
        let mut closed = false;
        loop {
            if writes.is_empty() {
                if waiting.is_empty() && receiver.recv_many(&mut waiting, GROUP_MAX).await == 0 {
                    return;
                }
            } else {
                // With one server, what comes in need not be looked at before the write has ended.
                let others = cluster && !closed && waiting.len() < GROUP_MAX;
                tokio::select! {
                    biased;
                    Some(Written { holder, left, failed }) = writes.next() => {
                        let pause = busy.remove(&holder).filter(|_| failed);
                        pause.map(|pause| pauses.insert(holder, (pause * 2).min(RETRY_MAX)));
                        waiting.splice(0..0, left);
                    }
                    count = receiver.recv_many(&mut waiting, GROUP_MAX), if others => {
                        closed = count == 0;
                    }
                }
            }
            while waiting.len() < GROUP_MAX {
                match receiver.try_recv() {
                    Ok(item) => waiting.push(item),
                    Err(_) => break,
                }
            }
            give_up_late(&mut waiting);
            let mut ready: BTreeMap<usize, Vec<Item>> = BTreeMap::new();
            for item in std::mem::take(&mut waiting) {
                let holder = queue.link().holder(queue.keys(item.shard));
                if busy.contains_key(&holder) {
                    waiting.push(item);
                } else {
                    ready.entry(holder).or_default().push(item);
                }
            }
            for (holder, items) in ready {
                let pause = pauses.remove(&holder).unwrap_or(RETRY_FIRST);
                busy.insert(holder, pause);
                writes.push(outlet.write(holder, items, pause));
            }
        }
    };
    (Commits(sender), task)
}

/// Drops what must not be sent any more. The lease runs out and the events are handed out again.
fn give_up_late(waiting: &mut Vec<Item>) {
    let now = Instant::now();
    for item in std::mem::take(waiting) {
        if item.deadline > now {
            waiting.push(item);
        } else {
            let verdict = if item.unanswered { Committed::Unknown } else { Committed::Stale };
            // The worker may have stopped waiting.
            let _ = item.reply.send(verdict);
        }
    }
}

/// What a write needs.
#[derive(Clone, Copy)]
struct Writer<'a> {
    queue: &'a Queue,
    dead_max: u64,
    board: &'a Board,
    metrics: &'a PipelineMetrics,
}

/// How a write ended.
struct Written {
    holder: usize,
    /// What is to be sent again.
    left: Vec<Item>,
    failed: bool,
}

impl Writer<'_> {
    /// Sends completions to one server in one write. After one that failed it waits for `pause`.
    async fn write(self, holder: usize, mut items: Vec<Item>, pause: Duration) -> Written {
        let Self { queue, dead_max, board, metrics } = self;
        let written = commit_group(queue, dead_max, board, metrics, &mut items).await;
        if let Err(error) = &written {
            if let Some(suppressed) = COMPLETIONS.failed() {
                warn!(pipeline = %queue.name(), completions = items.len(), %error, suppressed,
                    "completions were not answered; trying again while the leases last");
            }
            tokio::time::sleep(pause).await;
        } else if let Some(Recovered { lasted, failures }) = COMPLETIONS.succeeded() {
            info!(?lasted, failures, "completions are answered again");
        }
        Written { holder, left: items, failed: written.is_err() }
    }
}

/// Sends all of `waiting` in one write. What got no answer stays in it.
async fn commit_group(
    queue: &Queue,
    dead_max: u64,
    board: &Board,
    metrics: &PipelineMetrics,
    waiting: &mut Vec<Item>,
) -> Result<(), StoreError> {
    let mut shards: BTreeMap<Shard, Vec<Vec<Item>>> = BTreeMap::new();
    for item in waiting.drain(..) {
        let groups = shards.entry(item.shard).or_default();
        // The script takes each bot once: a renewal and its slice's end go in separate calls.
        let accounts = |item: &Item| {
            item.completion.leaving.as_ref().map_or(0, |leaving| leaving.accounts.len())
        };
        let fits = |group: &Vec<Item>| {
            group.len() < CALL_MAX
                && group.iter().map(accounts).sum::<usize>() + accounts(&item) <= CALL_ACCOUNTS
                && !group.iter().any(|other| other.completion.bot == item.completion.bot)
        };
        match groups.last_mut() {
            Some(group) if fits(group) => group.push(item),
            _ => groups.push(vec![item]),
        }
    }
    let groups: Vec<(Shard, Vec<Item>)> = shards
        .into_iter()
        .flat_map(|(shard, groups)| groups.into_iter().map(move |group| (shard, group)))
        .collect();
    if groups.is_empty() {
        return Ok(());
    }
    let completions: Vec<Vec<Completion>> = groups
        .iter()
        .map(|(_, group)| group.iter().map(|item| item.completion.clone()).collect())
        .collect();
    let ledger = queue.ledger().is_some();
    let calls: Vec<Complete<'_>> = groups
        .iter()
        .zip(&completions)
        .map(|((shard, _), items)| Complete { keys: queue.keys(*shard), dead_max, ledger, items })
        .collect();
    let replies = match queue.link().call_all(&calls).await {
        Ok(replies) => replies,
        Err(error) => {
            // Only a connection that was never made leaves no doubt.
            let unanswered = !matches!(error, StoreError::Connect { .. });
            for (_, group) in groups {
                waiting.extend(group.into_iter().map(|mut item| {
                    item.unanswered |= unanswered;
                    item
                }));
            }
            return Err(error);
        }
    };
    let mut failed = None;
    for ((shard, group), reply) in groups.into_iter().zip(replies) {
        match reply {
            Ok(completed) => {
                board.completed(shard, &completed);
                metrics.letters_removed.increment(completed.letters_removed);
                for (item, verdict) in group.into_iter().zip(&completed.verdicts) {
                    answer(item, *verdict);
                }
            }
            Err(error) => {
                // An answer that is not understood came from a call that ran; of one that gave
                // none it is unknown.
                let may_have =
                    matches!(error, StoreError::Reply { .. } | StoreError::Unknown { .. });
                waiting.extend(group.into_iter().map(|mut item| {
                    item.unanswered |= may_have;
                    item
                }));
                failed = Some(error);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

fn answer(item: Item, verdict: Verdict) {
    let committed = match verdict {
        Verdict::Ok => Committed::Done,
        Verdict::Full => Committed::Full,
        Verdict::Stale | Verdict::Bad if item.unanswered => Committed::Unknown,
        Verdict::Stale => Committed::Stale,
        Verdict::Bad => {
            tracing::error!(bot = %item.completion.bot, fence = %item.completion.fence,
                "a completion does not fit its lease: this is a defect of Fairlane");
            Committed::Stale
        }
    };
    let _ = item.reply.send(committed);
}
