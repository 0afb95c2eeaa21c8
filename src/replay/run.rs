//! A run of a replay: its progress, and its steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Copied, MARK, PAGE_FIRST, Place, Replay, ReplayRefused, Spec};
use crate::clock::millis;
use crate::id::{BotId, Offset};
use crate::redis::scripts::{self, Refused};
use crate::redis::{Link, RedisError, Reply, ReplyError, keys};

/// How long a run is remembered after its last step.
const KEEP: Duration = Duration::from_secs(7 * 86_400);
/// How long the positions of its bots are remembered: they must not end before the run.
const KEEP_POSITIONS: Duration = Duration::from_secs(30 * 86_400);
/// Maximum number of bots that a run holds.
const HELD_MAX: usize = 1_000;
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

    /// Whether everything was read.
    pub(crate) fn is_over(&self) -> bool {
        self.over
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
        let read = serde_json::from_slice(&text);
        read.map(Some).map_err(|_| misread(ReplyError::unexpected("a replay", "another text")))
    }

    async fn save(&self, link: &Link) -> Result<(), RedisError> {
        let text = serde_json::to_string(self).expect("texts and numbers are serialisable");
        let mut command = redis::cmd("SET");
        command.arg(keys::replay(link.prefix(), &self.id)).arg(text);
        command.arg("PX").arg(millis(KEEP));
        link.command("SET", command).await.map(drop)
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
    /// Starts a run, or continues the one with this id.
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
        let run = Run {
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
        };
        run.save(link).await?;
        Ok(Ok(run))
    }

    /// Puts up to `max` more events.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. The step can be repeated.
    pub(crate) async fn step(&self, run: &mut Run, max: usize) -> Result<Step, RedisError> {
        let mut step = Step { put: 0, earlier: 0, more: false };
        let mut place = run.place;
        if run.over || self.is_over(place) {
            run.over = true;
            run.save(self.queue.link()).await?;
            return Ok(step);
        }
        let mut page = self.read(place, max.clamp(1, PAGE_FIRST)).await?;
        // Pages without a match cost one call each.
        let mut pages = 1;
        while page.events.is_empty() && !self.is_over(page.next) && pages < 100 {
            place = page.next;
            page = self.read(place, page.size).await?;
            pages += 1;
        }
        let next = match page.events.get(max) {
            Some(_) => {
                page.events.truncate(max);
                let last = page.events.last().map_or(place.after, |(at, _)| (at.ms, at.seq));
                Place { after: last, ..place }
            }
            None => page.next,
        };
        let mut of_bots: BTreeMap<BotId, Vec<(Offset, Vec<u8>)>> = BTreeMap::new();
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
        let calls: Vec<_> = of_bots
            .iter()
            .map(|(bot, events)| scripts::Replay {
                keys: self.queue.keys_of(bot),
                limits: self.queue.limits_of(bot),
                id: &run.id,
                keep_ms: millis(KEEP_POSITIONS),
                stream: place.stream,
                bot,
                events,
            })
            .collect();
        let answers =
            if calls.is_empty() { Vec::new() } else { self.queue.link().call_all(&calls).await? };
        let mut held = Vec::new();
        let mut waiting = 0;
        for (answer, (bot, events)) in answers.into_iter().zip(&of_bots) {
            // Without this answer, the place stays: the next step puts the rest.
            let answer = answer?;
            step.put += answer.put;
            step.earlier += answer.earlier;
            if let Some(why) = answer.refused {
                let why = match why {
                    Refused::MaxQueue => "max_queue",
                    Refused::QueuedBytes => "quotas.queued_bytes",
                };
                held.push((bot.clone(), (place, why.to_owned())));
                waiting += events.len() as u64 - answer.put - answer.earlier;
            }
        }
        // What was put before an interruption is not counted yet.
        run.put += step.put + if run.again { 0 } else { step.earlier };
        let crowded = run.held.len() + held.len() > HELD_MAX && !run.held.is_empty();
        run.held.extend(held);
        run.waiting += waiting;
        (run.place, run.over) = (next, self.is_over(next));
        run.save(self.queue.link()).await?;
        step.more = !run.over && !crowded;
        Ok(step)
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
}
