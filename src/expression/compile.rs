//! Compiles the text of an expression to a filter.

use std::panic::catch_unwind;

use cel::Program;
use serde_json::json;

use super::evaluate::{Facts, Refusal, shown};
use super::walk::Walk;
use super::{
    FILTER_MAX_ADDITIONS, FILTER_MAX_BYTES, FILTER_MAX_DEPTH, FILTER_MAX_STEPS, Filter,
    FilterError, Position, Sees, Shape,
};

/// The depth of the parser's recursion grows with the length of the text.
const PARSER_STACK: usize = 64 << 20;
/// Maximum cost of the sample event, in steps: about 5 ms.
const SAMPLE_MAX_STEPS: u64 = 75_000;

/// The parser's message, without the names of tokens in its grammar.
pub(super) fn spoken(problem: &str) -> String {
    let problem = problem.trim();
    let problem = problem.strip_prefix("Syntax error: ").unwrap_or(problem);
    let (found, expected) = problem.split_once(" expecting ").unwrap_or((problem, ""));
    let strange = ["mismatched input ", "extraneous input ", "no viable alternative at input "];
    let Some(what) = strange.iter().find_map(|words| found.strip_prefix(words)) else {
        return match found.strip_prefix("token recognition error at: ") {
            Some(what) => format!("unexpected {what}"),
            None => found.replace("'<EOF>'", "the end").replace("<EOF>", "the end"),
        };
    };
    let what = if what.ends_with("<EOF>'") { "end" } else { what };
    // A single literal sign is useful in the message; a set of them is half of the grammar.
    let is_sign = expected.starts_with('\'') && expected.ends_with('\'');
    if is_sign {
        format!("unexpected {what}, {expected} was expected")
    } else {
        format!("unexpected {what}")
    }
}

impl Filter {
    /// Compiles an expression such as `event.data.price > 10.0 && event.subject != ""`.
    ///
    /// # Errors
    /// When it is beyond a bound or not CEL; where it is wrong at one place, the message has line
    /// and column.
    pub fn compile(text: &str, sees: Sees) -> Result<Self, FilterError> {
        match Self::compile_any(text, sees)? {
            (filter, Some(cel::Value::Bool(_)) | None) => Ok(filter),
            (_, Some(other)) => Err(FilterError::NotBoolean(shown(&other))),
        }
    }

    /// Compiles an expression of any type. Returns also what it gives for a sample event, if anything.
    pub(super) fn compile_any(
        text: &str,
        sees: Sees,
    ) -> Result<(Self, Option<cel::Value>), FilterError> {
        if text.len() > FILTER_MAX_BYTES {
            return Err(FilterError::TooLong(text.len()));
        }
        if written_depth(text) > FILTER_MAX_DEPTH {
            return Err(FilterError::TooDeep);
        }
        let filter = on_a_deep_stack(|| Self::parse(text, sees))?;
        // An error that occurs for every event is refused now: a result that is not a boolean, an
        // unknown function. A field that only the sample event lacks is no error.
        let mut sample = Facts::new(json!({ "type": "", "botid": "", "data": {} }));
        sample.set_subscriber(json!({ "id": "", "tags": [] }));
        let steps = filter.steps(sample.sizes());
        if steps > FILTER_MAX_STEPS {
            return Err(FilterError::TooDear(steps));
        }
        // With long lists of literals it would keep its thread for too long.
        if steps > SAMPLE_MAX_STEPS {
            return Ok((filter, None));
        }
        match filter.answer(&sample) {
            Err(Refusal::Unknown(name)) => {
                let offset = text.find(&name).map_or(0, |at| text[..at].chars().count());
                let at = Position::of(text, offset);
                Err(FilterError::Unknown { name, at, known: sees.spoken() })
            }
            Err(Refusal::Other(_)) => Ok((filter, None)),
            Ok(value) => Ok((filter, Some(value))),
        }
    }

    /// Parses and checks on a deep stack, because both walk a tree of unknown depth.
    fn parse(text: &str, sees: Sees) -> Result<Self, FilterError> {
        let syntax = |at, problem: String| FilterError::Syntax { at, problem };
        let begin = Position { line: 1, column: 1 };
        let compiled = catch_unwind(|| Program::compile(text))
            .map_err(|_| syntax(begin, "the parser gave up on it".to_owned()))?;
        let program = compiled.map_err(|errors| {
            let Some(first) = errors.errors.first() else {
                return syntax(begin, "the parser gave up on it".to_owned());
            };
            if first.msg.contains("Recursion limit") {
                return FilterError::TooDeep;
            }
            let place = |number: isize| usize::try_from(number).unwrap_or(1).max(1);
            let at = Position { line: place(first.pos.0), column: place(first.pos.1) };
            syntax(at, spoken(&first.msg))
        })?;
        let mut walk = Walk {
            text,
            source: program.source_info(),
            sees,
            variables: Vec::new(),
            shape: Shape::default(),
            in_map: false,
        };
        // The caller gets a copy of the result.
        walk.copied(program.expression(), 1, 0)?;
        let shape = walk.shape;
        if shape.additions > FILTER_MAX_ADDITIONS {
            return Err(FilterError::Additions(shape.additions));
        }
        // Bots have many filters. A copy takes less memory than the program: it has neither the places of its
        // parts in the text nor spare room in its lists.
        let expression = program.expression().clone();
        Ok(Self { expression, shape, sees })
    }
}

/// The depth of nested brackets, or the number of consecutive `!` and `-`, which the parser folds.
/// Text in quotes does not count.
fn written_depth(text: &str) -> usize {
    let (mut brackets, mut signs, mut deepest) = (0_usize, 0_usize, 0);
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' | b'\'' => {
                while let Some(inner) = bytes.next().filter(|inner| *inner != byte) {
                    if inner == b'\\' {
                        bytes.next();
                    }
                }
            }
            b'(' | b'[' | b'{' => brackets += 1,
            b')' | b']' | b'}' => brackets = brackets.saturating_sub(1),
            _ => {}
        }
        signs = match byte {
            b'!' | b'-' => signs + 1,
            byte if byte.is_ascii_whitespace() => signs,
            _ => 0,
        };
        deepest = deepest.max(brackets).max(signs);
    }
    deepest
}

/// Runs a function whose recursion depth grows with the length of a text.
fn on_a_deep_stack<T: Send>(
    run: impl FnOnce() -> Result<T, FilterError> + Send,
) -> Result<T, FilterError> {
    let gave_up = |why: &str| {
        let at = Position { line: 1, column: 1 };
        Err(FilterError::Syntax { at, problem: why.to_owned() })
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(PARSER_STACK);
        match thread.spawn_scoped(scope, run).map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => gave_up("the parser gave up on it"),
            Err(_) => gave_up("there is no thread to parse it on; try again"),
        }
    })
}
