//! The context of a trace: the headers `traceparent` and `tracestate` of W3C Trace Context, and the
//! extension attributes of the same names of a `CloudEvents` event.
//!
//! An invalid `traceparent` counts as absent. An invalid `tracestate` is dropped alone.

use std::fmt;

use rand::Rng as _;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use crate::event::Event;

/// The name of the header, and of the attribute of an event.
pub(crate) const PARENT: &str = "traceparent";
/// The name of the header, and of the attribute of an event.
pub(crate) const STATE: &str = "tracestate";

const PARENT_HEADER: HeaderName = HeaderName::from_static(PARENT);
const STATE_HEADER: HeaderName = HeaderName::from_static(STATE);

/// Length of a `traceparent` of version 00.
const PARENT_BYTES: usize = 55;
/// Maximum length of a `traceparent` of a later version.
const PARENT_MAX_BYTES: usize = 256;
/// Maximum length of a `tracestate`, in bytes. W3C demands that this much is passed on.
const STATE_MAX_BYTES: usize = 512;
/// Maximum number of entries of a `tracestate`.
const STATE_MAX_ENTRIES: usize = 32;
/// Maximum length of the key, and of the value, of an entry of a `tracestate`.
const ENTRY_MAX_BYTES: usize = 256;
/// The bit of the flags that says that the trace is recorded.
const SAMPLED: u8 = 1;
/// The flags that version 00 passes on: sampled, and random trace id.
const KNOWN_FLAGS: u8 = 3;

/// The id of a trace.
pub(crate) type TraceId = [u8; 16];
/// The id of a span.
pub(crate) type SpanId = [u8; 8];

/// A trace, and the span in it that caused what comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    pub(super) flags: u8,
    /// Empty for none.
    pub(super) state: Box<str>,
}

impl TraceContext {
    /// Reads a `traceparent` and a `tracestate`. `None`: the `traceparent` is not valid.
    #[must_use]
    pub fn parse(parent: &str, state: Option<&str>) -> Option<Self> {
        let bytes = parent.as_bytes();
        if !(PARENT_BYTES..=PARENT_MAX_BYTES).contains(&bytes.len()) {
            return None;
        }
        let [version] = hex(&bytes[..2])?;
        let is_complete = match version {
            0 => bytes.len() == PARENT_BYTES,
            0xff => false,
            // A later version may add fields.
            _ => bytes.get(PARENT_BYTES).is_none_or(|next| *next == b'-'),
        };
        let are_apart = [2, 35, 52].iter().all(|at| bytes[*at] == b'-');
        if !is_complete || !are_apart {
            return None;
        }
        let (trace, span) = (hex(&bytes[3..35])?, hex(&bytes[36..52])?);
        let [flags] = hex(&bytes[53..55])?;
        if trace == [0; 16] || span == [0; 8] {
            return None;
        }
        let state = state.filter(|state| is_state(state)).unwrap_or_default().into();
        Some(Self { trace, span, flags: flags & KNOWN_FLAGS, state })
    }

