//! Random operations on bots with lanes: nothing is lost, and every count agrees with the lists.

use std::collections::BTreeSet;
use std::sync::Arc;

use fairlane::id::{BotId, Fence, Lane};
use fairlane::redis::aside::{Aside, Waiting};
use fairlane::redis::scripts::{
    AsideChange, Completion, Exception, Fate, Mode, Pause, Purge, Redrive, Resume, Revoke, Verdict,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use redis::Commands;

use super::super::{LIMITS, NOW, SLICE_US, Shard, TTL_MS, bot, dead};

const BOTS: [&str; 2] = ["x", "y"];

type List = Vec<Vec<u8>>;
/// What Redis has of a bot: its queue and three lanes, how many events it counts in these lanes and how many
/// bytes in all, its text, its scores in `ready` and `busy`, and whether it is paused.
type Seen = (
    List,
    List,
    List,
    List,
    Option<usize>,
    Option<usize>,
    Option<String>,
    Option<f64>,
    Option<f64>,
    bool,
);

/// A lease as its holder knows it.
struct Held {
    bot: BotId,
    run: Arc<str>,
    fence: Fence,
    before: usize,
    aside: Aside,
}

struct Course {
    shard: Shard,
    random: StdRng,
    now: i64,
    next: u32,
    held: Vec<Held>,
    /// The events that must be queued, and those that are dead letters.
    queued: BTreeSet<(String, u32)>,
    letters: BTreeSet<(String, u32)>,
}

fn number(record: &[u8]) -> u32 {
    std::str::from_utf8(&record[11..]).unwrap().trim_start_matches('0').parse().unwrap_or(0)
}

fn lane_of(event: u32) -> Lane {
    Lane::from_digits(&(event % 3).to_string()).unwrap()
}

impl Course {
    fn list(&mut self, key: &str) -> Vec<Vec<u8>> {
        self.shard.harness.plain().lrange(key, 0, -1).unwrap()
    }

    fn complete(&mut self, at: usize) {
        let keys = self.shard.keys.clone();
        let (bot, aside) = (self.held[at].bot.clone(), self.held[at].aside.clone());
        let lanes: Vec<Lane> = aside.lanes().iter().map(|waiting| waiting.lane).collect();
        let list = (!lanes.is_empty() && self.random.random_bool(0.5))
            .then(|| lanes[self.random.random_range(0..lanes.len())]);
        let key = list.map_or_else(|| keys.queue(&bot), |lane| keys.lane(lane, &bot));
        let records = self.list(&key);
        let n = self.random.random_range(0..=records.len().min(4));
        let mut after = aside.clone();
        after.tag = 3;
        let (mut exceptions, mut done, mut buried) = (Vec::new(), Vec::new(), Vec::new());
        let waiting = |after: &mut Aside, lane, random: &mut StdRng| {
            let due_ms = random.random_range(0..2_000);
            after.set(Waiting { lane, due_ms, attempts: 1, alone: 0 });
        };
        for (index, record) in records[..n].iter().enumerate() {
            let event = number(record);
            let moves = list.is_none()
                && (after.get(lane_of(event)).is_some() || self.random.random_bool(0.3));
            if moves {
                waiting(&mut after, lane_of(event), &mut self.random);
                exceptions.push(Exception { index, fate: Fate::Lane(lane_of(event)) });
            } else if self.random.random_bool(0.1) {
                exceptions.push(dead(index));
                buried.push(event);
            } else {
                done.push(event);
            }
        }
        if let Some(lane) = list {
            if n == records.len() {
                after.remove(lane);
            } else {
                waiting(&mut after, lane, &mut self.random);
            }
        }
        let next_ms = [0, 500][self.random.random_range(0..2)];
        let mode = match self.random.random_range(0..5) {
            0 => Mode::Keep { ttl_ms: TTL_MS },
            1 => Mode::Park { ms: 700 },
            _ => Mode::Release,
        };
        let held = &self.held[at];
        let item = Completion {
            bot: bot.clone(),
            run: Arc::clone(&held.run),
            fence: held.fence,
            before: held.before,
            n,
            bytes: records[..n].iter().map(|record| record.len() as u64).sum(),
            mode,
            cost: 10,
            exceptions,
            leaving: None,
            aside: (!aside.is_empty() || !after.is_empty()).then(|| AsideChange {
                aside: after.clone(),
                next_ms,
                list,
            }),
        };
        let times = if self.random.random_bool(0.2) { 2 } else { 1 };
        let mut verdict = Verdict::Bad;
        for time in 0..times {
            let again = self.shard.complete(self.now, 1_000, std::slice::from_ref(&item));
            if time == 0 {
                verdict = again.verdicts[0];
            }
        }
        if verdict == Verdict::Ok {
            for event in done.into_iter().chain(buried.iter().copied()) {
                assert!(self.queued.remove(&(bot.to_string(), event)), "{event} left twice");
            }
            self.letters.extend(buried.into_iter().map(|event| (bot.to_string(), event)));
        }
        if matches!(mode, Mode::Keep { .. }) && verdict == Verdict::Ok {
            let held = &mut self.held[at];
            (held.before, held.aside) = (held.before + n, after);
        } else if self.random.random_bool(0.8) {
            self.held.remove(at);
        }
    }

    fn step(&mut self) {
        let (keys, slice_us) = (self.shard.keys.clone(), SLICE_US);
        let name = BOTS[self.random.random_range(0..2)];
        let id = bot(name);
        match self.random.random_range(0..20) {
            0..5 => {
                let count = self.random.random_range(1..4);
                let events: Vec<u32> = (self.next..self.next + count).collect();
                self.next += count;
                let texts: Vec<String> = events.iter().map(|event| format!("{event:04}")).collect();
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                self.shard.push(self.now, name, &texts, LIMITS);
                self.queued.extend(events.into_iter().map(|event| (name.to_owned(), event)));
            }
            5..9 => {
                let claimed = self.shard.claim(self.now);
                let run = &claimed.run;
                self.held.extend(claimed.leases.iter().map(|grant| Held {
                    bot: grant.bot.clone(),
                    run: Arc::clone(run),
                    fence: grant.fence,
                    before: 0,
                    aside: grant.aside.clone(),
                }));
            }
            9..15 if !self.held.is_empty() => {
                let at = self.random.random_range(0..self.held.len());
                self.complete(at);
            }
            15 => self.now += 600_000,
            16 if self.random.random_bool(0.1) => {
                let count = self.shard.call(self.now, &Purge { keys: &keys, bot: &id });
                let before = self.queued.len();
                self.queued.retain(|(of, _)| of != name);
                assert_eq!(count, (before - self.queued.len()) as u64, "purge counts all");
            }
            17 => drop(self.shard.call(self.now, &Revoke { keys: &keys, bot: &id, slice_us })),
            18 if self.random.random_bool(0.5) => {
                self.shard.call(
                    self.now,
                    &Pause { keys: &keys, bot: Some(&id), note: "", replaces: false },
                );
            }
            19 => {
                if let Some(letter) = self.shard.letters().first().copied() {
                    let (keys, renews) = (&keys, false);
                    let call = Redrive { keys, id: letter, bot: &id, slice_us, renews };
                    let letters: Vec<(String, u32)> = self.letters.iter().cloned().collect();
                    if self.shard.call(self.now, &call) {
                        let back: Vec<_> =
                            letters.into_iter().filter(|(of, _)| of == name).collect();
                        // One of them is queued again: the one that is there now.
                        let all = self.all(&id);
                        let one = back.into_iter().find(|(_, event)| all.contains(event)).unwrap();
                        self.letters.remove(&one);
                        self.queued.insert(one);
                    }
                }
            }
            _ => {
                self.shard.call(self.now, &Resume { keys: &keys, bot: Some(&id), slice_us });
            }
        }
    }

    /// The events of a bot in all its lists.
    fn all(&mut self, id: &BotId) -> Vec<u32> {
        let keys = self.shard.keys.clone();
        let mut lists = vec![keys.queue(id)];
        lists.extend(Lane::all().take(3).map(|lane| keys.lane(lane, id)));
        lists.iter().flat_map(|key| self.list(key)).map(|record| number(&record)).collect()
    }

    /// Asks in one call: there are thousands of checks.
    fn seen(&mut self, name: &str) -> Seen {
        let (keys, id) = (self.shard.keys.clone(), bot(name));
        let mut look = redis::pipe();
        look.lrange(keys.queue(&id), 0, -1);
        for lane in Lane::all().take(3) {
            look.lrange(keys.lane(lane, &id), 0, -1);
        }
        for kind in ["a", "q"] {
            look.hget(keys.held(), format!("{kind}{name}"));
        }
        look.hget(keys.attempts(), name).zscore(keys.ready(), name).zscore(keys.busy(), name);
        look.sismember(keys.paused(), name).query(self.shard.harness.plain()).unwrap()
    }

    fn check(&mut self) {
        let (mut depth, mut with_lanes) = (0, 0);
        for name in BOTS {
            let (queue, first, second, third, aside, bytes, text, ready, busy, paused) =
                self.seen(name);
            let lists = [first, second, third].concat();
            let mut found: Vec<u32> = queue.iter().chain(&lists).map(|r| number(r)).collect();
            found.sort_unstable();
            let of_bot = self.queued.iter().filter(|(of, _)| of == name);
            let expected: Vec<u32> = of_bot.map(|(_, event)| *event).collect();
            assert_eq!(found, expected, "nothing is lost or doubled");
            depth += found.len();
            assert_eq!(aside.unwrap_or(0), lists.len());
            let total = queue.iter().chain(&lists).map(Vec::len).sum::<usize>();
            if bytes.is_some() || !lists.is_empty() {
                assert_eq!(bytes, Some(total), "its bytes are exact");
            }
            let has_lanes = text.is_some_and(|text| text.split('|').nth(4).is_some());
            assert_eq!(has_lanes, !lists.is_empty(), "the text has the lanes");
            with_lanes += i64::from(has_lanes);
            assert!(ready.is_none() || busy.is_none(), "{name} is in one place");
            let somewhere = ready.is_some() || busy.is_some() || paused;
            assert!(found.is_empty() || somewhere, "{name} is forgotten");
        }
        assert_eq!(self.shard.meta("depth"), i64::try_from(depth).unwrap());
        assert_eq!(self.shard.meta("lanes"), with_lanes);
    }
}

#[test]
fn whatever_happens_nothing_is_lost_and_every_count_agrees_with_the_lists() {
    for seed in 0..40 {
        let shard = Shard::new();
        let random = StdRng::seed_from_u64(seed);
        let (held, queued, letters) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut run = Course { shard, random, now: NOW, next: 1, held, queued, letters };
        for _ in 0..150 {
            run.now += 1_000;
            run.step();
            run.check();
        }
    }
}
