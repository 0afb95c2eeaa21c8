//! Which events a pipeline takes: globs over types, a CEL expression over the event.

use std::sync::Arc;

use cel::{Context, Env, ExecutionError, Program};

use crate::event::Event;

/// Longest filter, in bytes.
pub const FILTER_MAX_BYTES: usize = 4_096;
/// Deepest nesting of brackets in a filter.
pub const FILTER_MAX_DEPTH: usize = 32;

/// A type pattern: `*` stands for any text, dots included; everything else for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(Vec<String>);

impl Glob {
    /// Every text is a pattern.
    #[must_use]
    pub fn new(pattern: &str) -> Self {
        Self(pattern.split('*').map(str::to_owned).collect())
    }

    /// Whether the pattern covers all of `text`.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = &*self.0 else {
            return self.0.first().is_some_and(|whole| whole == text);
        };
        let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
        for part in middle {
            // The leftmost place is as good as any: what follows only needs to be after it.
            let Some(at) = rest.find(part.as_str()) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last.as_str())
    }
}

/// A compiled CEL expression over `event`.
pub struct Filter {
    program: Program,
    /// Functions and types, made once.
    library: Arc<Env>,
}

/// Why an expression gave no answer.
enum Refusal {
    Unknown(String),
    Other(String),
}

/// Why a filter is not usable.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Longer than [`FILTER_MAX_BYTES`].
    #[error("the filter has {0} bytes; at most {FILTER_MAX_BYTES} are allowed")]
    TooLong(usize),
    /// Deeper than [`FILTER_MAX_DEPTH`].
    #[error("the filter nests brackets deeper than {FILTER_MAX_DEPTH}")]
    TooDeep,
    /// Not CEL.
    #[error("the filter is not valid CEL: {0}")]
    Syntax(String),
    /// It names something that does not exist.
    #[error("the filter names {0:?}, which is neither `event` nor a function of CEL")]
    Unknown(String),
    /// It could not be evaluated.
    #[error("the filter cannot be evaluated: {0}")]
    Evaluation(String),
    /// It does not answer yes or no.
    #[error("the filter must answer true or false, not {0}")]
    NotBoolean(String),
}

impl Filter {
    /// Compiles an expression such as `event.data.price > 10.0 && event.subject != ""`.
    ///
    /// # Errors
    /// When it is too long, too deep or not CEL; the message has line and column.
    pub fn compile(text: &str) -> Result<Self, FilterError> {
        if text.len() > FILTER_MAX_BYTES {
            return Err(FilterError::TooLong(text.len()));
        }
        let mut depth = 0_usize;
        for byte in text.bytes() {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > FILTER_MAX_DEPTH {
                return Err(FilterError::TooDeep);
            }
        }
        let compiled = std::panic::catch_unwind(|| Program::compile(text))
            .map_err(|_| FilterError::Syntax("the parser gave up on it".to_owned()))?;
        let program = compiled.map_err(|errors| FilterError::Syntax(errors.to_string()))?;
        let filter = Self { program, library: Arc::new(Env::stdlib()) };
        // What is wrong for every event is refused now: unknown names, an answer that is no yes or
        // no. What a sample event merely lacks is not held against it.
        match filter.answer(serde_json::json!({ "type": "", "botid": "", "data": {} })) {
            Err(Refusal::Unknown(name)) => Err(FilterError::Unknown(name)),
            Ok(cel::Value::Bool(_)) | Err(Refusal::Other(_)) => Ok(filter),
            Ok(other) => Err(FilterError::NotBoolean(format!("{other:?}"))),
        }
    }

    /// Whether the event passes.
    ///
    /// # Errors
    /// When the expression fails on this event, for example on a field that it lacks.
    pub fn matches(&self, event: &Event) -> Result<bool, FilterError> {
        let json = serde_json::to_value(event)
            .map_err(|error| FilterError::Evaluation(error.to_string()))?;
        match self.answer(json) {
            Ok(cel::Value::Bool(answer)) => Ok(answer),
            Ok(other) => Err(FilterError::NotBoolean(format!("{other:?}"))),
            Err(Refusal::Unknown(name)) => Err(FilterError::Unknown(name)),
            Err(Refusal::Other(error)) => Err(FilterError::Evaluation(error)),
        }
    }

    fn answer(&self, event: serde_json::Value) -> Result<cel::Value, Refusal> {
        let mut context = Context::with_env(Arc::clone(&self.library));
        let added = context.add_variable("event", event);
        added.map_err(|error| Refusal::Other(error.to_string()))?;
        self.program.execute(&context).map_err(|error| match error {
            ExecutionError::UndeclaredReference(name) => Refusal::Unknown(name.to_string()),
            error => Refusal::Other(error.to_string()),
        })
    }
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Filter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_star_spans_dots_and_everything_else_is_literal() {
        let cases = [
            ("*", "anything.at.all", true),
            ("*", "", true),
            ("tag.*", "tag.applied", true),
            ("tag.*", "tag.", true),
            ("tag.*", "tagxapplied", false),
            ("tag.*", "my.tag.applied", false),
            ("*.applied", "tag.vip.applied", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            ("tag.applied", "tag.applied", true),
            ("tag.applied", "tag.applied2", false),
            ("", "", true),
            ("", "x", false),
            ("**", "x", true),
        ];
        for (pattern, text, expected) in cases {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern:?} {text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_made_from_a_text_matches_it(parts in prop::collection::vec("[a-c.]{0,3}", 1..5), fill in "[a-c.]{0,3}") {
            let glob = Glob::new(&parts.join("*"));
            prop_assert!(glob.matches(&parts.join(&fill)));
        }
    }

    fn event(data: &str) -> Event {
        let text = format!(
            r#"{{"specversion":"1.0","id":"1","source":"s","type":"sale","botid":"b","subject":"u","data":{data}}}"#
        );
        Event::from_json(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_filter_reads_attributes_and_data() {
        let filter = Filter::compile(
            r#"event.type == "sale" && event.data.price > 10 && "vip" in event.data.tags && event.botid == "b""#,
        )
        .unwrap();
        assert!(filter.matches(&event(r#"{"price":11,"tags":["vip"]}"#)).unwrap());
        assert!(!filter.matches(&event(r#"{"price":9,"tags":["vip"]}"#)).unwrap());
    }

    #[test]
    fn a_filter_that_cannot_be_used_says_why() {
        let deep = format!("{}true{}", "(".repeat(40), ")".repeat(40));
        let long = format!("true{}", " ".repeat(5_000));
        let cases = [
            ("event.data.x >", "not valid CEL"),
            (&*deep, "deeper than 32"),
            (&*long, "5004 bytes; at most 4096"),
            ("evnt.data.price > 3", "names \"evnt\""),
            ("1 + 1", "must answer true or false"),
        ];
        for (text, part) in cases {
            let error = Filter::compile(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let lacking = Filter::compile("event.data.x > 1").unwrap();
        assert!(matches!(lacking.matches(&event("{}")), Err(FilterError::Evaluation(_))));
        let number = Filter::compile("event.data.x").unwrap();
        assert!(matches!(number.matches(&event("{\"x\":1}")), Err(FilterError::NotBoolean(_))));
        Filter::compile("event.data.tags.exists(tag, tag == \"vip\")").unwrap();
    }
}
