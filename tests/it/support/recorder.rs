//! A handler inside the test that records its slices and gives the answers of the test.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};

/// One event that the handler got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) pipeline: String,
    pub(crate) bot: String,
    pub(crate) id: String,
    /// The attempt of its slice.
    pub(crate) attempt: u32,
    pub(crate) fence: u64,
    /// The time since 1970.
    pub(crate) at: Duration,
}

/// The events that all clones of a recorder have seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    pub(crate) fn all(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The number of a pipeline's events. There may be many, so none is copied.
    pub(crate) fn count(&self, pipeline: &str) -> usize {
        let seen = self.0.lock().unwrap();
        seen.iter().filter(|seen| seen.pipeline == pipeline).count()
    }

    /// The ids of a pipeline's events, in order.
    pub(crate) fn ids(&self, pipeline: &str) -> Vec<String> {
        let seen = self.0.lock().unwrap();
        seen.iter().filter(|seen| seen.pipeline == pipeline).map(|seen| seen.id.clone()).collect()
    }
}

/// Records a slice and then calls `answer`.
pub(crate) struct Noting<F> {
    log: Log,
    answer: F,
}

impl Log {
    /// A handler that records here.
    pub(crate) fn handler<F, R>(&self, answer: F) -> Noting<F>
    where
        F: Fn(Slice) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Outcomes, Failure>> + Send,
    {
        Noting { log: self.clone(), answer }
    }

    /// A handler that records here and always succeeds.
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
