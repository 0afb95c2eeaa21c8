//! A span, from its start to the buffer of the exporter.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;
use rand::Rng as _;
use tokio::sync::mpsc;

use super::context::{SpanId, TraceContext, new_span_id};
use crate::clock::SharedClock;

/// Maximum number of links of a span. The default of OpenTelemetry.
pub(super) const LINKS_MAX: usize = 128;

/// The role of a span, in the terms of OpenTelemetry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Internal,
    Client,
    Producer,
    Consumer,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Text(Cow<'static, str>),
    Number(i64),
    Texts(Vec<String>),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::from(number as u64)
    }
}

/// What is exported of a span. Times are since 1970.
#[derive(Debug, Clone)]
pub(crate) struct SpanData {
    pub(super) context: TraceContext,
    /// The span that caused it; `None` for the first one of a trace.
    pub(super) parent: Option<SpanId>,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) start: Duration,
    pub(super) end: Duration,
    pub(super) attributes: Vec<(&'static str, Value)>,
    pub(super) links: Vec<TraceContext>,
    pub(super) error: Option<String>,
}

/// Creates spans. Clones share the buffer.
#[derive(Clone, Default)]
pub(crate) struct Tracer(Option<Arc<Inner>>);

struct Inner {
    buffer: mpsc::Sender<SpanData>,
    clock: SharedClock,
    /// The part of requests without a context that start a trace.
    root_ratio: f64,
    /// Spans for which the buffer had no room.
    dropped: Counter,
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tracer").field(&self.is_on()).finish()
    }
}

impl Tracer {
    /// Puts spans into `buffer`. Spans that find it full are counted in `dropped`.
    pub(super) fn new(
        buffer: mpsc::Sender<SpanData>,
        clock: SharedClock,
        root_ratio: f64,
        dropped: Counter,
    ) -> Self {
        Self(Some(Arc::new(Inner { buffer, clock, root_ratio, dropped })))
    }

    /// Whether spans are exported.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a span caused by `parent`. `None`: spans are not exported, or the trace is not recorded.
    pub(crate) fn start(
        &self,
        parent: &TraceContext,
        kind: Kind,
        name: impl FnOnce() -> String,
    ) -> Option<Span> {
        let inner = self.0.as_ref().filter(|_| parent.is_sampled())?;
        let context = parent.with_span(new_span_id());
        Some(Span::new(inner, context, Some(parent.span), kind, name()))
    }

    /// Starts a new trace with its first span, for the configured part of the calls.
    pub(super) fn start_root(&self, kind: Kind, name: impl FnOnce() -> String) -> Option<Span> {
        let inner = self.0.as_ref().filter(|inner| inner.root_ratio > 0.0)?;
        if rand::rng().random::<f64>() >= inner.root_ratio {
            return None;
        }
        Some(Span::new(inner, TraceContext::new_root(), None, kind, name()))
    }
}

/// A span that has started. It ends when it is dropped, and is exported then.
pub(crate) struct Span {
    inner: Arc<Inner>,
    data: Option<SpanData>,
    context: TraceContext,
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.data).finish()
    }
}

impl Span {
    fn new(
        inner: &Arc<Inner>,
        context: TraceContext,
        parent: Option<SpanId>,
        kind: Kind,
        name: String,
    ) -> Self {
        let start = inner.clock.now();
        let data = SpanData {
            context: context.clone(),
            parent,
            name,
            kind,
            start,
            end: start,
            attributes: Vec::new(),
            links: Vec::new(),
            error: None,
        };
        Self { inner: Arc::clone(inner), data: Some(data), context }
    }

    /// The context of what this span causes.
    pub(crate) fn context(&self) -> &TraceContext {
        &self.context
    }

    /// When it started, since 1970.
    pub(super) fn began(&self) -> Duration {
        self.data.as_ref().map_or(Duration::ZERO, |data| data.start)
    }

    /// Moves the start to an earlier time.
    pub(crate) fn since(mut self, start: Duration) -> Self {
        if let Some(data) = &mut self.data {
            data.start = data.start.min(start);
        }
        self
    }

    /// Adds an attribute.
    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        if let Some(data) = &mut self.data {
            data.attributes.push((name, value.into()));
        }
    }

    /// As [`Self::set`].
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.set(name, value);
        self
    }

    /// Links another span. Links above the maximum are left out.
    pub(super) fn link(&mut self, to: TraceContext) {
        if let Some(data) = &mut self.data
            && data.links.len() < LINKS_MAX
            && !data.links.contains(&to)
        {
            data.links.push(to);
        }
    }

    /// Marks it as failed.
    pub(crate) fn fail(&mut self, reason: impl Into<String>) {
        if let Some(data) = &mut self.data {
            data.error = Some(reason.into());
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(mut data) = self.data.take() else { return };
        data.end = self.inner.clock.now().max(data.start);
        // Never waits: the exporter may be slower than the events.
        if self.inner.buffer.try_send(data).is_err() {
            self.inner.dropped.increment(1);
        }
    }
}
