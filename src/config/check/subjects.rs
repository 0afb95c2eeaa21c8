//! Subjects of NATS: tokens between dots. `*` stands for one token, `>` at the end for one or more.

use crate::config::NatsSection;

/// Maximum length of a subject, in bytes.
const SUBJECT_MAX_BYTES: usize = 1_024;

/// Whether this is a subject, possibly with wildcards.
pub(super) fn is_pattern(subject: &str) -> bool {
    let tokens: Vec<_> = subject.split('.').collect();
    let last = tokens.len() - 1;
    subject.len() <= SUBJECT_MAX_BYTES
        && !subject.contains(|c: char| c.is_whitespace() || c.is_control())
        && tokens.iter().enumerate().all(|(place, token)| match *token {
            "" => false,
            "*" => true,
            ">" => place == last,
            token => !token.contains(['*', '>']),
        })
}

/// Whether this is a subject to publish to: without wildcards, and without other braces than those
/// of [`NatsSection::BOT`].
pub(super) fn is_plain(subject: &str) -> bool {
    let sample = sample(subject);
    is_pattern(&sample) && !sample.contains(['*', '>', '{', '}'])
}

/// Whether one of the patterns takes what is published to `subject`. Without patterns: always.
pub(super) fn reads(patterns: &[String], subject: &str) -> bool {
    let sample = sample(subject);
    patterns.is_empty() || patterns.iter().any(|pattern| takes(pattern, &sample))
}

fn sample(subject: &str) -> String {
    subject.replace(NatsSection::BOT, "bot")
}

fn takes(pattern: &str, subject: &str) -> bool {
    let (mut tokens, mut rest) = (subject.split('.'), pattern.split('.'));
    loop {
        match (rest.next(), tokens.next()) {
            (None, None) | (Some(">"), Some(_)) => return true,
            (Some("*"), Some(_)) => {}
            (Some(wanted), Some(token)) if wanted == token => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_those_of_nats() {
        for fine in ["a", "a.b", "a.*.c", "a.>", ">", "*"] {
            assert!(is_pattern(fine), "{fine}");
        }
        for bad in ["", ".", "a.", ".a", "a..b", "a.>.b", "a b", "a*", "a.b>", "a\nb"] {
            assert!(!is_pattern(bad), "{bad}");
        }
        for (subject, fine) in
            [("a.{bot}", true), ("a.x-{bot}", true), ("a.*", false), ("a.{id}", false), ("", false)]
        {
            assert_eq!(is_plain(subject), fine, "{subject}");
        }
    }

    #[test]
    fn a_pattern_takes_the_subjects_that_it_takes_in_nats() {
        for (pattern, subject, taken) in [
            ("a.b", "a.b", true),
            ("a.*", "a.{bot}", true),
            ("a.>", "a.b.c", true),
            ("a.>", "a", false),
            ("a.*", "a.b.c", false),
            ("*", "a", true),
            ("a.b", "a", false),
            ("b.>", "a.b", false),
        ] {
            assert_eq!(reads(&[pattern.to_owned()], subject), taken, "{pattern} {subject}");
        }
        assert!(reads(&[], "a"));
    }
}
