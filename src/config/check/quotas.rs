//! `[quotas]`.

use std::collections::BTreeSet;

use super::bounds::{at_most, number};
use super::{Fault, limits};
use crate::config::Config;

const BOTS_MAX: usize = 1_000;

impl Config {
    pub(super) fn check_quotas(&self) -> Result<(), Fault> {
        let quotas = &self.quotas;
        for (key, value) in [
            ("quotas.queued_bytes", quotas.queued_bytes),
            ("quotas.delayed_events", quotas.delayed_events),
            ("quotas.delayed_bytes", quotas.delayed_bytes),
            ("quotas.notifications", quotas.notifications),
            ("quotas.notification_bytes", quotas.notification_bytes),
            ("quotas.dead_letters", quotas.dead_letters),
            ("quotas.dead_bytes", quotas.dead_bytes),
            ("quotas.key_bytes", quotas.key_bytes),
            ("quotas.result_bytes", quotas.result_bytes),
            ("quotas.profiles", quotas.profiles),
        ] {
            number(key, value, limits::HELD)?;
        }
        let guard = quotas.memory_guard;
        if !(0.1..=1.0).contains(&guard) {
            let problem = format!("is {guard}; write a fraction from 0.1 to 1.0");
            return Err(Fault::new("quotas.memory_guard", problem));
        }
        at_most("quotas.bots", quotas.bots.len(), BOTS_MAX)?;
        let mut seen = BTreeSet::new();
        for (place, own) in quotas.bots.iter().enumerate() {
            if !seen.insert(&own.bot) {
                let problem = format!("is {:?} once more; give each bot one table", own.bot);
                return Err(Fault::new(format!("quotas.bots[{place}].bot"), problem));
            }
        }
        Ok(())
    }
}
