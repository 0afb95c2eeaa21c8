//! Evaluates filters on the facts of an event, within a bounded number of steps.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use cel::objects::{Key, Map};
use cel::{Context, Env, ExecutionError};
use serde_json::Value as Json;

use super::size::{BYTES_OF_A_STEP, Sizes};
use super::{EVENT_MAX_STEPS, FILTER_MAX_STEPS, Filter, FilterError, Position, Shape};
use crate::event::Event;

/// Maximum length of an error and of a value in a message, in characters.
const ERROR_MAX: usize = 500;
const VALUE_MAX: usize = 100;

/// Why an expression gave no result.
pub(super) enum Refusal {
    Unknown(String),
    Other(String),
}

/// The input of filters: made once for an event, whatever the number of filters.
pub struct Facts {
    context: Context<'static, 'static>,
    sizes: Sizes,
    /// Number of steps granted to filters so far.
    spent: Cell<u64>,
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Facts").field("size", &self.sizes.all()).finish_non_exhaustive()
    }
}

impl Facts {
    /// The facts of an event alone.
    ///
    /// # Errors
    /// If the event's data is nested deeper than the JSON parser allows.
    pub fn of(event: &Event) -> Result<Self, FilterError> {
        Ok(Self::new(json(event)?))
    }

    pub(super) fn new(event: Json) -> Self {
        static LIBRARY: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));
        let context = Context::with_env(Arc::clone(&LIBRARY));
        let mut facts = Self { context, sizes: Sizes::of_event(&event), spent: Cell::new(0) };
        facts.add("event", event);
        facts
    }

    /// Adds the subscriber, or replaces it by its new state. That costs steps too: as many as a copy.
    pub fn set_subscriber(&mut self, subscriber: Json) {
        self.sizes.set_subscriber(&subscriber);
        self.spent.set(self.spent.get().saturating_add(self.sizes.subscriber()));
        self.add("subscriber", subscriber);
    }

    fn add(&mut self, name: &str, value: Json) {
        self.context.add_variable_from_value(name, seen(value));
    }

    pub(super) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Whether filters may use further steps.
    ///
    /// # Errors
    /// If they have used up all.
    pub fn has_steps_left(&self) -> Result<(), FilterError> {
        if self.spent.get() < EVENT_MAX_STEPS { Ok(()) } else { Err(FilterError::Spent) }
    }

    fn spend(&self, steps: u64) -> Result<(), FilterError> {
        let spent = self.spent.get().saturating_add(steps);
        if spent > EVENT_MAX_STEPS {
            return Err(FilterError::Spent);
        }
        self.spent.set(spent);
        Ok(())
    }
}

/// The event in the form for filters.
pub(super) fn json(event: &Event) -> Result<Json, FilterError> {
    serde_json::to_value(event).map_err(|error| FilterError::Evaluation(error.to_string()))
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

    /// The maximum cost on facts of these sizes, in steps. It does not run if that is above
    /// [`FILTER_MAX_STEPS`].
    #[must_use]
    pub fn steps(&self, sizes: &Sizes) -> u64 {
        self.shape.steps(sizes)
    }

    /// What the expression gives for the facts.
    pub(super) fn evaluate(&self, facts: &Facts) -> Result<cel::Value, FilterError> {
        let steps = self.steps(&facts.sizes);
        if steps > FILTER_MAX_STEPS {
            return Err(FilterError::TooDear(steps));
        }
        facts.spend(steps)?;
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
        let run = || cel::Value::resolve(&self.expression, &facts.context);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(ExecutionError::UndeclaredReference(name))) => {
                Err(Refusal::Unknown(name.to_string()))
            }
            Ok(Err(error)) => Err(Refusal::Other(cut(format_args!("{error}"), ERROR_MAX))),
            Err(_) => Err(Refusal::Other("the evaluation panicked".to_owned())),
        }
    }
}

/// A value for a message.
pub(super) fn shown(value: &cel::Value) -> String {
    cut(format_args!("{value:?}"), VALUE_MAX)
}

/// The first characters of a text. No more of it is made, because values and errors contain events.
fn cut(said: fmt::Arguments<'_>, most: usize) -> String {
    let mut cut = Cut { text: String::new(), left: most };
    // It fails where it is cut.
    let _ = cut.write_fmt(said);
    cut.text
}

struct Cut {
    text: String,
    /// Number of characters that still fit.
    left: usize,
}

impl fmt::Write for Cut {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let Some((end, _)) = more.char_indices().nth(self.left) else {
            self.text.push_str(more);
            self.left -= more.chars().count();
            return Ok(());
        };
        self.text.push_str(&more[..end]);
        self.text.push('…');
        Err(fmt::Error)
    }
}

impl Shape {
    /// The maximum cost on facts of these sizes, in steps.
    fn steps(&self, sizes: &Sizes) -> u64 {
        let size = sizes.all();
        // The sum of two lists is as long as both together.
        let longest = (size.longest + self.longest as u64) * (1 + self.additions as u64);
        let copied = self.copies.by_power(|names| sizes.volume_of(names));
        let (mut steps, mut units, mut times) = (0_u64, 0_u64, 1_u64);
        for (nodes, volume) in self.nodes.into_iter().zip(copied) {
            steps = steps.saturating_add(nodes.saturating_mul(times));
            units = units.saturating_add(volume.saturating_mul(times));
            times = times.saturating_mul(longest.max(1));
        }
        steps.saturating_mul(1 + size.bytes / BYTES_OF_A_STEP).saturating_add(units)
    }
}
