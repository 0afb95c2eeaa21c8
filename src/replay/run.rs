//! A run of a replay: its progress, and its steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::put::Encoded;
use super::{Copied, MARK, Page, Place, Replay, ReplayRefused, Spec};
use crate::clock::millis;
use crate::id::BotId;
use crate::redis::{Link, RedisError, Reply, ReplyError, keys, pages};

/// How long a run is remembered after its last step.
const KEEP: Duration = Duration::from_secs(7 * 86_400);
/// The same for a run that is done, or that put nothing: enough to repeat a call. Such runs cost their
/// callers little, so they must not fill Redis.
const KEEP_SHORT: Duration = Duration::from_secs(600);
/// How long the positions of its bots are remembered: they must not end before the run.
pub(super) const KEEP_POSITIONS: Duration = Duration::from_secs(30 * 86_400);
/// With more held bots, a run does not go on. More than a page can add.
const HELD_MAX: usize = 1_000;
/// Maximum number of pages without a match that a step without a deadline reads.
const PAGES_MAX: usize = 100;
/// Maximum length of an id.
pub(crate) const ID_MAX: usize = 64;

/// The progress of a replay, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) id: String,
    pub(crate) spec: Spec,
    /// Number of events that match, if they were counted at the start.
    pub(crate) matched: Option<u64>,
    /// Number of events that were put.
    pub(crate) put: u64,
    /// Number of events of held bots that were read and not put.
    pub(crate) waiting: u64,
    /// What the fan-out had copied at the start. It does not copy that again.
    copied: Copied,
    /// Everything up to here is put, except events of held bots.
    place: Place,
    /// Bots whose queues are full, with the place behind which their events are missing.
    held: BTreeMap<BotId, (Place, String)>,
    /// Only these bots miss events.
    only: Option<BTreeSet<BotId>>,
    over: bool,
    /// Whether it tries held bots again.
    again: bool,
    /// Number of entries of the next page. A step goes on with what the previous one learned.
    #[serde(default = "page_first")]
    page: usize,
    /// Whether Redis has it.
    #[serde(skip)]
    stored: bool,
}

/// For runs that were stored without it.
fn page_first() -> usize {
    pages::FIRST
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// Number of events that it put.
    pub(crate) put: u64,
    /// Number of events that an earlier step had put already, for example before an interruption.
    pub(crate) earlier: u64,
    /// Whether another step can put more.
    pub(crate) more: bool,
}

impl Run {
    /// Whether everything is put.
    pub(crate) fn is_done(&self) -> bool {
        self.over && self.held.is_empty()
    }

    /// Whether a later call can continue it by its id.
    pub(crate) fn is_stored(&self) -> bool {
        self.stored
    }

    /// Whether everything was read.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Whether it holds so many bots that it cannot go on before it tries them again.
    pub(crate) fn is_crowded(&self) -> bool {
        self.held.len() > HELD_MAX
    }

    /// The bots whose queues are full, each with the limit.
    pub(crate) fn held(&self) -> impl ExactSizeIterator<Item = (&BotId, &str)> {
        self.held.iter().map(|(bot, (_, why))| (bot, why.as_str()))
    }

    /// Reads a run.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn load(link: &Link, id: &str) -> Result<Option<Self>, RedisError> {
        let command = redis::Cmd::get(keys::replay(link.prefix(), id));
        let stored = link.command("GET", command).await?;
        let text = Reply::single(stored).and_then(|mut reply| reply.bytes());
        let misread = |source: ReplyError| link.misread("GET", source);
        let Some(text) = text.map_err(misread)? else { return Ok(None) };
        let read = serde_json::from_slice(&text).map(|run| Self { stored: true, ..run });
        read.map(Some).map_err(|_| misread(ReplyError::unexpected("a replay", "another text")))
    }

    /// Stores it at the end of a step, except if it is done and Redis never had it.
    async fn save(&mut self, link: &Link) -> Result<(), RedisError> {
        if self.is_done() && !self.stored {
            return Ok(());
        }
        let is_short = self.is_done() || self.put == 0;
        self.store(link, if is_short { KEEP_SHORT } else { KEEP }).await
    }

    async fn store(&mut self, link: &Link, keep: Duration) -> Result<(), RedisError> {
        let text = serde_json::to_string(self)
            .expect("texts, numbers, and maps by texts or numbers are values of JSON");
        let mut command = redis::cmd("SET");
        command.arg(keys::replay(link.prefix(), &self.id)).arg(text);
        command.arg("PX").arg(millis(keep));
        link.command("SET", command).await?;
        self.stored = true;
        Ok(())
    }

    /// Prepares to try the held bots again.
    pub(crate) fn retry(&mut self) {
        let Some(first) = self.held.values().map(|(place, _)| *place).min() else { return };
        if self.over {
            self.only = Some(self.held.keys().cloned().collect());
        }
        self.place = self.place.min(first);
        self.held.clear();
        (self.over, self.waiting, self.again) = (false, 0, true);
    }
}

