//! Checks a regular expression, and estimates what it costs to compile.
//!
//! It is compiled at each evaluation, because a compiled one may take megabytes of memory, and tenants
//! write many. Most of the cost comes from classes of Unicode, which have hundreds of ranges. With
//! `(?i)`, the parser looks up the other case of every character of a class: of a large class that
//! takes milliseconds.

use regex_syntax::ast::{
    self, Ast, ClassBracketed, ClassPerl, ClassPerlKind, ClassSetItem, Flag, Flags, FlagsItemKind,
    RepetitionKind, RepetitionRange,
};

/// Maximum length of a regular expression in bytes, and its maximum size once compiled.
const MAX_BYTES: usize = 256;
const MAX_SIZE: usize = 64 << 10;
/// Maximum number of characters in a range, with `(?i)`.
const RANGE_MAX: u32 = 1_000;
/// A bracket that repeats this often or more is expensive.
const MANY: u32 = 8;

/// Costs in steps, measured: a step is about 65 ns.
const BASE: u64 = 1_000;
const BYTE: u64 = 20;
const BYTE_OF_ANY_CASE: u64 = 40;
const PROPERTY: u64 = 3_000;
const WORD: u64 = 5_000;
const OTHER_CLASS: u64 = 1_000;
const REPETITION: u64 = 5_000;

/// What to say of an expression that is refused, after its name.
type Problem = String;

/// The cost of one evaluation of the expression, in steps.
///
/// # Errors
/// If it is not valid, or would cost too much to compile.
pub(super) fn cost(text: &str) -> Result<u64, Problem> {
    if text.len() > MAX_BYTES {
        return Err(format!("has {} bytes; at most {MAX_BYTES} are allowed", text.len()));
    }
    // The parser of the syntax is quick for every text. What follows it is not.
    let syntax = ast::parse::Parser::new().parse(text).map_err(|error| invalid(&error))?;
    let seen = ast::visit(&syntax, Visit::default())?;
    match regex::RegexBuilder::new(text).size_limit(MAX_SIZE).build() {
        Ok(_) => Ok(seen.steps(text)),
        Err(regex::Error::CompiledTooBig(_)) => {
            Err("repeats too much; write a smaller one".to_owned())
        }
        Err(error) => Err(invalid(&error)),
    }
}

fn invalid(error: &dyn std::error::Error) -> Problem {
    let said = error.to_string();
    format!("is not valid: {}", said.lines().last().unwrap_or_default())
}

/// What makes an expression expensive.
#[derive(Debug, Default)]
struct Seen {
    /// Whether a part of it ignores the case.
    any_case: bool,
    /// Classes such as `\p{L}`.
    properties: u64,
    /// `\w` and `\W`.
    words: u64,
    /// Other classes of Unicode: `.`, `\d`, `[^a]`.
    others: u64,
    repetitions: u64,
    /// Whether `(?i)` may not ignore the case of one of its classes.
    is_wide: bool,
}

impl Seen {
    fn steps(&self, text: &str) -> u64 {
        let byte = if self.any_case { BYTE_OF_ANY_CASE } else { BYTE };
        BASE + byte * text.len() as u64
            + PROPERTY * self.properties
            + WORD * self.words
            + OTHER_CLASS * self.others
            + REPETITION * self.repetitions
    }

    fn flags(&mut self, flags: &Flags) {
        let ignores = FlagsItemKind::Flag(Flag::CaseInsensitive);
        self.any_case |= flags.items.iter().any(|item| item.kind == ignores);
    }

    fn class(&mut self, class: &ClassPerl) {
        match class.kind {
            ClassPerlKind::Word => self.words += 1,
            ClassPerlKind::Digit | ClassPerlKind::Space => self.others += 1,
        }
    }

    fn bracketed(&mut self, class: &ClassBracketed) {
        self.others += u64::from(class.negated);
    }
}

#[derive(Debug, Default)]
struct Visit(Seen);

impl ast::Visitor for Visit {
    type Output = Seen;
    type Err = Problem;

    fn finish(self) -> Result<Seen, Problem> {
        if self.0.any_case && self.0.is_wide {
            return Err(format!(
                "ignores the case of a class that is too large: with (?i), write no \\p{{…}} and \\P{{…}}, no \\D, \\S and \\W in brackets, and no range of more than {RANGE_MAX} characters"
            ));
        }
        Ok(self.0)
    }

    fn visit_pre(&mut self, part: &Ast) -> Result<(), Problem> {
        let seen = &mut self.0;
        match part {
            Ast::Flags(set) => seen.flags(&set.flags),
            Ast::Group(group) => group.flags().into_iter().for_each(|flags| seen.flags(flags)),
            Ast::Dot(_) => seen.others += 1,
            Ast::ClassUnicode(_) => {
                seen.properties += 1;
                seen.is_wide = true;
            }
            Ast::ClassPerl(class) => seen.class(class),
            Ast::ClassBracketed(class) => seen.bracketed(class),
            Ast::Repetition(repetition) => {
                let most = match repetition.op.kind {
                    RepetitionKind::Range(
                        RepetitionRange::Exactly(most)
                        | RepetitionRange::AtLeast(most)
                        | RepetitionRange::Bounded(_, most),
                    ) => most,
                    _ => 0,
                };
                seen.repetitions += u64::from(most >= MANY);
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Problem> {
        let seen = &mut self.0;
        match item {
            ClassSetItem::Unicode(_) => {
                seen.properties += 1;
                seen.is_wide = true;
            }
            ClassSetItem::Perl(class) => {
                seen.class(class);
                seen.is_wide |= class.negated;
            }
            ClassSetItem::Bracketed(class) => seen.bracketed(class),
            ClassSetItem::Range(range) => {
                let span = u32::from(range.end.c).saturating_sub(u32::from(range.start.c));
                seen.is_wide |= span >= RANGE_MAX;
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_that_takes_long_to_compile_is_refused_or_charged() {
        for refused in [
            r"(?i)[\PL\PL&&a]",
            r"(?i)\p{any}",
            r"(?i)[\D]",
            r"(?i:[\S&&a])",
            r"[\W&&a](?i)b",
            "(?i)[\\x{0}-\\x{10FFFF}&&a]",
            "(?i)[[!-\u{4ff}]--a]",
        ] {
            let problem = cost(refused).unwrap_err();
            assert!(problem.starts_with("ignores the case of a class"), "{refused}: {problem}");
        }
        for (text, from, to) in [
            ("^abc", 1_000, 1_200),
            ("(?i)^vip[^a-z]+", 1_000, 3_000),
            (r"\w+", 5_000, 7_000),
            (r"[\p{L}\p{N}]", 7_000, 8_000),
            ("(ab|cd){200}", 6_000, 7_000),
            (r"\d\s.", 4_000, 5_000),
        ] {
            let steps = cost(text).unwrap();
            assert!((from..to).contains(&steps), "{text}: {steps}");
        }
    }

    #[test]
    fn what_is_not_valid_is_said() {
        for (text, said) in [
            ("(", "is not valid: error: unclosed group"),
            (r"\p{nothing}", "is not valid: error: Unicode property not found"),
            (r"(\w{200}){50}", "repeats too much; write a smaller one"),
        ] {
            assert_eq!(cost(text).unwrap_err(), said, "{text}");
        }
        let long = "a".repeat(MAX_BYTES + 1);
        assert_eq!(cost(&long).unwrap_err(), "has 257 bytes; at most 256 are allowed");
    }
}
