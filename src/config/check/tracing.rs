//! `[tracing]`.

use super::bounds::{MILLISECOND, SECOND, number, within};
use super::{Fault, limits};
use crate::config::Config;

/// Maximum length of `service_name`, in bytes.
const NAME_MAX_BYTES: usize = 255;

impl Config {
    pub(super) fn check_tracing(&self) -> Result<(), Fault> {
        let tracing = &self.tracing;
        if tracing.endpoint.is_some() && !cfg!(feature = "otel") {
            let problem = "is set, but this program was built without the feature otel; remove the setting, or build with the feature";
            return Err(Fault::new("tracing.endpoint", problem));
        }
        if !(0.0..=1.0).contains(&tracing.root_ratio) {
            let problem = format!("is {}; write a number from 0.0 to 1.0", tracing.root_ratio);
            return Err(Fault::new("tracing.root_ratio", problem));
        }
        number("tracing.buffer", tracing.buffer as u64, limits::SPANS)?;
        within("tracing.timeout", tracing.timeout, 100 * MILLISECOND..=60 * SECOND)?;
        let name = &tracing.service_name;
        if name.is_empty() || name.len() > NAME_MAX_BYTES || name.chars().any(char::is_control) {
            let problem =
                format!("must have 1 to {NAME_MAX_BYTES} bytes without control characters");
            return Err(Fault::new("tracing.service_name", problem));
        }
        Ok(())
    }
}
