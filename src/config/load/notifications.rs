//! `[notifications]`.

use std::fmt::Display;

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{Cap, CapError, ConfigError, NotificationsConfig, OnThrottle};

pub(super) fn notifications(top: &Reader<'_>) -> Result<NotificationsConfig, ConfigError> {
    const KEY: &str = "notifications.type_thresholds";
    let threshold = |text: String| {
        let parsed = text.split_once('=').and_then(|(kind, time)| {
            let kind = kind.trim().to_owned();
            Some((kind, humantime::parse_duration(time.trim()).ok()?))
        });
        parsed.filter(|(kind, _)| !kind.is_empty()).ok_or_else(|| {
            let remedy = "write TYPE = DURATION, such as \"digest = 1d\"";
            top.invalid(KEY, format_args!("holds {text:?}; {remedy}"))
        })
    };
    Ok(NotificationsConfig {
        user_poll_threshold: top.duration("notifications.user_poll_threshold")?,
        type_thresholds: top.list(KEY).into_iter().map(threshold).collect::<Result<_, _>>()?,
        caps: top
            .list("notifications.caps")
            .into_iter()
            .map(|text| {
                text.parse::<Cap>().map_err(|error| {
                    top.invalid("notifications.caps", format_args!("holds {text:?}; {error}"))
                })
            })
            .collect::<Result<_, _>>()?,
        bot_caps: named_caps(top, "notifications.bot_caps", "shop-7")?,
        type_caps: named_caps(top, "notifications.type_caps", "promo")?,
        on_throttle: top.choice(
            "notifications.on_throttle",
            &[("drop", OnThrottle::Drop), ("defer", OnThrottle::Defer)],
        )?,
        online_threshold: top.duration("notifications.online_threshold")?,
        host_rate: top.number("notifications.host_rate", limits::HOST_RATE)?,
    })
}

/// Parses caps by name, in the order of the names. Several `NAME = N/TIME` entries of one name add
/// up; `NAME = none` removes all caps.
fn named_caps(
    top: &Reader<'_>,
    key: &str,
    example: &str,
) -> Result<Vec<(String, Vec<Cap>)>, ConfigError> {
    let mut all: Vec<(String, Vec<Cap>)> = Vec::new();
    for text in top.list(key) {
        let refused = |problem: &dyn Display| {
            let examples = format!("such as \"{example} = 10/day\" or \"{example} = none\"");
            top.invalid(key, format_args!("holds {text:?}; {problem}, {examples}"))
        };
        // The name may contain an equals sign; the cap cannot.
        let (name, cap) = text
            .rsplit_once('=')
            .map(|(name, cap)| (name.trim(), cap.trim()))
            .filter(|(name, _)| !name.is_empty())
            .ok_or_else(|| refused(&"write NAME = NUMBER/TIME"))?;
        let cap = match cap {
            "none" => None,
            cap => Some(cap.parse::<Cap>().map_err(|error: CapError| refused(&error))?),
        };
        match all.iter_mut().find(|(known, _)| known == name) {
            None => all.push((name.to_owned(), cap.into_iter().collect())),
            Some((_, caps)) => match cap {
                Some(cap) if !caps.is_empty() => caps.push(cap),
                _ => {
                    let remedy = "remove that, or the others of this name";
                    let problem = format_args!("holds {text:?} beside \"{name} = none\"; {remedy}");
                    return Err(top.invalid(key, problem));
                }
            },
        }
    }
    Ok(all)
}
