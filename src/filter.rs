//! Which events are meant: globs over types, and CEL expressions over an event and, in rules, the
//! subscriber it is about.
//!
//! An expression comes from a configuration or from a tenant. Its text, its depth and its macros
//! are bounded when it is compiled; what it may cost on one event is bounded before it runs.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SourceInfo};
use cel::objects::{Key, Map};
use cel::{Context, Env, ExecutionError, Program};
use serde_json::{Value as Json, json};

use crate::event::Event;

/// Longest filter, in bytes.
pub const FILTER_MAX_BYTES: usize = 4_096;
/// Deepest nesting of a filter: brackets, operators, selections.
pub const FILTER_MAX_DEPTH: usize = 32;
/// Deepest nesting of macros (`all`, `exists`, `exists_one`, `filter`, `map`).
pub const FILTER_MAX_MACROS: usize = 2;
/// Most additions in a filter: each copies its operands.
pub const FILTER_MAX_ADDITIONS: usize = 16;
/// What a filter may cost on one event: about so many evaluations of an operator, and more of
/// them where the event is large.
pub const FILTER_MAX_STEPS: u64 = 1_000_000;
/// An event of so many bytes makes each step twice as dear.
const BYTES_OF_A_STEP: u64 = 64;
/// What all filters on one event may cost together, in steps.
const EVENT_MAX_STEPS: u64 = 2_000_000;
/// Longest regular expression, in bytes, and largest once compiled.
const REGEX_MAX_BYTES: usize = 256;
const REGEX_MAX_SIZE: usize = 64 << 10;
/// A regular expression is compiled each time.
const REGEX_STEPS: u64 = 1_000;
/// The parser goes as deep as the text is long.
const PARSER_STACK: usize = 64 << 20;
/// Types, which have no value but can be compared with.
const TYPES: [&str; 11] =
    ["bool", "bytes", "double", "dyn", "int", "list", "map", "null_type", "string", "type", "uint"];

/// Functions. What has a sign for a name is an operator.
const FUNCTIONS: [&str; 32] = [
    "bool",
    "bytes",
    "contains",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
    "hasValue",
    "int",
    "matches",
    "max",
    "min",
    "or",
    "orValue",
    "size",
    "startsWith",
    "string",
    "timestamp",
    "type",
    "uint",
    "value",
    "has",
];

/// A type pattern: `*` stands for any text, dots included; everything else for itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
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

/// What an expression may speak of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sees {
    /// `event`.
    Event,
    /// `event` and `subscriber`.
    Subscriber,
}

impl Sees {
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Event => &["event"],
            Self::Subscriber => &["event", "subscriber"],
        }
    }

    fn spoken(self) -> &'static str {
        match self {
            Self::Event => "neither `event` nor a function of CEL",
            Self::Subscriber => "neither `event` nor `subscriber` nor a function of CEL",
        }
    }
}

/// A compiled CEL expression.
pub struct Filter {
    program: Program,
    shape: Shape,
    sees: Sees,
}

/// What decides what an expression costs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Nodes in no macro, in one, and so on.
    nodes: [u64; FILTER_MAX_MACROS + 1],
    additions: usize,
    /// Entries of the longest list that is written out.
    longest: usize,
}

/// Why an expression gave no answer.
enum Refusal {
    Unknown(String),
    Other(String),
}

/// Why a filter is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// Longer than [`FILTER_MAX_BYTES`].
    #[error("the filter has {0} bytes; at most {FILTER_MAX_BYTES} are allowed")]
    TooLong(usize),
    /// Deeper than [`FILTER_MAX_DEPTH`].
    #[error("the filter nests deeper than {FILTER_MAX_DEPTH}")]
    TooDeep,
    /// Macros within macros, deeper than [`FILTER_MAX_MACROS`].
    #[error(
        "the filter nests macros (all, exists, exists_one, filter, map) deeper than {FILTER_MAX_MACROS}"
    )]
    Macros,
    /// More additions than [`FILTER_MAX_ADDITIONS`].
    #[error("the filter has {0} additions; at most {FILTER_MAX_ADDITIONS} are allowed")]
    Additions(usize),
    /// Lists could grow with every macro.
    #[error(
        "the filter makes lists out of lists: no map stands within another, and no macro goes over a map that adds or writes lists"
    )]
    Grows,
    /// A regular expression that cannot be used.
    #[error("the filter has a regular expression that {0}")]
    Regex(String),
    /// Not CEL.
    #[error("the filter is not valid CEL: {at}: {problem}")]
    Syntax {
        /// Where.
        at: Position,
        /// What is wrong there.
        problem: String,
    },
    /// It names something that does not exist.
    #[error("the filter names {name:?} at {at}, which is {known}")]
    Unknown {
        /// The name.
        name: String,
        /// Where.
        at: Position,
        /// What there is.
        known: &'static str,
    },
    /// It could not be evaluated.
    #[error("the filter cannot be evaluated: {0}")]
    Evaluation(String),
    /// It would take too long on this event.
    #[error(
        "the filter would take {0} steps on this event; at most {FILTER_MAX_STEPS} are allowed: lists and data are too long for it"
    )]
    TooDear(u64),
    /// It does not answer yes or no.
    #[error("the filter must answer true or false, not {0}")]
    NotBoolean(String),
}

