//! Checks rules without delay for other requests: a filter of 4 KiB takes some 100 ms to compile.
//!
//! Short filters are checked immediately. Others wait for a turn, by turns over tokens, and are checked
//! on a thread with a low priority.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::Api;
use super::super::auth::Caller;
use super::super::large_reads::LargeReads;
use super::super::problem::{Kind, Problem};
use crate::automations::heavy::at_low_priority;
use crate::automations::rule::{Rule, Unusable};

/// Maximum length of a short filter, in bytes. It takes some milliseconds to compile.
const SHORT: usize = 256;

/// Why a rule is not checked, or what is wrong with it.
#[derive(Debug)]
pub(super) enum Refused {
    Unusable(Unusable),
    Problem(Problem),
}

impl Refused {
    /// The same for a rule that is a field of another value.
    pub(super) fn within(self, field: &str) -> Self {
        match self {
            Self::Unusable(unusable) => Self::Unusable(Unusable {
                field: format!("{field}.{}", unusable.field),
                ..unusable
            }),
            problem @ Self::Problem(_) => problem,
        }
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Unusable(unusable) => unusable.into(),
            Refused::Problem(problem) => problem,
        }
    }
}

/// Set when the request ends.
#[derive(Debug, Clone, Default)]
pub(super) struct Ended(Arc<AtomicBool>);

impl Ended {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Sets it when it is dropped.
struct EndsHere(Ended);

impl Drop for EndsHere {
    fn drop(&mut self) {
        (self.0).0.store(true, Ordering::Relaxed);
    }
}

/// Checks every bound of a rule, and compiles its filter.
pub(super) async fn check((api, caller): (&Api, &Caller), rule: &Rule) -> Result<(), Refused> {
    if rule.filter.as_ref().is_none_or(|filter| filter.len() <= SHORT) {
        return rule.check(&api.targets).map_err(Refused::Unusable);
    }
    let (rule, targets) = (rule.clone(), api.targets.clone());
    let checked = apart((&api.checks, caller), move |_| rule.check(&targets)).await;
    checked.map_err(Refused::Problem)?.map_err(Refused::Unusable)
}

/// Runs `work` apart from the requests, when it has one of `turns`. It should stop early once the request has ended. Its turn ends
/// with it, also if the request ended before.
pub(super) async fn apart<T: Send + 'static>(
    (turns, caller): (&LargeReads, &Caller),
    work: impl FnOnce(&Ended) -> T + Send + 'static,
) -> Result<T, Problem> {
    let turn = turns.take(caller.name()).await?;
    let ends = EndsHere(Ended::default());
    let ended = ends.0.clone();
    let done = tokio::task::spawn_blocking(move || {
        let done = at_low_priority(|| work(&ended));
        drop(turn);
        done
    });
    done.await.map_err(|_| {
        let detail = "the rules could not be checked; the log of this server has the reason";
        Problem::new(Kind::Internal, detail)
    })
}
