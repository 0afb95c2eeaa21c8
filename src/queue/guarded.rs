//! Calls of the ledger of a pipeline, whose panics end only their call.

use std::sync::Arc;

use crate::caught::caught;
use crate::event::Event;
use crate::id::PipelineName;
use crate::ledger::{Account, Change, Ledger, Posting};

/// The ledger of a pipeline, whose panics end only their call.
#[derive(Debug)]
struct Guarded {
    pipeline: PipelineName,
    ledger: Arc<dyn Ledger>,
}

/// The same ledger. Its panics end only their call.
pub(super) fn guarded(pipeline: &PipelineName, ledger: Arc<dyn Ledger>) -> Arc<dyn Ledger> {
    Arc::new(Guarded { pipeline: pipeline.clone(), ledger })
}

impl Guarded {
    /// The event as it is. It enters the amount that leaves with it: otherwise it would take that of others.
    fn as_it_is(&self, event: &Event) -> (Event, Option<Posting>) {
        let posting = match self.entry(event) {
            Some((account, Change::Add(amount))) => Some(Posting { account, amount }),
            Some((_, Change::Replace)) | None => None,
        };
        (event.clone(), posting)
    }
}

impl Ledger for Guarded {
    fn enter(&self, event: &Event) -> (Event, Option<Posting>) {
        let Self { pipeline, ledger } = self;
        let entered = caught(pipeline, "Ledger::enter", || ledger.enter(event));
        entered.unwrap_or_else(|| self.as_it_is(event))
    }

    fn enter_again(&self, event: &Event) -> (Event, Option<Posting>) {
        let Self { pipeline, ledger } = self;
        let entered = caught(pipeline, "Ledger::enter_again", || ledger.enter_again(event));
        entered.unwrap_or_else(|| self.as_it_is(event))
    }

    fn entry(&self, event: &Event) -> Option<(Account, Change)> {
        let Self { pipeline, ledger } = self;
        caught(pipeline, "Ledger::entry", || ledger.entry(event)).flatten()
    }

    fn cached_accounts(&self) -> u64 {
        let Self { pipeline, ledger } = self;
        caught(pipeline, "Ledger::cached_accounts", || ledger.cached_accounts()).unwrap_or(0)
    }

    fn posted(&self, amount: u64) {
        let Self { pipeline, ledger } = self;
        caught(pipeline, "Ledger::posted", || ledger.posted(amount));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BotId;

    /// Panics; `entry` only without an amount.
    #[derive(Debug)]
    struct Loud(Option<u64>);

    impl Ledger for Loud {
        fn enter(&self, _: &Event) -> (Event, Option<Posting>) {
            panic!("as it should")
        }

        fn entry(&self, _: &Event) -> Option<(Account, Change)> {
            let amount = self.0.expect("as it should");
            Some((Account::from("all"), Change::Add(amount)))
        }

        fn cached_accounts(&self) -> u64 {
            panic!("as it should")
        }

        fn posted(&self, _: u64) {
            panic!("as it should")
        }
    }

    #[test]
    fn a_ledger_that_panics_leaves_the_events_as_they_are_and_has_no_entries() {
        let (name, bot) = (PipelineName::parse("p").unwrap(), BotId::parse("b").unwrap());
        let loud = guarded(&name, Arc::new(Loud(None)));
        let event = Event::builder("t", &bot).build().unwrap();
        for (entered, posting) in [loud.enter(&event), loud.enter_again(&event)] {
            assert_eq!((entered.encode(), posting), (event.encode(), None));
        }
        assert_eq!((loud.entry(&event), loud.cached_accounts()), (None, 0));
        loud.posted(5);
    }

    #[test]
    fn an_event_whose_enter_panics_adds_the_amount_that_leaves_with_it() {
        let (name, bot) = (PipelineName::parse("p").unwrap(), BotId::parse("b").unwrap());
        let loud = guarded(&name, Arc::new(Loud(Some(3))));
        let event = Event::builder("t", &bot).build().unwrap();
        let expected = Some(Posting { account: Account::from("all"), amount: 3 });
        for (entered, posting) in [loud.enter(&event), loud.enter_again(&event)] {
            assert_eq!(entered.encode(), event.encode());
            assert_eq!(posting, expected);
        }
    }
}