impl FilterError {
    /// Where in the text it is wrong, if that is a place.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        match self {
            Self::Syntax { at, .. } | Self::Unknown { at, .. } => Some(*at),
            _ => None,
        }
    }
}

/// What the parser says, without the names that its tokens have in its grammar.
fn spoken(problem: &str) -> String {
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
    // One sign that is written as such can be told; a set of them is half of the grammar.
    let is_sign = expected.starts_with('\'') && expected.ends_with('\'');
    if is_sign {
        format!("unexpected {what}, {expected} was expected")
    } else {
        format!("unexpected {what}")
    }
}

/// A place in the text of a filter, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character in it.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl Position {
    /// Where the character at `offset` is.
    fn of(text: &str, offset: usize) -> Self {
        let before = text.chars().take(offset);
        let (mut line, mut column) = (1, 1);
        for character in before {
            if character == '\n' {
                (line, column) = (line + 1, 1);
            } else {
                column += 1;
            }
        }
        Self { line, column }
    }
}

/// What filters are evaluated on: made once for an event, whatever the number of filters.
pub struct Facts {
    context: Context<'static, 'static>,
    /// Of the event and the subscriber in JSON, about.
    bytes: u64,
    /// Entries of the longest list or map in them.
    longest: u64,
    /// Steps that filters were given so far.
    spent: Cell<u64>,
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Facts").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Facts {
    /// Of an event alone.
    ///
    /// # Errors
    /// When the event's data is deeper than JSON is read.
    pub fn of(event: &Event) -> Result<Self, FilterError> {
        let event = serde_json::to_value(event)
            .map_err(|error| FilterError::Evaluation(error.to_string()))?;
        Ok(Self::new(event))
    }

    fn new(event: Json) -> Self {
        static LIBRARY: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));
        let context = Context::with_env(Arc::clone(&LIBRARY));
        let mut facts = Self { context, bytes: 0, longest: 0, spent: Cell::new(0) };
        facts.add("event", event);
        facts
    }

    /// With the subscriber, or with what became of it.
    pub fn set_subscriber(&mut self, subscriber: Json) {
        self.add("subscriber", subscriber);
    }

    fn add(&mut self, name: &str, value: Json) {
        let (bytes, longest) = size(&value);
        // A subscriber that is set again counts again: that only makes it dearer.
        self.bytes += bytes;
        self.longest = self.longest.max(longest);
        self.context.add_variable_from_value(name, seen(value));
    }
}

/// JSON as filters see it. Whole numbers are `int`, as those that filters write: of two types, no
/// two numbers can be added.
fn seen(value: Json) -> cel::Value {
    match value {
        Json::Null => cel::Value::Null,
        Json::Bool(value) => cel::Value::Bool(value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => cel::Value::Int(number),
            (None, Some(number)) => cel::Value::UInt(number),
            (None, None) => cel::Value::Float(number.as_f64().unwrap_or_default()),
        },
        Json::String(text) => cel::Value::String(Arc::new(text)),
        Json::Array(list) => cel::Value::List(Arc::new(list.into_iter().map(seen).collect())),
        Json::Object(map) => {
            let entries = map.into_iter().map(|(key, value)| (Key::from(key), seen(value)));
            cel::Value::Map(Map { map: Arc::new(entries.collect()) })
        }
    }
}

