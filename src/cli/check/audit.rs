//! The audit of the notifications: is each one where it falls due, or queued?

use std::sync::Arc;

use super::Finding;
use crate::cli::output::{count, number};
use crate::cli::session::Session;
use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::id::PipelineName;
use crate::notifications::{Audit, audit};

const CHECK: &str = "audit";

pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let Ok(name) = PipelineName::parse(PipelineName::NOTIFICATIONS) else { return Vec::new() };
    let audited = Session::with(config.clone(), async |session| {
        let clock: SharedClock = Arc::new(SystemClock);
        let queue = session.queue(&name);
        Ok(audit::audit(&queue, &clock).await?)
    });
    vec![match audited.await {
        Ok(found) => judge(found),
        Err(error) => {
            let why = "it is not known whether every notification will be sent";
            let remedy = "do what it says, and repeat it: what was restored stays so";
            Finding::fail(CHECK, error.to_string(), why, remedy).exits(error.exit())
        }
    }]
}

fn judge(Audit { records, restored }: Audit) -> Finding {
    let found = format!("looked at {}", count(records, "notification"));
    if restored == 0 {
        return Finding::ok(CHECK, format!("{found}; none was lost"));
    }
    let found = format!("{found}; {} in no structure", number(restored));
    let why =
        "they would never have been sent; they are scheduled again, those that were due at once";
    Finding::warn(CHECK, found, why, "find out who changes keys of Fairlane in Redis")
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn what_was_lost_is_told_and_where_nothing_was_too() {
        let good = judge(Audit { records: 1, restored: 0 });
        assert_eq!(
            (good.state, &*good.found),
            (State::Ok, "looked at 1 notification; none was lost")
        );
        let bad = judge(Audit { records: 1_000, restored: 2 });
        assert_eq!(bad.state, State::Warn);
        assert!(bad.found.ends_with("; 2 in no structure"), "{}", bad.found);
    }
}
