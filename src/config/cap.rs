//! Caps: how many notifications a user gets in a time.

use std::str::FromStr;
use std::time::Duration;

/// A user gets at most so many in any window of so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// How many: 1 to [`Self::N_MAX`].
    pub n: u32,
    /// In how long: [`Self::WINDOW_MIN`] to [`Self::WINDOW_MAX`].
    pub window: Duration,
}

/// A text that is no cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CapError {
    /// Not of the form.
    #[error("write NUMBER/TIME, such as \"10/day\", \"3/1h\" or \"100/7d\"")]
    Form,
    /// Too many, or none.
    #[error("write a number from 1 to {} before the slash", Cap::N_MAX)]
    Number,
    /// Too short or too long.
    #[error("write a time from 1s to 366d after the slash")]
    Window,
}

impl Cap {
    /// A user's log takes 6 bytes each.
    pub const N_MAX: u32 = 1_000;
    /// Shortest window.
    pub const WINDOW_MIN: Duration = Duration::from_secs(1);
    /// Longest window. A user is remembered that long, as long as a notification may be delayed.
    pub const WINDOW_MAX: Duration = Duration::from_secs(366 * 86_400);
}

impl FromStr for Cap {
    type Err = CapError;

    fn from_str(text: &str) -> Result<Self, CapError> {
        let (n, window) = text.split_once('/').ok_or(CapError::Form)?;
        let (n, window) = (n.trim(), window.trim());
        if n.is_empty() || !n.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(CapError::Form);
        }
        let n = n.parse().ok().filter(|n| (1..=Self::N_MAX).contains(n)).ok_or(CapError::Number)?;
        let window = match window {
            "minute" => Duration::from_secs(60),
            "hour" => Duration::from_secs(3_600),
            "day" => Duration::from_secs(86_400),
            "week" => Duration::from_secs(7 * 86_400),
            window => humantime::parse_duration(window).map_err(|_| CapError::Form)?,
        };
        if !(Self::WINDOW_MIN..=Self::WINDOW_MAX).contains(&window) {
            return Err(CapError::Window);
        }
        Ok(Self { n, window })
    }
}