/// About how many bytes a value has, and the entries of its longest list or map.
fn size(value: &Json) -> (u64, u64) {
    let all =
        |bytes: u64, (inner, longest): (u64, u64), most: u64| (bytes + inner, longest.max(most));
    match value {
        Json::String(text) => (text.len() as u64, 0),
        Json::Array(list) => {
            let count = list.len() as u64;
            list.iter().fold((count, count), |(bytes, most), value| all(bytes, size(value), most))
        }
        Json::Object(map) => {
            let count = map.len() as u64;
            map.iter().fold((count, count), |(bytes, most), (key, value)| {
                all(bytes + key.len() as u64, size(value), most)
            })
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => (1, 0),
    }
}

impl Filter {
    /// Compiles an expression such as `event.data.price > 10.0 && event.subject != ""`.
    ///
    /// # Errors
    /// When it is beyond a bound or not CEL; where it is wrong at one place, the message has line
    /// and column.
    pub fn compile(text: &str, sees: Sees) -> Result<Self, FilterError> {
        if text.len() > FILTER_MAX_BYTES {
            return Err(FilterError::TooLong(text.len()));
        }
        if written_depth(text) > FILTER_MAX_DEPTH {
            return Err(FilterError::TooDeep);
        }
        let filter = on_a_deep_stack(|| Self::parse(text, sees))?;
        // What is wrong for every event is refused now: an answer that is no yes or no, an unknown
        // function. What a sample event merely lacks is not held against it.
        let mut sample = Facts::new(json!({ "type": "", "botid": "", "data": {} }));
        sample.set_subscriber(json!({ "id": "", "tags": [] }));
        if filter.shape.steps(&sample) > FILTER_MAX_STEPS {
            return Err(FilterError::TooDear(filter.shape.steps(&sample)));
        }
        match filter.answer(&sample) {
            Err(Refusal::Unknown(name)) => {
                let offset = text.find(&name).map_or(0, |at| text[..at].chars().count());
                let at = Position::of(text, offset);
                Err(FilterError::Unknown { name, at, known: sees.spoken() })
            }
            Ok(cel::Value::Bool(_)) | Err(Refusal::Other(_)) => Ok(filter),
            Ok(other) => Err(FilterError::NotBoolean(shown(&other))),
        }
    }

    /// What has to happen on a deep stack: the parser and all that walks a tree of unknown depth.
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
            names: Vec::new(),
            shape: Shape::default(),
            in_map: false,
        };
        walk.visit(program.expression(), 1, 0)?;
        let shape = walk.shape;
        if shape.additions > FILTER_MAX_ADDITIONS {
            return Err(FilterError::Additions(shape.additions));
        }
        Ok(Self { program, shape, sees })
    }

    /// Whether the facts pass.
    ///
    /// # Errors
    /// When the expression fails on them, for example on a field that they lack, or would take too
    /// long.
    pub fn matches(&self, facts: &Facts) -> Result<bool, FilterError> {
        let steps = self.shape.steps(facts);
        let spent = facts.spent.get().saturating_add(steps);
        if steps > FILTER_MAX_STEPS || spent > EVENT_MAX_STEPS {
            return Err(FilterError::TooDear(steps));
        }
        facts.spent.set(spent);
        match self.answer(facts) {
            Ok(cel::Value::Bool(answer)) => Ok(answer),
            Ok(other) => Err(FilterError::NotBoolean(shown(&other))),
            Err(Refusal::Unknown(name)) => {
                let at = Position { line: 1, column: 1 };
                Err(FilterError::Unknown { name, at, known: self.sees.spoken() })
            }
            Err(Refusal::Other(error)) => Err(FilterError::Evaluation(error)),
        }
    }

    fn answer(&self, facts: &Facts) -> Result<cel::Value, Refusal> {
        let run = AssertUnwindSafe(|| self.program.execute(&facts.context));
        match catch_unwind(run) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(ExecutionError::UndeclaredReference(name))) => {
                Err(Refusal::Unknown(name.to_string()))
            }
            Ok(Err(error)) => Err(Refusal::Other(error.to_string())),
            Err(_) => Err(Refusal::Other("the evaluation panicked".to_owned())),
        }
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}

/// A value in a message, cut.
fn shown(value: &cel::Value) -> String {
    let text = format!("{value:?}");
    let cut: String = text.chars().take(100).collect();
    if cut.len() < text.len() { cut + "…" } else { cut }
}

