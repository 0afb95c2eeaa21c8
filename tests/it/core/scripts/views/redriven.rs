//! `recount`: dead letters of the counters are counted again.

use fairlane::ledger::Posting;
use fairlane::redis::scripts::{Audit, Audited, Recount};

use super::*;

/// A dead letter of an event with views.
const LETTER: &str = "7-0";

impl Counters {
    fn recount(&mut self, posting: Option<(&str, u64)>) -> bool {
        self.now += 10;
        let (keys, bot) = (&self.shard.keys.clone(), &self.bot.clone());
        let posting = posting.map(|(id, amount)| Posting { account: id.into(), amount });
        self.shard.call(
            self.now,
            &Recount {
                keys,
                limits: LIMITS,
                cached_accounts: self.cached_ads,
                id: LETTER.parse().unwrap(),
                bot,
                posting: posting.as_ref(),
                event: b"again",
            },
        )
    }

    fn bury(&mut self) {
        let mut command = redis::cmd("XADD");
        command.arg(&self.shard.keys.dlq).arg(LETTER).arg(&[("bot", "b"), ("record", "12345")]);
        command.exec(self.shard.harness.plain()).unwrap();
    }

    fn audit(&mut self) -> Audited {
        let keys = &self.shard.keys.clone();
        self.shard.call(self.now, &Audit { keys, bots: &[], entries_max: 99, bytes_max: 99 })
    }
}

#[test]
fn a_redriven_letter_is_queued_behind_the_others_and_its_views_count_once() {
    let mut counters = Counters::new();
    counters.bury();
    assert_eq!(counters.audit(), Audited::Set(2));
    counters.upsert("x", 1, Some((10, 0)));
    assert!(counters.recount(Some(("x", 4))));
    assert_eq!(counters.shard.events("b"), ["view", "again"]);
    assert!(counters.sequences().is_sorted_by(|first, second| first < second));
    assert_eq!(counters.unflushed(), [("vx".to_owned(), 5)].into());
    assert_eq!(counters.audit(), Audited::Set(0), "the bot holds no letter");
    assert!(counters.shard.letters().is_empty());
    assert!(!counters.recount(Some(("x", 4))), "somebody else redrove it");
    assert_eq!(counters.view("x", 0), total(15));
    assert_eq!(counters.unflushed(), [("vx".to_owned(), 5)].into());
}

#[test]
fn a_redriven_letter_that_is_no_view_is_only_queued() {
    let mut counters = Counters::new();
    counters.bury();
    assert!(counters.recount(None));
    assert_eq!(counters.shard.events("b"), ["again"]);
    assert_eq!(counters.claim().leases.len(), 1, "the bot is ready");
    assert!(counters.unflushed().is_empty());
}

#[test]
fn views_of_a_redriven_letter_move_no_total_to_a_full_generation() {
    let mut counters = Counters::new();
    counters.cached_ads = 1;
    counters.upsert("x", 1, Some((10, 0)));
    counters.now += DAY_US;
    counters.upsert("y", 1, Some((20, 0)));
    counters.bury();
    assert!(counters.recount(Some(("x", 4))));
    assert_eq!(counters.generations(), [1, 1]);
    assert_eq!(counters.view("x", 1), total(16));
}
