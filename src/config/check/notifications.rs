//! `[notifications]`.

use std::collections::BTreeSet;
use std::time::Duration;

use super::bounds::{TEN_YEARS, at_most, number, within};
use super::{Fault, limits};
use crate::config::Config;

const THRESHOLDS_MAX: usize = 100;
/// Maximum number of caps of one name: each one is checked before every send.
const CAPS_MAX: usize = 8;

impl Config {
    pub(super) fn check_notifications(&self) -> Result<(), Fault> {
        const KEY: &str = "notifications.type_thresholds";
        let notifications = &self.notifications;
        let times = Duration::ZERO..=TEN_YEARS;
        let threshold = notifications.user_poll_threshold;
        within("notifications.user_poll_threshold", threshold, times.clone())?;
        within("notifications.online_threshold", notifications.online_threshold, times.clone())?;
        number("notifications.host_rate", notifications.host_rate, limits::HOST_RATE)?;
        at_most("notifications.caps", notifications.caps.len(), CAPS_MAX)?;
        for (key, named) in [
            ("notifications.bot_caps", &notifications.bot_caps),
            ("notifications.type_caps", &notifications.type_caps),
        ] {
            at_most(key, named.len(), THRESHOLDS_MAX)?;
            for (name, caps) in named {
                if caps.len() > CAPS_MAX {
                    let problem =
                        format!("has {} for {name:?}; at most {CAPS_MAX} are allowed", caps.len());
                    return Err(Fault::new(key, problem));
                }
            }
        }
        at_most(KEY, notifications.type_thresholds.len(), THRESHOLDS_MAX)?;
        let mut seen = BTreeSet::new();
        for (kind, threshold) in &notifications.type_thresholds {
            within(KEY, *threshold, times.clone())?;
            if !seen.insert(kind) {
                return Err(Fault::new(KEY, format!("names {kind:?} twice; name each type once")));
            }
        }
        Ok(())
    }
}
