//! Distributed traces: the [context](TraceContext) that events carry through the bus and the queues
//! into calls, and the spans that are exported to a collector.
//!
//! | file | holds |
//! |---|---|
//! | `context` | `traceparent` and `tracestate` of W3C Trace Context |
//! | `span` | a span, from its start to the buffer of the exporter |
//! | `steps` | the spans of each step of an event: publish, copy, wait, slice, call, commit |
//! | `otlp` | the exporter: OTLP over HTTP (feature `otel`) |
//!
//! The context is always passed on. Spans exist only with an exporter, and only for events whose
//! context says that the trace is recorded. An event without a context costs one look into its
//! extension attributes.
#![cfg_attr(not(feature = "otel"), allow(dead_code, reason = "nothing is exported"))]

mod context;
#[cfg(feature = "otel")]
pub(crate) mod otlp;
mod span;
mod steps;

pub use self::context::TraceContext;
pub(crate) use self::context::{PARENT, STATE};
pub(crate) use self::span::{Span, Tracer};
pub(crate) use self::steps::{
    Copied, Entering, SliceTrace, called, http_answer, http_call, waited,
};
