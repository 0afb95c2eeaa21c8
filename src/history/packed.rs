//! How attempts are stored: as MessagePack. Failures of a bot follow each other, each after its length
//! in two bytes, so that a script can remove the first ones.

use serde::{Deserialize, Serialize};

use super::{Attempt, Ids};
use crate::id::BotId;

/// Maximum length of a failure.
const FAILURE_MAX: usize = u16::MAX as usize;

/// An attempt with its events.
type Whole = (Attempt, Ids);

/// Completed slices of a process.
#[derive(Deserialize)]
struct Portion {
    process: String,
    attempts: Vec<OfBot>,
}

/// An attempt of a bot, in a portion.
#[derive(Deserialize)]
struct OfBot {
    bot: String,
    attempt: Whole,
}

/// The same, to write it. Workers make thousands a second, so nothing is copied.
#[derive(Serialize)]
struct PortionRef<'a> {
    process: &'a str,
    attempts: Vec<OfBotRef<'a>>,
}

#[derive(Serialize)]
struct OfBotRef<'a> {
    bot: &'a str,
    attempt: (&'a Attempt, &'a Ids),
}

/// About the bytes of an attempt.
const ATTEMPT: usize = 160;

fn attempt((attempt, ids): Whole) -> Attempt {
    Attempt { ids, ..attempt }
}

/// A portion of completed slices of a process.
pub(super) fn portion(process: &str, done: &[&(BotId, Attempt)]) -> Vec<u8> {
    let attempts = done.iter().map(|one| {
        let (bot, attempt) = *one;
        OfBotRef { bot: bot.as_str(), attempt: (attempt, &attempt.ids) }
    });
    let portion = PortionRef { process, attempts: attempts.collect() };
    let mut packed = Vec::with_capacity(done.len() * ATTEMPT);
    rmp_serde::encode::write(&mut packed, &portion)
        .expect("a Vec takes every byte, and texts and numbers always encode");
    packed
}

/// The attempts of a portion. What cannot be read is left out: another version may have written it.
fn read(portion: &[u8]) -> impl Iterator<Item = (String, Attempt)> {
    let portion: Option<Portion> = rmp_serde::from_slice(portion).ok();
    let (process, all) = portion.map_or_else(Default::default, |of| (of.process, of.attempts));
    let named = move |one: OfBot| {
        let attempt = Attempt { process: process.clone(), ..attempt(one.attempt) };
        (one.bot, attempt)
    };
    all.into_iter().map(named)
}

/// A failure after its length.
pub(super) fn failure(attempt: &Attempt) -> Vec<u8> {
    let packed = rmp_serde::to_vec(&(attempt, &attempt.ids))
        .expect("a Vec takes every byte, and texts and numbers always encode");
    let length = u16::try_from(packed.len().min(FAILURE_MAX)).unwrap_or(u16::MAX);
    let mut all = length.to_be_bytes().to_vec();
    all.extend_from_slice(&packed[..usize::from(length)]);
    all
}

/// The attempts of one bot in a portion.
pub(crate) fn read_portion(portion: &[u8], bot: &BotId) -> Vec<Attempt> {
    read(portion).filter(|(of, _)| of == bot.as_str()).map(|(_, attempt)| attempt).collect()
}

/// The attempts of all bots in a portion.
pub(crate) fn read_whole_portion(portion: &[u8]) -> Vec<(BotId, Attempt)> {
    read(portion).filter_map(|(bot, attempt)| Some((BotId::parse(&bot).ok()?, attempt))).collect()
}

/// The bots in a portion.
pub(crate) fn bots_of_portion(portion: &[u8]) -> impl Iterator<Item = String> {
    read(portion).map(|(bot, _)| bot)
}

/// The number of events that left the queues by the attempts in a portion, with their bots.
pub(crate) fn settled_in(portion: &[u8]) -> impl Iterator<Item = (String, u32)> {
    read(portion).map(|(bot, attempt)| (bot, attempt.settled))
}

/// The bot of an attempt at the event with this id in a portion.
pub(crate) fn bot_of(portion: &[u8], id: &str) -> Option<String> {
    read(portion).find(|(_, attempt)| attempt.ids.contain(id)).map(|(bot, _)| bot)
}

/// The failures of one bot, the oldest first. What cannot be read is left out.
pub(crate) fn read_failures(mut packed: &[u8]) -> Vec<Attempt> {
    let mut found = Vec::new();
    while let Some((length, rest)) = packed.split_first_chunk::<2>() {
        let length = usize::from(u16::from_be_bytes(*length)).min(rest.len());
        let (one, rest) = rest.split_at(length);
        found.extend(rmp_serde::from_slice::<Whole>(one).map(attempt));
        packed = rest;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::AttemptResult;
    use super::super::attempt::tests::done;
    use super::*;

    fn bot(id: &str) -> BotId {
        BotId::parse(id).unwrap()
    }

    #[test]
    fn a_portion_is_read_back_for_each_bot() {
        let all = [(bot("a"), done(1)), (bot("b"), done(2)), (bot("a"), done(3))];
        let packed = portion("host 1", &all.each_ref());
        assert_eq!(read_portion(&packed, &bot("a")), [done(1), done(3)]);
        assert_eq!(read_portion(&packed, &bot("c")), []);
        assert_eq!(read_whole_portion(&packed), all);
        let settled: Vec<_> = settled_in(&packed).collect();
        assert_eq!(settled, [("a", 1), ("b", 1), ("a", 1)].map(|(bot, n)| (bot.to_owned(), n)));
        assert_eq!(read_portion(b"\xc1 damaged", &bot("a")), []);
    }

    #[test]
    fn failures_are_read_back_and_a_damaged_one_hides_no_other() {
        let failed = |sequence| Attempt {
            result: AttemptResult::Failed,
            status: Some(500),
            reason: Some("no".to_owned()),
            answer: Some("oops".to_owned()),
            retry_ms: Some(7),
            ..done(sequence)
        };
        let mut packed = failure(&failed(1));
        packed.extend([0, 1, 0xc1]);
        packed.extend(failure(&failed(2)));
        assert_eq!(read_failures(&packed), [failed(1), failed(2)]);
        packed.extend([9, 9, 9]);
        assert_eq!(read_failures(&packed).len(), 2);
    }
}