impl Replay {
    /// Starts a run, or continues the one with this id. A new run is not stored yet: see
    /// [`Self::step`].
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. The inner error: the run with this id replays something
    /// else.
    pub(crate) async fn run(
        &self,
        id: &str,
        matched: Option<(u64, Copied)>,
    ) -> Result<Result<Run, ReplayRefused>, RedisError> {
        let link = self.queue.link();
        if let Some(run) = Run::load(link, id).await? {
            if run.spec != self.spec {
                return Ok(Err(ReplayRefused::Other(id.to_owned())));
            }
            return Ok(Ok(run));
        }
        let (matched, copied) = match matched {
            Some((matched, copied)) => (Some(matched), copied),
            None => (None, self.copied().await?),
        };
        Ok(Ok(Run {
            id: id.to_owned(),
            spec: self.spec.clone(),
            matched,
            put: 0,
            waiting: 0,
            copied,
            place: self.start(),
            held: BTreeMap::new(),
            only: None,
            over: false,
            again: false,
            page: pages::FIRST,
            stored: false,
        }))
    }

    /// Puts up to `max` more events, and stores the run.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. The step can be repeated.
    pub(crate) async fn step(&self, run: &mut Run, max: usize) -> Result<Step, RedisError> {
        self.step_until(run, max, None).await
    }

