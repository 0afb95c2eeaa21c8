//! Evaluates filters on the facts of an event, within a bounded number of steps.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use cel::objects::{Key, Map};
use cel::{Context, Env, ExecutionError};
use serde_json::Value as Json;

use super::{FILTER_MAX_STEPS, Filter, FilterError, Position, Shape};
use crate::event::Event;

/// The cost of a step grows by the cost of one step for each such number of bytes of an event.
const BYTES_OF_A_STEP: u64 = 64;
/// The maximum cost of all filters on one event together, in steps.
const EVENT_MAX_STEPS: u64 = 2_000_000;

/// Why an expression gave no result.
pub(super) enum Refusal {
    Unknown(String),
    Other(String),
}

/// The input of filters: made once for an event, whatever the number of filters.
pub struct Facts {
    context: Context<'static, 'static>,
    /// Approximate size of the event and the subscriber in JSON.
    bytes: u64,
    /// Number of entries in the longest list or map.
    longest: u64,
    /// Number of steps granted to filters so far.
    spent: Cell<u64>,
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Facts").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Facts {
    /// The facts of an event alone.
    ///
    /// # Errors
    /// If the event's data is nested deeper than the JSON parser allows.
    pub fn of(event: &Event) -> Result<Self, FilterError> {
        let event = serde_json::to_value(event)
            .map_err(|error| FilterError::Evaluation(error.to_string()))?;
        Ok(Self::new(event))
    }

    pub(super) fn new(event: Json) -> Self {
        static LIBRARY: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));
        let context = Context::with_env(Arc::clone(&LIBRARY));
        let mut facts = Self { context, bytes: 0, longest: 0, spent: Cell::new(0) };
        facts.add("event", event);
        facts
    }

    /// Adds the subscriber, or replaces it by its new state.
    pub fn set_subscriber(&mut self, subscriber: Json) {
        self.add("subscriber", subscriber);
    }

    fn add(&mut self, name: &str, value: Json) {
        let (bytes, longest) = size(&value);
        // A subscriber that is set again counts again: that can only raise the cost.
        self.bytes += bytes;
        self.longest = self.longest.max(longest);
        self.context.add_variable_from_value(name, seen(value));
    }
}

/// Converts JSON to the values that filters use. Whole numbers become `int`, like the literals in
/// filters: CEL cannot add numbers of two types.
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

/// The approximate size of a value in bytes, and the number of entries in its longest list or map.
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
    /// Whether the facts match.
    ///
    /// # Errors
    /// If the expression fails on them, for example on a missing field, or would take too long.
    pub fn matches(&self, facts: &Facts) -> Result<bool, FilterError> {
        match self.evaluate(facts)? {
            cel::Value::Bool(answer) => Ok(answer),
            other => Err(FilterError::NotBoolean(shown(&other))),
        }
    }

    /// What the expression gives for the facts.
    pub(super) fn evaluate(&self, facts: &Facts) -> Result<cel::Value, FilterError> {
        let steps = self.shape.steps(facts);
        let spent = facts.spent.get().saturating_add(steps);
        if steps > FILTER_MAX_STEPS || spent > EVENT_MAX_STEPS {
            return Err(FilterError::TooDear(steps));
        }
        facts.spent.set(spent);
        match self.answer(facts) {
            Ok(value) => Ok(value),
            Err(Refusal::Unknown(name)) => {
                let at = Position { line: 1, column: 1 };
                Err(FilterError::Unknown { name, at, known: self.sees.spoken() })
            }
            Err(Refusal::Other(error)) => Err(FilterError::Evaluation(error)),
        }
    }

    pub(super) fn answer(&self, facts: &Facts) -> Result<cel::Value, Refusal> {
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

/// A value for a message, cut to 100 characters.
pub(super) fn shown(value: &cel::Value) -> String {
    let text = format!("{value:?}");
    let cut: String = text.chars().take(100).collect();
    if cut.len() < text.len() { cut + "…" } else { cut }
}

impl Shape {
    /// The maximum cost on these facts, in steps.
    pub(super) fn steps(&self, facts: &Facts) -> u64 {
        // The sum of two lists is as long as both together.
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
