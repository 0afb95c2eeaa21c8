//! CEL expressions and globs, of configurations and of tenants.

use std::mem::discriminant;
use std::sync::Once;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::halves;
use crate::event::Event;
use crate::expression::{FILTER_MAX_BYTES, Facts, Filter, FilterError, Glob, Sees, TextExpression};
use crate::id::BotId;

/// No expression takes longer than this to compile, or to evaluate once; with optimisation they take
/// milliseconds.
const LONG: Duration = Duration::from_secs(10);
/// The text that an expression gives is at most so many times as long as the expression and the event.
const GROWTH: usize = 64;

/// An expression, an empty line, and the data of the event.
///
/// # Panics
/// If it takes long, gives a text that is much longer than all it had, or names a place outside of its
/// text.
pub fn expression(data: &[u8]) {
    let (text, data) = halves(data, b"\n\n");
    let Ok(text) = std::str::from_utf8(text) else { return };
    let event = event(data);
    let filter = soon(|| Filter::compile(text, Sees::Subscriber));
    match &filter {
        Ok(filter) => evaluate(filter, &event),
        Err(error) => told(error, text),
    }
    if let Ok(expression) = soon(|| TextExpression::compile(text))
        && let Ok(given) = soon(|| expression.text(&event))
    {
        let had = text.len() + super::event::json(&event).len();
        assert!(given.len() <= GROWTH * had, "{} bytes of {had}", given.len());
    }
    if text.matches('*').count() <= 4 {
        let glob = Glob::new(text);
        soon(|| glob.matches(event.data().unwrap_or_default()));
        assert!(text.contains('*') || glob.matches(text), "{text:?} is not itself");
    }
}

fn evaluate(filter: &Filter, event: &Event) {
    let Ok(mut facts) = Facts::of(event) else { return };
    let subscriber = serde_json::json!({ "id": "ann", "tags": ["vip", "new"], "age": 31 });
    facts.set_subscriber(subscriber);
    let first = soon(|| filter.matches(&facts));
    // What all filters on an event may cost together is bounded.
    let again = soon(|| filter.matches(&facts));
    // An error may show a map, whose entries have no order.
    let is_same = match (&first, &again) {
        (Ok(first), Ok(again)) => first == again,
        (Err(first), Err(again)) => discriminant(first) == discriminant(again),
        _ => false,
    };
    assert!(is_same || matches!(again, Err(FilterError::Spent)), "{first:?} {again:?}");
}

fn told(error: &FilterError, text: &str) {
    assert!(!error.to_string().is_empty());
    assert!(text.len() <= FILTER_MAX_BYTES || *error == FilterError::TooLong(text.len()));
    if let Some(at) = error.position() {
        let lines = text.split('\n').count();
        assert!((1..=lines).contains(&at.line), "{error}");
        let line = text.split('\n').nth(at.line - 1).unwrap_or_default();
        assert!((1..=line.chars().count() + 1).contains(&at.column), "{error}");
    }
}

fn soon<T>(work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    assert!(begun.elapsed() < LONG, "it took {:?}", begun.elapsed());
    done
}

/// An event with this data; without data if it is no JSON or goes beyond a bound.
fn event(data: &[u8]) -> Event {
    let bot = BotId::parse("shop").expect("an id");
    let built = || Event::builder("tag.applied", &bot).id("1").subject("ann");
    let data = serde_json::from_slice::<Box<RawValue>>(data).ok();
    let with_data = data.and_then(|data| built().data(&data).ok()?.build().ok());
    with_data.unwrap_or_else(|| built().build().expect("attributes within their bounds"))
}

/// The parser of expressions may panic: [`Filter::compile`] catches that. A runner that ends the process
/// on every panic must not end it on these.
pub fn tolerate_panics_of_the_parser() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            let place = info.location().map_or("", |location| location.file());
            if place.contains("fairlane") || place.starts_with("src/") {
                eprintln!("{info}");
            }
        }));
    });
}