    /// The context in the headers of a request.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all(PARENT_HEADER).iter();
        let parent = parents.next()?.to_str().ok()?.trim();
        if parents.next().is_some() {
            return None;
        }
        let mut states = headers.get_all(STATE_HEADER).iter().map(HeaderValue::to_str);
        let first = states.next().transpose().ok().flatten();
        // Several headers are one list.
        let all = states.try_fold(first.map(str::to_owned), |all, next| {
            next.map(|next| all.map(|all| format!("{all},{next}")))
        });
        Self::parse(parent, all.ok().flatten().as_deref())
    }

    /// The context that an event carries.
    pub(crate) fn of_event(event: &Event) -> Option<Self> {
        let parent = event.extension(PARENT)?.as_str()?;
        Self::parse(parent, event.extension(STATE).and_then(serde_json::Value::as_str))
    }

    /// The context of an event whose trace is recorded.
    pub(super) fn sampled_of(event: &Event) -> Option<Self> {
        Self::of_event(event).filter(Self::is_sampled)
    }

    /// The context in one text, as [`Self::to_text`] writes it.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let (parent, state) = text.split_once(' ').unwrap_or((text, ""));
        Self::parse(parent, Some(state))
    }

    /// Both values in one text, for a store.
    pub(crate) fn to_text(&self) -> String {
        let parent = self.parent();
        if self.state.is_empty() { parent } else { format!("{parent} {}", self.state) }
    }

    /// A new trace, which is recorded.
    pub(super) fn new_root() -> Self {
        let mut random = rand::rng();
        let trace = loop {
            let id: TraceId = random.random();
            if id != [0; 16] {
                break id;
            }
        };
        // Both bits: the trace is recorded, and its id is random.
        Self { trace, span: new_span_id(), flags: KNOWN_FLAGS, state: "".into() }
    }

    /// The same trace with another span.
    pub(super) fn with_span(&self, span: SpanId) -> Self {
        Self { span, ..self.clone() }
    }

    /// Whether the trace is recorded.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The value of `traceparent`.
    #[must_use]
    pub fn parent(&self) -> String {
        self.to_string()
    }

    /// The value of `tracestate`, if there is one.
    #[must_use]
    pub fn state(&self) -> Option<&str> {
        Some(&*self.state).filter(|state| !state.is_empty())
    }

    /// Adds both headers to those of a call.
    pub(crate) fn add_to(&self, headers: &mut HeaderMap) {
        // Both texts are printable ASCII.
        if let Ok(parent) = HeaderValue::from_str(&self.parent()) {
            headers.insert(PARENT_HEADER, parent);
        }
        if let Some(Ok(state)) = self.state().map(HeaderValue::from_str) {
            headers.insert(STATE_HEADER, state);
        }
    }

    /// The event with this context instead of its own.
    pub(crate) fn put_into(&self, event: Event) -> Event {
        let state = self.state().map(serde_json::Value::from);
        event.with_extension(PARENT, Some(self.parent().into())).with_extension(STATE, state)
    }

    /// Adds this context to the JSON text of an event that carries none. `None` if the event would be
    /// larger than `max`.
    pub(crate) fn written_into(&self, text: &[u8], max: usize) -> Option<Vec<u8>> {
        let (start, rest) = text.split_at(text.iter().position(|byte| *byte == b'{')? + 1);
        let mut added = format!("\"{PARENT}\":\"{}\",", self.parent());
        if let Some(state) = self.state() {
            // Strings always serialise.
            let state = serde_json::to_string(state).unwrap_or_default();
            added.extend(["\"", STATE, "\":", &state, ","]);
        }
        let whole = [start, added.as_bytes(), rest].concat();
        (whole.len() <= max).then_some(whole)
    }
}

/// The value of `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("-")?;
        self.span.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", self.flags)
    }
}

pub(super) fn new_span_id() -> SpanId {
    let mut random = rand::rng();
    loop {
        let id: SpanId = random.random();
        if id != [0; 8] {
            return id;
        }
    }
}

/// Reads lower-case hexadecimal digits.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    let pairs = digits.chunks_exact(2);
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        *byte = (value(pair[0])? << 4) | value(pair[1])?;
    }
    Some(bytes)
}

