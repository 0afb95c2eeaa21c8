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

impl Ledger for Guarded {
    fn enter(&self, event: &Event) -> (Event, Option<Posting>) {
        let Self { pipeline, ledger } = self;
        let entered = caught(pipeline, "Ledger::enter", || ledger.enter(event));
        entered.unwrap_or_else(|| (event.clone(), None))
    }

    fn enter_again(&self, event: &Event) -> (Event, Option<Posting>) {
        let Self { pipeline, ledger } = self;
        let entered = caught(pipeline, "Ledger::enter_again", || ledger.enter_again(event));
        entered.unwrap_or_else(|| (event.clone(), None))
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

    #[derive(Debug)]
    struct Loud;

    impl Ledger for Loud {
        fn enter(&self, _: &Event) -> (Event, Option<Posting>) {
            panic!("as it should")
        }

        fn entry(&self, _: &Event) -> Option<(Account, Change)> {
            panic!("as it should")
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
        let loud = guarded(&name, Arc::new(Loud));
        let event = Event::builder("t", &bot).build().unwrap();
        for (entered, posting) in [loud.enter(&event), loud.enter_again(&event)] {
            assert_eq!((entered.encode(), posting), (event.encode(), None));
        }
        assert_eq!((loud.entry(&event), loud.cached_accounts()), (None, 0));
        loud.posted(5);
    }
}
