//! Profiles that this process read or wrote recently, so that it need not read them again.
//!
//! Another process may have changed a profile since. So a profile from here is only a guess at the
//! stored state, and MongoDB confirms it by its sequence: a write applies only to that state, and an
//! event without a write is followed by a check. A profile is taken out to be used, and comes back
//! only with MongoDB's confirmation. After a failure, a conflict or a cancellation it is gone, and
//! the next slice reads it.
//!
//! A wrong guess costs a retry. Where several processes share the bots, each bot soon moves to another
//! process, and most guesses would be wrong. So after a wrong guess nothing is kept for a pause. The
//! pause doubles with each wrong guess, and is forgotten after ten times its length.
//!
//! There are two generations, and a used profile moves to the younger one. A bot that exceeds its
//! share of a generation loses its own profiles, and no others.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::memory::of_json;
use super::subscribers::Kept;
use crate::id::BotId;

/// Maximum number of profiles, and of bytes, per generation.
const ENTRIES_MAX: usize = 32_768;
const BYTES_MAX: usize = 16 << 20;
/// The part of a generation that one bot may fill.
const SHARE: usize = 16;
/// A profile is read again after this time, because a person may have edited its document without a
/// new sequence.
const LIFE: Duration = Duration::from_secs(60);
/// The first and the longest pause after a wrong guess.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// The size of an entry without the texts in it, and of each part of a profile, in bytes.
const ENTRY: usize = 256;
const PART: usize = 64;

/// Recent profiles of all bots of a process.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    young: Generation,
    old: Generation,
    pause: Option<Pause>,
}

#[derive(Debug, Clone, Copy)]
struct Pause {
    since: Instant,
    length: Duration,
}

#[derive(Debug, Default)]
struct Generation {
    bots: FxHashMap<BotId, Known>,
    held: Held,
}

/// The profiles of one bot.
#[derive(Debug, Default)]
struct Known {
    subscribers: FxHashMap<Box<str>, Entry>,
    held: Held,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    bytes: usize,
    read: Instant,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Held {
    entries: usize,
    bytes: usize,
}

impl Recent {
    /// Takes out the last known state of a subscriber, and when it was read.
    pub(crate) fn take(&self, bot: &BotId, subscriber: &str) -> Option<(Kept, Instant)> {
        let Generations { young, old, .. } = &mut *self.generations();
        let entry = young.remove(bot, subscriber);
        // An older state in the other generation, if any, is no better.
        let entry = entry.or_else(|| old.remove(bot, subscriber))?;
        (entry.read.elapsed() < LIFE).then_some((entry.kept, entry.read))
    }

    /// Keeps states that MongoDB has confirmed, each with the time when its document was read.
    pub(crate) fn keep(
        &self,
        bot: &BotId,
        states: impl IntoIterator<Item = (String, Kept, Instant)>,
    ) {
        let mut generations = self.generations();
        if generations.pauses() {
            return;
        }
        for (subscriber, kept, read) in states {
            let bytes = size_of(&subscriber, &kept);
            generations.keep(bot, subscriber, Entry { kept, bytes, read });
        }
    }

    /// Forgets everything after a wrong guess, and keeps nothing for a pause.
    pub(crate) fn was_wrong(&self) {
        let mut generations = self.generations();
        if generations.pauses() {
            return;
        }
        let last = generations.pause.filter(|pause| pause.since.elapsed() < 10 * pause.length);
        let length = last.map_or(PAUSE_MIN, |pause| (2 * pause.length).min(PAUSE_MAX));
        let pause = Some(Pause { since: Instant::now(), length });
        *generations = Generations { pause, ..Generations::default() };
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    fn pauses(&self) -> bool {
        self.pause.is_some_and(|pause| pause.since.elapsed() < pause.length)
    }

    fn keep(&mut self, bot: &BotId, subscriber: String, entry: Entry) {
        let added = Held { entries: 1, bytes: entry.bytes };
        let own = added.above(ENTRIES_MAX / SHARE, BYTES_MAX / SHARE);
        self.old.remove(bot, &subscriber);
        self.young.remove(bot, &subscriber);
        if own {
            return;
        }
        let held = self.young.bots.get(bot).map_or_else(Held::default, |known| known.held);
        if held.and(added).above(ENTRIES_MAX / SHARE, BYTES_MAX / SHARE) {
            self.young.forget(bot);
        }
        if self.young.held.and(added).above(ENTRIES_MAX, BYTES_MAX) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.held = self.young.held.and(added);
        let known = self.young.bots.entry(bot.clone()).or_default();
        known.held = known.held.and(added);
        known.subscribers.insert(subscriber.into(), entry);
    }
}

impl Generation {
    fn remove(&mut self, bot: &BotId, subscriber: &str) -> Option<Entry> {
        let known = self.bots.get_mut(bot)?;
        let entry = known.subscribers.remove(subscriber)?;
        let removed = Held { entries: 1, bytes: entry.bytes };
        known.held = known.held.without(removed);
        self.held = self.held.without(removed);
        if known.subscribers.is_empty() {
            self.bots.remove(bot);
        }
        Some(entry)
    }

    fn forget(&mut self, bot: &BotId) {
        if let Some(known) = self.bots.remove(bot) {
            self.held = self.held.without(known.held);
        }
    }
}

impl Held {
    fn and(self, other: Self) -> Self {
        Self { entries: self.entries + other.entries, bytes: self.bytes + other.bytes }
    }

    fn without(self, other: Self) -> Self {
        Self { entries: self.entries - other.entries, bytes: self.bytes - other.bytes }
    }

