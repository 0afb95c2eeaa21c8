//! A handler inside the test that records its slices and answers as the test says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};

/// One event handed to the handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) pipeline: String,
    pub(crate) bot: String,
    pub(crate) id: String,
    /// Of the slice that it was in.
    pub(crate) attempt: u32,
    pub(crate) fence: u64,
    /// Since 1970.
    pub(crate) at: Duration,
}

/// What every clone of a recorder has seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    pub(crate) fn all(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The ids that a pipeline got, in order.
    pub(crate) fn ids(&self, pipeline: &str) -> Vec<String> {
        let seen = self.0.lock().unwrap();
        seen.iter().filter(|seen| seen.pipeline == pipeline).map(|seen| seen.id.clone()).collect()
    }
}

/// Notes a slice and then does what `answer` says.
pub(crate) struct Noting<F> {
    log: Log,
    answer: F,
}

impl Log {
    /// A handler that notes here.
    pub(crate) fn handler<F, R>(&self, answer: F) -> Noting<F>
    where
        F: Fn(Slice) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Outcomes, Failure>> + Send,
    {
        Noting { log: self.clone(), answer }
    }

    /// A handler that notes here and is always content.
    pub(crate) fn content(&self) -> impl Handler + use<> {
        self.handler(|_| async { Ok(Outcomes::done()) })
    }
}

impl<F, R> Handler for Noting<F>
where
    F: Fn(Slice) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Outcomes, Failure>> + Send,
{
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let at = SystemClock.now();
        self.log.0.lock().unwrap().extend(slice.events.iter().map(|delivery| Seen {
            pipeline: environment.pipeline.to_string(),
            bot: slice.bot.to_string(),
            id: delivery.event.id().to_owned(),
            attempt: slice.attempt,
            fence: slice.fence.get(),
            at,
        }));
        (self.answer)(slice.clone()).await
    }
}
