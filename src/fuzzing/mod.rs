//! What must hold for any input: one function per kind of input that comes from outside, or back from a
//! store. Each panics if its property does not hold.
//!
//! Two runners call them: the targets in `fuzz/`, with `make fuzz`, and the test in this module, with
//! the inputs of `fuzz/corpus/` and a bounded number of changes of them.

mod configuration;
mod event;
mod expression;
mod import;
mod record;
mod stored;
mod token;
mod url;

#[cfg(test)]
mod tests;

pub use self::configuration::configuration;
pub use self::event::event;
pub use self::expression::{expression, tolerate_panics_of_the_parser};
pub use self::import::import;
pub use self::record::record;
pub use self::stored::stored;
pub use self::token::token;
pub use self::url::url;

/// A name, and what checks an input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target by its name: the names of its program in `fuzz/` and of its folder in `fuzz/corpus/`.
pub const TARGETS: [Target; 9] = [
    ("configuration", configuration),
    ("event", event),
    ("expression", expression),
    ("import", import),
    ("parameters", parameters),
    ("record", record),
    ("stored", stored),
    ("token", token),
    ("url", url),
];

/// Parameters, bodies and headers of the HTTP API.
///
/// The first line names what the rest is: `form`, `json`, `rule`, `forwarded`, `proxy` or `trace`.
///
/// # Panics
/// If a property does not hold: a form and JSON with the same parameters are read alike, what is
/// accepted keeps the rules for URLs, and a refusal is an answer with a status from 400 to 499.
pub fn parameters(data: &[u8]) {
    crate::http::fuzzing::parameters(data);
}

/// The input before and after the first `separator`. Without one, the second part is empty.
fn halves<'a>(data: &'a [u8], separator: &[u8]) -> (&'a [u8], &'a [u8]) {
    let at = data.windows(separator.len()).position(|window| window == separator);
    at.map_or((data, &[]), |at| (&data[..at], &data[at + separator.len()..]))
}