    fn above(self, entries: usize, bytes: usize) -> bool {
        self.entries > entries || self.bytes > bytes
    }
}

/// The approximate size of an entry in memory, in bytes.
pub(super) fn size_of(subscriber: &str, kept: &Kept) -> usize {
    let tags: usize = kept.profile.tags.iter().map(|tag| PART + tag.len()).sum();
    let fields = kept.profile.fields.iter().map(|(name, json)| PART + name.len() + of_json(json));
    let decided: usize = kept.decided.iter().map(|(_, text)| PART + text.len()).sum();
    ENTRY + subscriber.len() + tags + fields.sum::<usize>() + decided
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Sequence;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    fn state(sequence: u64, bytes: usize) -> Kept {
        let sequence = Sequence::new(sequence);
        let decided = vec![(sequence, "x".repeat(bytes))];
        Kept { sequence: Some(sequence), decided, ..Kept::default() }
    }

    fn keep(recent: &Recent, bot: &BotId, subscriber: &str, kept: Kept) {
        recent.keep(bot, [(subscriber.to_owned(), kept, Instant::now())]);
    }

    fn held(recent: &Recent) -> Held {
        let generations = recent.generations();
        for generation in [&generations.young, &generations.old] {
            let bots = generation.bots.values();
            let sum = bots.fold(Held::default(), |sum, known| {
                assert_eq!(known.held.entries, known.subscribers.len());
                sum.and(known.held)
            });
            assert_eq!(sum, generation.held);
        }
        generations.young.held.and(generations.old.held)
    }

    #[test]
    fn a_profile_is_taken_out_once_and_comes_back_with_its_last_state() {
        let (recent, shop, other) = (Recent::default(), bot("shop"), bot("other"));
        keep(&recent, &shop, "u", state(1, 0));
        keep(&recent, &shop, "u", state(2, 0));
        assert_eq!(recent.take(&other, "u"), None);
        assert_eq!(recent.take(&shop, "u").unwrap().0, state(2, 0));
        assert_eq!(recent.take(&shop, "u"), None);
        assert_eq!(held(&recent), Held::default());
    }

    #[test]
    fn entries_and_bytes_are_bounded_and_used_profiles_stay() {
        let recent = Recent::default();
        let used = bot("used");
        keep(&recent, &used, "u", state(1, 0));
        for n in 0..3 * ENTRIES_MAX {
            keep(&recent, &bot(&format!("bot-{}", n % 1_000)), &n.to_string(), state(1, 0));
            if n % 1_000 == 0 {
                let (kept, read) = recent.take(&used, "u").unwrap();
                recent.keep(&used, [("u".to_owned(), kept, read)]);
                assert!(held(&recent).entries <= 2 * ENTRIES_MAX);
            }
        }
        let large = BYTES_MAX / SHARE / 4;
        for n in 0..200 {
            keep(&recent, &bot(&format!("bot-{n}")), "u", state(1, large));
            assert!(held(&recent).bytes <= 2 * BYTES_MAX, "{:?}", held(&recent));
        }
    }

    #[test]
    fn a_bot_with_many_or_large_profiles_evicts_only_its_own() {
        let (recent, quiet, loud) = (Recent::default(), bot("quiet"), bot("loud"));
        keep(&recent, &quiet, "u", state(1, 0));
        for n in 0..3 * ENTRIES_MAX {
            keep(&recent, &loud, &n.to_string(), state(1, 0));
        }
        assert!(held(&recent).entries <= ENTRIES_MAX / SHARE + 1, "{:?}", held(&recent));
        for n in 0..100 {
            keep(&recent, &loud, &n.to_string(), state(1, BYTES_MAX / SHARE / 3));
        }
        assert!(held(&recent).bytes <= BYTES_MAX / SHARE + 2 * ENTRY + PART);
        keep(&recent, &loud, "huge", state(1, BYTES_MAX));
        assert_eq!(recent.take(&loud, "huge"), None);
        assert!(recent.take(&quiet, "u").is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_profile_is_read_again_after_its_life_however_often_it_is_used() {
        let (recent, shop) = (Recent::default(), bot("shop"));
        keep(&recent, &shop, "u", state(1, 0));
        tokio::time::advance(LIFE / 2).await;
        let (kept, read) = recent.take(&shop, "u").unwrap();
        recent.keep(&shop, [("u".to_owned(), kept, read)]);
        tokio::time::advance(LIFE / 2).await;
        assert_eq!(recent.take(&shop, "u"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn wrong_guesses_stop_the_guessing_for_longer_and_longer() {
        let (recent, shop) = (Recent::default(), bot("shop"));
        let used = |recent: &Recent| {
            keep(recent, &shop, "u", state(1, 0));
            recent.take(&shop, "u").is_some()
        };
        let paused = async |recent: &Recent| {
            recent.was_wrong();
            let mut seconds = 0;
            while !used(recent) {
                recent.was_wrong();
                tokio::time::advance(Duration::from_secs(1)).await;
                seconds += 1;
            }
            seconds
        };
        assert!(used(&recent));
        keep(&recent, &shop, "other", state(1, 0));
        assert_eq!(paused(&recent).await, 1);
        assert_eq!(recent.take(&shop, "other"), None);
        let mut lengths = Vec::new();
        for _ in 0..9 {
            lengths.push(paused(&recent).await);
        }
        assert_eq!(lengths, [2, 4, 8, 16, 32, 64, 128, 256, 300]);
        tokio::time::advance(10 * PAUSE_MAX).await;
        assert_eq!(paused(&recent).await, 1);
    }
}