/// Whether it is a list of entries `key=value` within the limits of W3C.
fn is_state(text: &str) -> bool {
    if text.len() > STATE_MAX_BYTES {
        return false;
    }
    let mut keys: Vec<&str> = Vec::new();
    for entry in text.split(',').map(|entry| entry.trim_matches([' ', '\t'])) {
        if entry.is_empty() {
            continue;
        }
        let Some((key, value)) = entry.split_once('=') else { return false };
        let in_key = |c: char| {
            c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-' | '*' | '/' | '@')
        };
        let starts_well = key.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let key_is_fine = starts_well && key.len() <= ENTRY_MAX_BYTES && key.chars().all(in_key);
        let in_value = |c: char| matches!(c, ' '..='~') && c != '=';
        let value_is_fine =
            !value.is_empty() && value.len() <= ENTRY_MAX_BYTES && value.chars().all(in_value);
        if !key_is_fine || !value_is_fine || keys.contains(&key) || keys.len() == STATE_MAX_ENTRIES
        {
            return false;
        }
        keys.push(key);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT_TEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_valid_context_is_read_and_written_back() {
        let context = TraceContext::parse(PARENT_TEXT, Some("a=1,b@c=2")).unwrap();
        assert_eq!((context.parent(), context.state()), (PARENT_TEXT.into(), Some("a=1,b@c=2")));
        assert!(context.is_sampled());
        assert_eq!(TraceContext::from_text(&context.to_text()), Some(context));
        let unsampled = TraceContext::parse(&PARENT_TEXT.replace("-01", "-00"), None).unwrap();
        assert!(!unsampled.is_sampled() && unsampled.state().is_none());
        assert_eq!(TraceContext::from_text(&unsampled.to_text()), Some(unsampled));
        let later = PARENT_TEXT.replacen("00", "cc", 1) + "-what-the-future-adds";
        assert_eq!(TraceContext::parse(&later, None).unwrap().parent(), PARENT_TEXT);
    }

    #[test]
    fn an_invalid_parent_counts_as_absent() {
        for text in [
            "",
            "00",
            &PARENT_TEXT.to_uppercase(),
            &PARENT_TEXT.replacen("00", "ff", 1),
            &PARENT_TEXT[..54],
            &format!("{PARENT_TEXT}-"),
            &format!("{PARENT_TEXT} "),
            &PARENT_TEXT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &PARENT_TEXT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &PARENT_TEXT.replace('-', "_"),
            &PARENT_TEXT.replacen("4bf9", "4bég", 1),
            &(PARENT_TEXT.replacen("00", "01", 1) + "x"),
            &(PARENT_TEXT.replacen("00", "01", 1) + "-" + &"x".repeat(300)),
        ] {
            assert_eq!(TraceContext::parse(text, None), None, "{text}");
        }
    }

    #[test]
    fn an_invalid_state_is_dropped_alone() {
        let many = |n: usize| (0..n).map(|n| format!("k{n}=v")).collect::<Vec<_>>().join(",");
        for good in ["a=1", "a=1 , b=2", "a=1,,b=2", &many(32), "1ab@x=~ !"] {
            let context = TraceContext::parse(PARENT_TEXT, Some(good)).unwrap();
            assert_eq!(context.state(), Some(good));
        }
        let long = format!("a={}", "v".repeat(300));
        for bad in ["a", "=1", "a=", "A=1", "a=1,a=2", "a=b=c", "a=é", "a=1\n", &many(33), &long] {
            let context = TraceContext::parse(PARENT_TEXT, Some(bad)).unwrap();
            assert_eq!(context.state(), None, "{bad}");
        }
    }

    #[test]
    fn headers_are_read_once_and_states_are_joined() {
        let mut headers = HeaderMap::new();
        assert_eq!(TraceContext::of_headers(&headers), None);
        headers.append(PARENT_HEADER, PARENT_TEXT.parse().unwrap());
        headers.append(STATE_HEADER, "a=1".parse().unwrap());
        headers.append(STATE_HEADER, "b=2".parse().unwrap());
        let context = TraceContext::of_headers(&headers).unwrap();
        assert_eq!(context.state(), Some("a=1,b=2"));
        let mut told = HeaderMap::new();
        context.add_to(&mut told);
        assert_eq!(TraceContext::of_headers(&told), Some(context));
        headers.append(PARENT_HEADER, PARENT_TEXT.parse().unwrap());
        assert_eq!(TraceContext::of_headers(&headers), None, "two parents");
    }

    #[test]
    fn an_event_carries_the_context_in_its_text_and_as_attributes() {
        let text = br#" {"specversion":"1.0","id":"1","source":"s","type":"t","botid":"b"}"#;
        let context = TraceContext::parse(PARENT_TEXT, Some("a=\"1\\")).unwrap();
        let written = context.written_into(text, 1_000).unwrap();
        let event = Event::from_json(&written).unwrap();
        assert_eq!(TraceContext::of_event(&event), Some(context.clone()));
        assert_eq!(context.written_into(text, text.len() + 50), None, "too large");
        let plain = Event::from_json(text).unwrap();
        assert_eq!(TraceContext::of_event(&plain), None);
        let put = context.put_into(plain);
        assert_eq!(TraceContext::of_event(&put), Some(context));
        let other = TraceContext::parse(PARENT_TEXT, None).unwrap();
        assert_eq!(TraceContext::of_event(&other.put_into(put)).unwrap().state(), None);
    }
}
