//! Numbers, times and arguments as text, for findings and for the command line.

/// Quotes an argument for a shell. An argument that looks like an option gets `--` before it.
pub(crate) fn argument(text: &str) -> String {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/@".contains(&byte);
    if !text.is_empty() && !text.starts_with('-') && text.bytes().all(safe) {
        return text.to_owned();
    }
    let dashes = if text.starts_with('-') { "-- " } else { "" };
    format!("{dashes}'{}'", text.replace('\'', r"'\''"))
}

/// `1234567` as `1,234,567`.
pub(crate) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `count` things: `1 event`, `2 events`.
pub(crate) fn count(count: u64, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", number(count))
}

/// A duration in its two largest units; the smallest is the millisecond.
pub(crate) fn duration(ms: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let seconds = ms / 1_000;
    if ms == 0 {
        return "0s".to_owned();
    }
    let Some(at) = UNITS.iter().position(|(unit, _)| seconds >= *unit) else {
        return format!("{ms}ms");
    };
    let (unit, name) = UNITS[at];
    let first = format!("{}{name}", seconds / unit);
    match UNITS.get(at + 1) {
        Some((next, name)) if seconds % unit >= *next => {
            format!("{first} {}{name}", seconds % unit / next)
        }
        _ => first,
    }
}
