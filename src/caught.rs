//! Calls of the code of one pipeline, its product or its handler, by tasks that others need too.

use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::FutureExt as _;
use tracing::error;

use crate::id::PipelineName;
use crate::telemetry::OncePerSubject;

static LOGGED: OncePerSubject = OncePerSubject::new();

/// Calls `code` of a pipeline. `None`: it panicked, which ends only this call.
pub(crate) fn caught<T>(
    pipeline: &PipelineName,
    code: &'static str,
    call: impl FnOnce() -> T,
) -> Option<T> {
    // Products and handlers are shared and take `&self`: their state after a panic is their own
    // responsibility.
    logged(pipeline, code, catch_unwind(AssertUnwindSafe(call)))
}

/// The same for code that is awaited.
pub(crate) async fn caught_future<T>(
    pipeline: &PipelineName,
    code: &'static str,
    call: impl Future<Output = T>,
) -> Option<T> {
    logged(pipeline, code, AssertUnwindSafe(call).catch_unwind().await)
}

fn logged<T>(
    pipeline: &PipelineName,
    code: &'static str,
    called: std::thread::Result<T>,
) -> Option<T> {
    if called.is_err() && LOGGED.take(format!("{pipeline} {code}")) {
        error!(%pipeline, code, "a call of the pipeline's code panicked, and all else goes on; the log above has the message and the place in the code");
    }
    called.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_only_its_call() {
        let name = PipelineName::parse("p").unwrap();
        let ended = caught::<()>(&name, "Gauges::show", || panic!("as it should"));
        let next = caught(&name, "Gauges::show", || 5);
        assert_eq!((ended, next), (None, Some(5)));
        let late = async {
            tokio::task::yield_now().await;
            assert_eq!(next, None, "as it should");
        };
        assert_eq!(caught_future(&name, "Interest::known", late).await, None);
        assert_eq!(caught_future(&name, "Interest::known", async { 5 }).await, Some(5));
    }
}
