//! Operators' actions. Each is logged and noted in the audit trail, after it and with its result.

use axum::http::StatusCode;
use tracing::info;

use super::Api;
use super::auth::Caller;
use super::problem::Problem;
use crate::config::Scope;
use crate::trail::{Action, Ring, Trail};

/// How an action of `did nothing` ends in the trail.
pub(super) const NOTHING: &str = "nothing changed";

/// The result of an action that may have found nothing to do.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "a result of any type is passed by reference"
)]
pub(super) fn changed(changed: &bool) -> String {
    if *changed { "done" } else { NOTHING }.to_owned()
}

/// The result of an action on a number of events or dead letters.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "a result of any type is passed by reference"
)]
pub(super) fn number(count: &u64) -> String {
    format!("done: {count}")
}

/// The result of an action that has no other.
pub(super) fn done<T>(_: &T) -> String {
    "done".to_owned()
}

/// An action in progress. If its request ends before it does, it is noted all the same: whether it
/// changed anything is not known then.
struct Acting<'a> {
    trail: &'a Trail,
    ring: Ring,
    action: Option<Action>,
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        if let Some(action) = self.action.take() {
            let action = action.ended("not known: the request ended before its answer");
            log(&action);
            drop(self.trail.note_later(self.ring, action));
        }
    }
}

impl Api {
    /// Does what an operator asks for, logs it, and notes it in the audit trail. `told` says with
    /// which result. A refused action changes nothing and is not noted.
    ///
    /// Callers without the scope `operate` are no operators: what they do is ordinary traffic.
    pub(super) async fn act<T>(
        &self,
        caller: &Caller,
        action: Action,
        work: impl Future<Output = Result<T, Problem>>,
        told: impl FnOnce(&T) -> String,
    ) -> Result<T, Problem> {
        if caller.check_scope(Scope::Operate).is_err() {
            return Box::pin(work).await;
        }
        let ring = if action.often || !caller.covers_all() { Ring::Often } else { Ring::Operators };
        let action = action.by(caller.name(), caller.address());
        let mut acting = Acting { trail: &self.trail, ring, action: Some(action) };
        // Boxed, because the futures of handlers are large.
        let result = Box::pin(work).await;
        let Some(action) = acting.action.take() else { return result };
        let action = match &result {
            Ok(value) => action.ended(&told(value)),
            Err(problem) if problem.status() >= StatusCode::INTERNAL_SERVER_ERROR => {
                action.ended(&format!("failed: {}", problem.detail()))
            }
            Err(_) => return result,
        };
        log(&action);
        // If the client leaves now, the task goes on.
        let _ = self.trail.note_later(ring, action).await;
        result
    }
}

fn log(noted: &Action) {
    let Action {
        who: token, address, action, pipeline, bot, target, details, reason, result, ..
    } = noted;
    let address = address.map(tracing::field::display);
    let pipeline = pipeline.as_ref().map(tracing::field::display);
    let bot = bot.as_ref().map(crate::id::BotId::as_str);
    info!(
        token,
        address, action, pipeline, bot, target, details, reason, result, "an operator acted"
    );
}