    /// The same. After the deadline, it reads no further page.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(crate) async fn step_until(
        &self,
        run: &mut Run,
        max: usize,
        deadline: Option<Instant>,
    ) -> Result<Step, RedisError> {
        let link = self.queue.link();
        if run.over || self.is_over(run.place) {
            run.over = true;
            self.end(run).await?;
            return Ok(Step { put: 0, earlier: 0, more: false });
        }
        let (place, mut page) = self.find(run, max, deadline).await?;
        let next = match page.events.get(max) {
            Some(_) => {
                page.events.truncate(max);
                let last = page.events.last().map_or(place.after, |(at, _)| (at.ms, at.seq));
                Place { after: last, ..place }
            }
            None => page.next,
        };
        let mut of_bots: BTreeMap<BotId, Vec<Encoded>> = BTreeMap::new();
        for found in page.events {
            if !self.is_copied(&run.copied, place.stream, &found) {
                continue;
            }
            let (offset, event) = found;
            let bot = event.bot();
            if run.only.as_ref().is_some_and(|only| !only.contains(bot)) {
                continue;
            }
            if run.held.contains_key(bot) {
                run.waiting += 1;
                continue;
            }
            let bot = bot.clone();
            let event = event.with_extension(MARK, Some(run.id.clone().into()));
            of_bots.entry(bot).or_default().push((offset, event.encode()));
        }
        if !of_bots.is_empty() && !run.stored {
            // Whoever continues an interrupted run needs its settings and what was copied.
            run.store(link, KEEP).await?;
        }
        let done = self.put(&run.id, place, &of_bots).await?;
        // What was put before an interruption is not counted yet.
        run.put += done.events + if run.again { 0 } else { done.earlier };
        run.held.extend(done.held);
        run.waiting += done.refused;
        (run.place, run.over) = (next, self.is_over(next));
        self.end(run).await?;
        Ok(Step { put: done.events, earlier: done.earlier, more: !run.over && !run.is_crowded() })
    }

    /// Stores the run after a step. With a run that is done, the positions of its bots are forgotten soon: a
    /// later run with the same id would put nothing before them.
    async fn end(&self, run: &mut Run) -> Result<(), RedisError> {
        let link = self.queue.link();
        if run.is_done() && run.stored {
            let shards = self.queue.shards();
            let mut forgetting = redis::Pipeline::with_capacity(shards.len());
            for keys in shards.iter() {
                forgetting
                    .cmd("PEXPIRE")
                    .arg(keys.replay(&run.id))
                    .arg(millis(KEEP_SHORT))
                    .arg("LT");
            }
            link.run_checked("PEXPIRE", &forgetting).await?;
        }
        run.save(link).await
    }

    /// Reads pages up to one with a match, or to the deadline: pages without a match cost one call each.
    /// Returns the last page, with the place behind which it was read.
    async fn find(
        &self,
        run: &mut Run,
        max: usize,
        deadline: Option<Instant>,
    ) -> Result<(Place, Page), RedisError> {
        let mut place = run.place;
        // Earlier versions stored runs with larger pages. A small step does not read a large page for a
        // few events.
        let size = run.page.min(pages::MAX).min(max.max(pages::FIRST));
        let mut page = self.page(run, place, size).await?;
        let mut pages = 1;
        let may_read = |pages| match deadline {
            Some(deadline) => Instant::now() < deadline,
            None => pages < PAGES_MAX,
        };
        while page.events.is_empty() && !self.is_over(page.next) && may_read(pages) {
            place = page.next;
            page = self.page(run, place, page.size).await?;
            pages += 1;
        }
        Ok((place, page))
    }

    /// Reads a page of a run, which learns the size of its next one.
    async fn page(&self, run: &mut Run, place: Place, size: usize) -> Result<Page, RedisError> {
        let read = self.read(place, size).await;
        match &read {
            Ok(page) => run.page = page.size,
            // Without an answer, the page may have been too large.
            Err(error) if error.may_have_run() => {
                run.page = (size / 2).max(1);
                if run.stored {
                    // If it is not stored, a later step asks for as many entries again. Events may be put
                    // that are not counted, because the answer was lost: it is kept for long.
                    let _ = run.store(self.queue.link(), KEEP).await;
                }
            }
            Err(_) => {}
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::PipelineName;

    fn place(stream: usize, ms: u64) -> Place {
        Place { stream, after: (ms, 0) }
    }

    fn run() -> Run {
        let spec = Spec {
            pipeline: PipelineName::parse("p").unwrap(),
            bot: None,
            types: Vec::new(),
            from_ms: 1,
            until_ms: 10,
            streams: vec!["s".to_owned()],
        };
        Run {
            id: "r".to_owned(),
            spec,
            matched: None,
            put: 0,
            waiting: 3,
            copied: Copied::default(),
            place: place(1, 0),
            held: BTreeMap::new(),
            only: None,
            over: true,
            again: false,
            page: 40,
            stored: false,
        }
    }

    #[test]
    fn a_run_goes_back_to_the_first_event_that_a_held_bot_misses() {
        let bot = |id: &str| BotId::parse(id).unwrap();
        let mut over = run();
        assert!(over.is_done());
        over.held.insert(bot("a"), (place(0, 7), String::new()));
        over.held.insert(bot("b"), (place(0, 5), String::new()));
        let (mut before, text) = (over.clone(), serde_json::to_string(&over).unwrap());
        assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), over);
        over.retry();
        assert_eq!((over.place, over.waiting, over.over), (place(0, 5), 0, false));
        assert_eq!(over.only, Some([bot("a"), bot("b")].into()));
        // Not at the end, the other bots miss events too.
        (before.over, before.place) = (false, place(0, 9));
        before.retry();
        assert_eq!((before.place, before.only), (place(0, 5), None));
    }

    #[test]
    fn a_run_that_was_stored_without_the_size_of_its_page_can_be_read() {
        let mut stored = serde_json::to_value(run()).unwrap();
        assert_eq!(stored["page"].take(), 40);
        stored.as_object_mut().unwrap().remove("page");
        let read: Run = serde_json::from_value(stored).unwrap();
        assert_eq!(read, Run { page: pages::FIRST, ..run() });
    }
}