/// How deep brackets are nested, or signs stand before each other, which the parser folds. What is
/// in quotes does not count.
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

/// Runs what recurses as deep as a text is long.
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

impl Shape {
    /// What it may cost on these facts, at most.
    fn steps(&self, facts: &Facts) -> u64 {
        // Two lists that are added are as long as both.
        let longest = (facts.longest + self.longest as u64) * (1 + self.additions as u64);
        let mut times = 1_u64;
        let mut steps = 0_u64;
        for nodes in self.nodes {
            steps = steps.saturating_add(nodes.saturating_mul(times));
            times = times.saturating_mul(longest.max(1));
        }
        steps.saturating_mul(1 + facts.bytes / BYTES_OF_A_STEP)
    }
}

/// Goes through a tree: its depth, its names, its shape.
struct Walk<'a> {
    text: &'a str,
    source: &'a SourceInfo,
    sees: Sees,
    /// What macros have named around here.
    names: Vec<String>,
    shape: Shape,
    /// In what a `map` makes of each entry.
    in_map: bool,
}

/// Whether a macro makes new entries: `map`.
fn is_map(over: &ComprehensionExpr) -> bool {
    // What `filter` adds is the entry itself.
    adds_of(&over.loop_step.expr)
        .is_some_and(|added| !matches!(&added.expr, Expr::Ident(name) if *name == over.iter_var))
        && matches!(over.accu_init.expr, Expr::List(_))
}

/// What a macro adds to the list that it gathers, each time.
fn adds_of(step: &Expr) -> Option<&IdedExpr> {
    let Expr::Call(call) = step else { return None };
    match &*call.func_name {
        "_+_" => match call.args.get(1).map(|added| &added.expr) {
            Some(Expr::List(list)) => list.elements.first(),
            _ => None,
        },
        "_?_:_" => call.args.get(1).and_then(|then| adds_of(&then.expr)),
        _ => None,
    }
}

/// Whether there is a `map` in it whose entries may be larger than what it goes over.
fn grows(expr: &Expr) -> bool {
    let any = |parts: &[IdedExpr]| parts.iter().any(|part| grows(&part.expr));
    match expr {
        Expr::Select(select) => grows(&select.operand.expr),
        Expr::Call(call) => {
            any(&call.args) || call.target.as_ref().is_some_and(|target| grows(&target.expr))
        }
        Expr::List(list) => any(&list.elements),
        Expr::Comprehension(over) => {
            let made = adds_of(&over.loop_step.expr).map(|added| &added.expr);
            (is_map(over) && made.is_some_and(makes_more)) || grows(&over.iter_range.expr)
        }
        _ => false,
    }
}

/// Whether a value is put together.
fn makes_more(expr: &Expr) -> bool {
    match expr {
        Expr::Select(select) => makes_more(&select.operand.expr),
        Expr::Call(call) => {
            call.func_name == "_+_"
                || call.args.iter().any(|part| makes_more(&part.expr))
                || call.target.as_ref().is_some_and(|target| makes_more(&target.expr))
        }
        Expr::List(_) | Expr::Map(_) | Expr::Struct(_) | Expr::Comprehension(_) => true,
        _ => false,
    }
}

fn check_regex(pattern: Option<&IdedExpr>) -> Result<(), FilterError> {
    let Some(Expr::Literal(LiteralValue::String(text))) = pattern.map(|pattern| &pattern.expr)
    else {
        let problem = "is no text; write it out, so that it is known before it runs";
        return Err(FilterError::Regex(problem.to_owned()));
    };
    let text = text.inner();
    let problem = if text.len() > REGEX_MAX_BYTES {
        format!("has {} bytes; at most {REGEX_MAX_BYTES} are allowed", text.len())
    } else {
        match regex::RegexBuilder::new(text).size_limit(REGEX_MAX_SIZE).build() {
            Ok(_) => return Ok(()),
            Err(regex::Error::CompiledTooBig(_)) => {
                "repeats too much; write a smaller one".to_owned()
            }
            Err(error) => {
                let said = error.to_string();
                format!("is not valid: {}", said.lines().last().unwrap_or_default())
            }
        }
    };
    Err(FilterError::Regex(problem))
}

