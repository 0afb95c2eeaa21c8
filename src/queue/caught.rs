//! Calls of a product's code by the tasks that all pipelines share.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tracing::error;

use crate::id::PipelineName;
use crate::telemetry::OncePerSubject;

static LOGGED: OncePerSubject = OncePerSubject::new();

/// Calls `code` of the product of a pipeline. `None`: it panicked, which ends only this call.
pub(super) fn caught<T>(
    pipeline: &PipelineName,
    code: &'static str,
    call: impl FnOnce() -> T,
) -> Option<T> {
    // Products are shared and take `&self`: their state after a panic is their own responsibility.
    let called = catch_unwind(AssertUnwindSafe(call));
    if called.is_err() && LOGGED.take(format!("{pipeline} {code}")) {
        error!(%pipeline, code, "a call of the pipeline's product panicked, and all else goes on; the log above has the message and the place in the code");
    }
    called.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_only_its_call() {
        let name = PipelineName::parse("p").unwrap();
        let ended = caught::<()>(&name, "Gauges::show", || panic!("as it should"));
        let next = caught(&name, "Gauges::show", || 5);
        assert_eq!((ended, next), (None, Some(5)));
    }
}
