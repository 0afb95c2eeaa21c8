//! Which events of its types a pipeline wants.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use crate::caught::{caught, caught_future};
use crate::event::Event;
use crate::id::{BotId, PipelineName};

/// Selects events of a pipeline's types by what the pipeline knows about their bots.
///
/// A call that panics ends only itself, and is logged: all pipelines share the tasks that call. The event
/// counts as wanted, the type as taken, and the bots as known. A panic takes far longer than a call: one for
/// each event slows the bus for all pipelines.
pub trait Interest: std::fmt::Debug + Send + Sync + 'static {
    /// Whether it wants the event. In doubt, yes.
    fn wants(&self, event: &Event) -> bool;

    /// Whether it wants events of this type for this bot, as far as known. If its knowledge may be
    /// stale, yes.
    fn takes(&self, bot: &BotId, kind: &str) -> bool;

    /// Ends once it knows all bots.
    fn known(&self) -> BoxFuture<'_, ()>;
}

/// The interest of a pipeline, whose panics end only their call.
#[derive(Debug)]
struct Guarded {
    pipeline: PipelineName,
    interest: Arc<dyn Interest>,
}

/// The same interest. Its panics end only their call.
pub(crate) fn guarded(pipeline: &PipelineName, interest: Arc<dyn Interest>) -> Arc<dyn Interest> {
    Arc::new(Guarded { pipeline: pipeline.clone(), interest })
}

impl Interest for Guarded {
    fn wants(&self, event: &Event) -> bool {
        let Self { pipeline, interest } = self;
        caught(pipeline, "Interest::wants", || interest.wants(event)).unwrap_or(true)
    }

    fn takes(&self, bot: &BotId, kind: &str) -> bool {
        let Self { pipeline, interest } = self;
        caught(pipeline, "Interest::takes", || interest.takes(bot, kind)).unwrap_or(true)
    }

    fn known(&self) -> BoxFuture<'_, ()> {
        async {
            // Both the call and its future may panic.
            let known = async { self.interest.known().await };
            caught_future(&self.pipeline, "Interest::known", known).await;
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Loud;

    impl Interest for Loud {
        fn wants(&self, _: &Event) -> bool {
            panic!("as it should")
        }

        fn takes(&self, _: &BotId, _: &str) -> bool {
            panic!("as it should")
        }

        fn known(&self) -> BoxFuture<'_, ()> {
            panic!("as it should")
        }
    }

    #[tokio::test]
    async fn an_interest_that_panics_wants_and_takes_and_knows_everything() {
        let (name, bot) = (PipelineName::parse("p").unwrap(), BotId::parse("b").unwrap());
        let loud = guarded(&name, Arc::new(Loud));
        assert!(loud.wants(&Event::builder("t", &bot).build().unwrap()));
        assert!(loud.takes(&bot, "t"));
        loud.known().await;
    }
}
