//! Points in time as users write them.

use std::time::Duration;

use jiff::Timestamp;

/// Why a text is no point in time. Says what to write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a time; write a time with its zone (2026-11-24T14:00:00Z), or how long ago it is (\"2h ago\")"
)]
pub struct TimeError {
    text: String,
}

/// Reads a point in time, since 1970: RFC 3339, `now`, or a duration before `now`.
pub(crate) fn read_time(text: &str, now: Duration) -> Result<Duration, TimeError> {
    let plain = text.trim();
    if plain == "now" {
        return Ok(now);
    }
    if let Ok(time) = plain.parse::<Timestamp>() {
        let ms = u64::try_from(time.as_millisecond()).unwrap_or_default();
        return Ok(Duration::from_millis(ms));
    }
    let ago = plain.strip_suffix("ago").unwrap_or(plain).trim();
    let ago = humantime::parse_duration(ago);
    ago.map(|ago| now.saturating_sub(ago)).map_err(|_| TimeError { text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_timestamp_or_how_long_ago_it_is() {
        let now = Duration::from_secs(1_795_000_000);
        let ms = |text: &str| read_time(text, now).map(crate::clock::millis);
        assert_eq!(ms("2026-11-18T11:06:40.25Z"), Ok(1_795_000_000_250));
        assert_eq!(ms("2026-11-18T12:06:40+01:00"), Ok(1_795_000_000_000));
        assert_eq!(ms("now"), Ok(1_795_000_000_000));
        for text in ["2h ago", "2h", " 120 min ago "] {
            assert_eq!(ms(text), Ok(1_794_992_800_000), "{text}");
        }
        for text in ["", "yesterday", "2026-11-18T12:06:40", "14:00", "-2h", "ago"] {
            let error = read_time(text, now).unwrap_err().to_string();
            assert!(error.contains("with its zone"), "{text}: {error}");
        }
    }
}
