//! Values in log lines, and on the terminal of a command. Tenants choose many of them: no value may
//! look like another field, end a line, or change the order in which a terminal shows it.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::io;

use tracing::field::Field;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// The fields of a line of text: ` name=value`. A value is quoted unless it is a plain word.
pub(super) fn fields() -> impl for<'w> FormatFields<'w> + Send + Sync + 'static {
    debug_fn(write_field)
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let name = field.name().trim_start_matches("r#");
    // Records of the crate `log` repeat their target and place in such fields.
    if name.starts_with("log.") {
        return Ok(());
    }
    let text = format!("{value:?}");
    if name == "message" {
        return writer.write_str(&harmless(&text));
    }
    if writer.has_ansi_escapes() {
        write!(writer, " \x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?;
    } else {
        write!(writer, " {name}=")?;
    }
    if is_word(&text) || is_literal(&text) {
        return writer.write_str(&text);
    }
    write!(writer, "{text:?}")
}

/// Whether a terminal may obey it, show nothing, or show what follows in another place. Marks that belong to
/// letters of many scripts stay.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

fn is_word(text: &str) -> bool {
    let plain = |c: char| !c.is_whitespace() && !is_harmful(c) && !matches!(c, '"' | '\\' | '=');
    !text.is_empty() && text.chars().all(plain)
}

/// Whether it is one quoted text.
fn is_literal(text: &str) -> bool {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    let Some(inner) = inner else { return false };
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        let next = if c == '\\' { chars.next() } else { Some('x') };
        if c == '"' || is_harmful(c) || next.is_none() {
            return false;
        }
    }
    true
}

/// A text with harmful characters escaped.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_harmful) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_harmful(c) {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
    }
    shown.into()
}

/// JSON with harmful characters as `\u` escapes, which is the same JSON. Its line ends stay.
pub(crate) fn harmless_json(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|c| is_harmful(c) && c != '\n') {
        return text.into();
    }
    let mut json = String::with_capacity(text.len() + 16);
    let mut units = [0; 2];
    for c in text.chars() {
        match c {
            // Valid JSON has these three only between its values.
            '\r' => json.push(' '),
            c if is_harmful(c) && !matches!(c, '\n' | '\t') => {
                for unit in c.encode_utf16(&mut units) {
                    // A String takes every text.
                    let _ = write!(json, "\\u{unit:04x}");
                }
            }
            c => json.push(c),
        }
    }
    json.into()
}

/// Writes lines of JSON without harmful characters.
pub(super) struct JsonLines<W>(pub(super) W);

impl<W: io::Write> io::Write for JsonLines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(harmless_json(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::captured::Lines;
    use super::*;

    /// What a bot's id may contain.
    const HOSTILE: [&str; 6] = [
        "a type=\"order.paid\" token=root",
        "\"a\" type=\"order.paid\"",
        "a\u{202e}b",
        "\u{2066}a\u{2069}",
        "a\u{2028}b",
        "\\",
    ];

    fn logged(json: bool, bot: &str) -> String {
        let buffer = Lines::default();
        let made = buffer.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).without_time();
        let event = || tracing::info!(%bot, r#type = bot, number = 7, "an event of {bot}");
        if json {
            let lines = lines.json().with_writer(move || JsonLines(made.clone())).finish();
            tracing::subscriber::with_default(lines, event);
        } else {
            let lines = lines.fmt_fields(fields()).with_writer(move || made.clone()).finish();
            tracing::subscriber::with_default(lines, event);
        }
        buffer.text()
    }

    #[test]
    fn a_plain_value_is_written_as_it_is() {
        let line = logged(false, "shop-7");
        assert!(
            line.ends_with(": an event of shop-7 bot=shop-7 type=\"shop-7\" number=7\n"),
            "{line}"
        );
    }

    #[test]
    fn no_value_looks_like_another_field_or_moves_the_text() {
        for bot in HOSTILE {
            let line = logged(false, bot);
            let (_, fields) = line.trim_end().split_once(" bot=").unwrap();
            assert_eq!(fields, format!("{bot:?} type={bot:?} number=7"), "{bot:?}");
            assert!(!line.trim_end().chars().any(is_harmful), "{line:?}");
        }
    }

    #[test]
    fn json_lines_contain_the_same_values_without_harmful_characters() {
        for bot in HOSTILE {
            let line = logged(true, bot);
            assert!(!line.trim_end().chars().any(is_harmful), "{line:?}");
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(
                (&line["fields"]["bot"], &line["fields"]["type"]),
                (&bot.into(), &bot.into())
            );
        }
        let mut written = Vec::new();
        JsonLines(&mut written).write_all("\"\u{e0001}\"\n".as_bytes()).unwrap();
        assert_eq!(serde_json::from_slice::<String>(&written).unwrap(), "\u{e0001}");
    }

    #[test]
    fn json_stays_valid_also_between_its_values() {
        let json = harmless_json("{\r\n\t\"a\": \"\u{7f}\u{9b}\"}");
        assert_eq!(json, "{ \n\t\"a\": \"\\u007f\\u009b\"}");
    }
}