impl Walk<'_> {
    fn visit(&mut self, node: &IdedExpr, depth: usize, macros: usize) -> Result<(), FilterError> {
        if depth > FILTER_MAX_DEPTH {
            return Err(FilterError::TooDeep);
        }
        self.shape.nodes[macros] += 1;
        let deeper = depth + 1;
        match &node.expr {
            Expr::Unspecified | Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.name(node, name),
            Expr::Select(select) => self.visit(&select.operand, deeper, macros),
            Expr::Call(call) => {
                let name = &*call.func_name;
                let is_named = name.starts_with(|first: char| first.is_ascii_alphabetic());
                if is_named && !FUNCTIONS.contains(&name) {
                    return Err(self.unknown(node, name));
                }
                if call.func_name == "matches" {
                    check_regex(call.args.last())?;
                    self.shape.nodes[macros] += REGEX_STEPS;
                }
                self.shape.additions += usize::from(call.func_name == "_+_");
                let target = call.target.as_deref();
                target.into_iter().chain(&call.args).try_for_each(|part| {
                    // `a && b && c` is one thing after the other to whoever writes it.
                    let chained = matches!(&part.expr, Expr::Call(inner)
                        if inner.func_name == call.func_name
                            && matches!(&*call.func_name, "_&&_" | "_||_"));
                    self.visit(part, if chained { depth } else { deeper }, macros)
                })
            }
            Expr::List(list) => {
                self.shape.longest = self.shape.longest.max(list.elements.len());
                list.elements.iter().try_for_each(|part| self.visit(part, deeper, macros))
            }
            Expr::Map(map) => {
                self.shape.longest = self.shape.longest.max(map.entries.len());
                map.entries.iter().try_for_each(|entry| self.entry(&entry.expr, deeper, macros))
            }
            Expr::Struct(made) => {
                made.entries.iter().try_for_each(|entry| self.entry(&entry.expr, deeper, macros))
            }
            Expr::Comprehension(over) => {
                if macros == FILTER_MAX_MACROS {
                    return Err(FilterError::Macros);
                }
                let is_map = is_map(over);
                if is_map && self.in_map || grows(&over.iter_range.expr) {
                    return Err(FilterError::Grows);
                }
                self.visit(&over.iter_range, deeper, macros)?;
                let within = self.in_map;
                self.in_map |= is_map;
                self.visit(&over.accu_init, deeper, macros)?;
                let known = self.names.len();
                self.names.extend([over.iter_var.clone(), over.accu_var.clone()]);
                self.names.extend(over.iter_var2.clone());
                // A macro that gathers adds to a list of its own.
                let additions = self.shape.additions;
                for part in [&over.loop_cond, &over.loop_step, &over.result] {
                    self.visit(part, deeper, macros + 1)?;
                }
                if matches!(over.accu_init.expr, Expr::List(_)) {
                    self.shape.additions = self.shape.additions.max(additions + 1) - 1;
                }
                self.names.truncate(known);
                self.in_map = within;
                Ok(())
            }
        }
    }

    fn entry(&mut self, entry: &EntryExpr, depth: usize, macros: usize) -> Result<(), FilterError> {
        match entry {
            EntryExpr::StructField(field) => self.visit(&field.value, depth, macros),
            EntryExpr::MapEntry(entry) => {
                self.visit(&entry.key, depth, macros)?;
                self.visit(&entry.value, depth, macros)
            }
        }
    }

    fn name(&self, node: &IdedExpr, name: &str) -> Result<(), FilterError> {
        let known = self.names.iter().any(|known| known == name)
            || self.sees.names().contains(&name)
            || TYPES.contains(&name);
        if known {
            return Ok(());
        }
        Err(self.unknown(node, name))
    }

    fn unknown(&self, node: &IdedExpr, name: &str) -> FilterError {
        let begin = self.source.offset_for(node.id).map_or(0, |(start, _)| start as usize);
        // A call is where its bracket is, a name where it begins.
        let (before, after): (String, String) =
            (self.text.chars().take(begin).collect(), self.text.chars().skip(begin).collect());
        let offset = match before.rfind(name).filter(|_| !after.starts_with(name)) {
            Some(at) => before[..at].chars().count(),
            None => begin,
        };
        let at = Position::of(self.text, offset);
        FilterError::Unknown { name: name.to_owned(), at, known: self.sees.spoken() }
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

    fn compiled(text: &str) -> Filter {
        Filter::compile(text, Sees::Subscriber).unwrap()
    }

    fn facts(data: &str) -> Facts {
        let mut facts = Facts::of(&event(data)).unwrap();
        facts.set_subscriber(json!({ "id": "u", "tags": ["vip"], "age": 31 }));
        facts
    }

    #[test]
    fn a_filter_reads_attributes_data_and_the_subscriber() {
        let filter = compiled(
            r#"event.type == "sale" && event.data.price > 10 && "vip" in event.data.tags && event.botid == "b" && subscriber.age > 30"#,
        );
        assert!(filter.matches(&facts(r#"{"price":11,"tags":["vip"]}"#)).unwrap());
        assert!(!filter.matches(&facts(r#"{"price":9,"tags":["vip"]}"#)).unwrap());
        // Numbers of events and of filters are of one type.
        for text in
            ["subscriber.age + 1 == 32", "subscriber.age % 2 == 1", "subscriber.age - 40 < 0"]
        {
            assert!(compiled(text).matches(&facts("{}")).unwrap(), "{text}");
        }
        let mut older = facts("{}");
        let filter = compiled("subscriber.age == 32");
        assert!(!filter.matches(&older).unwrap());
        older.set_subscriber(json!({ "age": 32 }));
        assert!(filter.matches(&older).unwrap());
    }

    #[test]
    fn a_filter_that_cannot_be_used_says_why_and_where() {
        let many = |part: &str, times: usize| part.repeat(times);
        let cases = [
            ("event.data.x >".to_owned(), "line 1, column 15"),
            ("true &&\n  event.data.x ==== 1".to_owned(), "line 2, column 18"),
            (many("(", 40) + "true" + &many(")", 40), "deeper than 32"),
            (many("(", 500) + "true" + &many(")", 500), "deeper than 32"),
            (many("!", 500) + "true", "deeper than 32"),
            (many("-", 501) + "1 == 1", "deeper than 32"),
            (many("true ? true : ", 60) + "true", "deeper than 32"),
            ("event".to_owned() + &many(".a", 500), "deeper than 32"),
            (many("1 * ", 500) + "1 == 1", "deeper than 32"),
            (many("1 == ", 500) + "1", "deeper than 32"),
            ("true".to_owned() + &many(" ", 10_000), "10004 bytes; at most 4096"),
            (many("1 + ", 17) + "1 == 18", "17 additions; at most 16"),
            ("evnt.data.price > 3".to_owned(), "names \"evnt\" at line 1, column 1"),
            (
                "event.type == 'x' &&\n person.age > 3".to_owned(),
                "names \"person\" at line 2, column 2",
            ),
            ("fetch('x')".to_owned(), "names \"fetch\" at line 1, column 1"),
            ("subscriber.name.lower() == 'x'".to_owned(), "names \"lower\" at line 1, column 17"),
            ("event.type == 'x' && now() > 3".to_owned(), "names \"now\" at line 1, column 22"),
            ("1 + 1".to_owned(), "must answer true or false"),
            (
                "[1].all(a, [1].all(b, [1].all(c, true)))".to_owned(),
                "nests macros (all, exists, exists_one, filter, map) deeper than 2",
            ),
        ];
        for (text, part) in cases {
            let error = Filter::compile(&text, Sees::Subscriber).unwrap_err().to_string();
            assert!(error.contains(part), "{text:.60}: {error}");
            assert!(!error.contains("expecting") && !error.contains("EOF"), "{error}");
        }
        let error = Filter::compile("subscriber.age > 3", Sees::Event).unwrap_err();
        assert_eq!(error.position(), Some(Position { line: 1, column: 1 }));
    }

    #[test]
    fn the_parser_speaks_of_what_was_written() {
        let cases = [
            ("Syntax error: mismatched input '<EOF>' expecting {'[', NUM_INT}", "unexpected end"),
            ("Syntax error: extraneous input '==' expecting {'['}", "unexpected '=='"),
            (
                "Syntax error: mismatched input ',' expecting ')'",
                "unexpected ',', ')' was expected",
            ),
            ("Syntax error: token recognition error at: '#'", "unexpected '#'"),
            ("Syntax error: missing ')' at '<EOF>'", "missing ')' at the end"),
            ("ERROR: something else\n", "ERROR: something else"),
        ];
        for (problem, said) in cases {
            assert_eq!(spoken(problem), said);
        }
        for text in ["event.data.x >", "true ==== 1", "'x", "(true", "true)", "a b", "[1, 2", "#"] {
            let error = Filter::compile(text, Sees::Event).unwrap_err().to_string();
            assert!(error.contains(": unexpected ") || error.contains(": missing "), "{error}");
        }
    }

    #[test]
    fn what_an_event_lacks_is_an_error_of_that_event() {
        let lacking = compiled("event.data.x > 1");
        assert!(matches!(lacking.matches(&facts("{}")), Err(FilterError::Evaluation(_))));
        let number = compiled("event.data.x");
        assert!(matches!(number.matches(&facts("{\"x\":1}")), Err(FilterError::NotBoolean(_))));
        let careful = compiled("has(event.data.x) && event.data.x > 1");
        assert!(!careful.matches(&facts("{}")).unwrap());
    }

    #[test]
    fn what_people_write_is_within_the_bounds() {
        let tags = (0..60).map(|tag| format!("event.data.tag == \"t{tag}\""));
        compiled(&tags.collect::<Vec<_>>().join(" || "));
        compiled("event.data.orders.map(o, o.price).exists(p, p > 10)");
        for text in [
            "event.data.tags.exists(tag, tag == \"vip\")",
            "event.data.orders.exists(o, o.lines.all(l, l.price * 1.2 > 3.0 && l.name.startsWith(\"x\")))",
            "event.data.tags.filter(t, t != \"a\").map(t, t + \"b\").size() > 0",
            "type(event.data.x) == int",
            "event.data.text == \"((((((((((((((((((((((((((((((((((((((((((((((((((\"",
            "event.data.mail.matches(\"^[^@]+@example[.]com$\")",
            "subscriber.tags.exists_one(t, t in [\"a\", \"b\"]) ? true : has(subscriber.age)",
        ] {
            compiled(text);
        }
    }

    #[test]
    fn a_filter_whose_values_could_grow_without_end_is_refused() {
        let chain = |of: &str, map: &str| format!("{of}{}.size() == 1", map.repeat(8));
        for (text, part) in [
            (chain("[1]", ".map(a,[a,a,a,a])"), "lists out of lists"),
            (chain("event.data.l", ".map(a,a+a)"), "lists out of lists"),
            (chain("[1]", ".map(a,{'x':a,'y':a})"), "lists out of lists"),
            ("[1].map(a, [1].map(b, [a, b])).size() == 1".to_owned(), "lists out of lists"),
            ("[[1].map(a,[a,a])].exists(x, true)".to_owned(), "lists out of lists"),
            ("event.data.x.matches(event.data.y)".to_owned(), "regular expression that is no text"),
            (
                "event.data.x.matches('(')".to_owned(),
                "regular expression that is not valid: error: unclosed group",
            ),
            (r#"event.data.x.matches("(\\w{200}){50}")"#.to_owned(), "repeats too much"),
        ] {
            let error = Filter::compile(&text, Sees::Subscriber).unwrap_err().to_string();
            assert!(error.contains(part), "{text:.60}: {error}");
        }
    }

    #[test]
    fn all_filters_on_an_event_have_a_bound_together() {
        let facts = facts(&format!("{{\"l\":{:?}}}", vec![1; 300]));
        let filter = compiled("event.data.l.all(a, a == 1)");
        let ran = (0..1_000).take_while(|_| filter.matches(&facts).is_ok()).count();
        assert!((10..900).contains(&ran), "{ran} ran");
    }

    #[test]
    fn a_filter_that_would_take_long_on_an_event_is_not_run() {
        let list = |n: usize| format!("{{\"l\":{:?}}}", vec![1; n]);
        let one = compiled("event.data.l.all(a, a == 1)");
        assert!(one.matches(&facts(&list(1_000))).unwrap());
        let two = compiled("event.data.l.all(a, event.data.l.all(b, a == b))");
        assert!(two.matches(&facts(&list(50))).unwrap());
        assert!(matches!(two.matches(&facts(&list(1_000))), Err(FilterError::TooDear(_))));
        assert!(matches!(one.matches(&facts(&list(100_000))), Err(FilterError::TooDear(_))));
    }
}
