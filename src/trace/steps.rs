//! The spans of each step of an event. The names of attributes follow the semantic conventions of
//! OpenTelemetry for messaging and HTTP; those of Fairlane start with `fairlane.`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::header::HeaderMap;

use super::context::TraceContext;
use super::span::{Kind, Span, Tracer};
use crate::event::Event;
use crate::id::{BotId, PipelineName, Sequence};

/// The value of `messaging.system`.
const SYSTEM: &str = "fairlane";

/// The attributes that most steps have.
fn describe(span: Span, step: &'static str, place: &str, bot: Option<&BotId>) -> Span {
    let span = span
        .with("messaging.system", SYSTEM)
        .with("messaging.destination.name", place.to_owned())
        .with("messaging.operation.name", step);
    match bot {
        Some(bot) => span.with("fairlane.bot", bot.as_str().to_owned()),
        None => span,
    }
}

/// A request that brings something to a destination: events, or a call for later.
#[derive(Debug, Default)]
pub(crate) struct Entering {
    /// The context of what the request brings; `None` if it carries none.
    pub(crate) context: Option<TraceContext>,
    span: Option<Span>,
}

impl Entering {
    /// A request with these headers.
    pub(crate) fn by(tracer: &Tracer, headers: &HeaderMap, place: &str) -> Self {
        let given = TraceContext::of_headers(headers);
        let name = || format!("publish {place}");
        let span = match &given {
            Some(given) => tracer.start(given, Kind::Producer, name),
            None => tracer.start_root(Kind::Producer, name),
        };
        let span = span.map(|span| published(span, place, None));
        let context = span.as_ref().map(|span| span.context().clone()).or(given);
        Self { context, span }
    }

    /// How many events the request brings.
    pub(crate) fn brings(&mut self, events: usize) {
        if let Some(span) = &mut self.span {
            span.set("messaging.batch.message_count", events);
        }
    }

    /// The span of one event that carries its own context.
    pub(crate) fn of_event(
        tracer: &Tracer,
        own: &TraceContext,
        place: &str,
        bot: &BotId,
    ) -> Option<Span> {
        let span = tracer.start(own, Kind::Producer, || format!("publish {place}"))?;
        Some(published(span, place, Some(bot)))
    }

    /// Adds what the request is about, if that is one bot.
    pub(crate) fn about(mut self, bot: &BotId) -> Self {
        if let Some(span) = &mut self.span {
            span.set("fairlane.bot", bot.as_str().to_owned());
        }
        self
    }

    /// What the request brings was not stored.
    pub(crate) fn fail(&mut self, reason: impl Into<String>) {
        if let Some(span) = &mut self.span {
            span.fail(reason);
        }
    }
}

fn published(span: Span, place: &str, bot: Option<&BotId>) -> Span {
    describe(span, "publish", place, bot).with("messaging.operation.type", "send")
}

/// An event that is copied into queues.
#[derive(Debug)]
pub(crate) struct Copied {
    context: TraceContext,
    id: String,
    bot: BotId,
}

impl Copied {
    /// `None`: its copy has no span.
    pub(crate) fn note(tracer: &Tracer, event: &Event) -> Option<Self> {
        if !tracer.is_on() {
            return None;
        }
        let context = TraceContext::sampled_of(event)?;
        let (id, bot) = (event.id().to_owned(), event.bot().clone());
        Some(Self { context, id, bot })
    }

    /// The copy into the queues of these pipelines, which took this long, is done.
    pub(crate) fn done(
        &self,
        tracer: &Tracer,
        stream: &str,
        pipelines: &[&PipelineName],
        took: Duration,
    ) {
        let span = tracer.start(&self.context, Kind::Internal, || format!("copy {stream}"));
        let Some(span) = span else { return };
        let began = span.began().saturating_sub(took);
        let span = describe(span.since(began), "copy", stream, Some(&self.bot));
        let names: Vec<_> = pipelines.iter().map(|name| name.as_str().to_owned()).collect();
        drop(span.with("messaging.message.id", self.id.clone()).with("fairlane.pipelines", names));
    }
}

/// The trace of a slice with at least one event whose trace is recorded.
#[derive(Debug)]
pub(crate) struct SliceTrace {
    tracer: Tracer,
    pipeline: PipelineName,
    bot: BotId,
    /// The context of what the slice causes.
    context: TraceContext,
    span: Mutex<Option<Span>>,
}

impl SliceTrace {
    /// Starts the span of a slice, and ends the waits of its events. The slice belongs to the trace of
    /// its first recorded event, and links the others.
    pub(crate) fn start<'a>(
        tracer: &Tracer,
        pipeline: &PipelineName,
        (bot, attempt): (&BotId, u32),
        events: impl ExactSizeIterator<Item = (Sequence, &'a Event)>,
    ) -> Option<Arc<Self>> {
        if !tracer.is_on() {
            return None;
        }
        let count = events.len();
        let recorded =
            |(sequence, event)| Some((TraceContext::sampled_of(event)?, sequence, event));
        // Without a recorded event, this allocates nothing.
        let recorded: Vec<(TraceContext, Sequence, &Event)> = events.filter_map(recorded).collect();
        let (first, ..) = recorded.first()?;
        let span = tracer.start(first, Kind::Consumer, || format!("slice {pipeline}"))?;
        let context = span.context().clone();
        let mut span = describe(span, "slice", pipeline.as_str(), Some(bot))
            .with("messaging.operation.type", "process")
            .with("messaging.batch.message_count", count)
            .with("fairlane.attempt", u64::from(attempt));
        for (other, ..) in &recorded[1..] {
            if other != first {
                span.link(other.clone());
            }
        }
        // A repeated slice did not wait since its events arrived.
        let fresh = if attempt == 1 { &*recorded } else { &[] };
        for (own, sequence, event) in fresh {
            let since = Duration::from_micros(sequence.get());
            let wait = waited(tracer, own, pipeline.as_str(), (bot, event.id()), since);
            if let Some(mut wait) = wait.filter(|_| own.trace != context.trace) {
                wait.link(context.clone());
            }
        }
        let span = Mutex::new(Some(span));
        let (tracer, pipeline, bot) = (tracer.clone(), pipeline.clone(), bot.clone());
        Some(Arc::new(Self { tracer, pipeline, bot, context, span }))
    }

    /// A call to a receiver.
    pub(crate) fn call(&self) -> Option<Span> {
        called(&self.tracer, &self.context, self.pipeline.as_str(), &self.bot)
    }

    /// The commit of the slice. It ends when the span is dropped.
    pub(crate) fn commit(&self, failure: Option<&str>) -> Option<Span> {
        if let Some(reason) = failure {
            self.fail(reason);
        }
        let name = || format!("commit {}", self.pipeline);
        let span = self.tracer.start(&self.context, Kind::Client, name)?;
        let span = describe(span, "commit", self.pipeline.as_str(), Some(&self.bot));
        Some(span.with("messaging.operation.type", "settle"))
    }

    /// Marks the slice as failed.
    pub(crate) fn fail(&self, reason: &str) {
        if let Some(span) = &mut *self.span() {
            span.fail(reason);
        }
    }

    /// Ends the slice.
    pub(crate) fn end(&self) {
        drop(self.span().take());
    }

    fn span(&self) -> std::sync::MutexGuard<'_, Option<Span>> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context of what follows from `event`: in the event's own trace, and after the slice if that
    /// belongs to the same trace.
    pub(crate) fn after(slice: Option<&Self>, event: &Event) -> Option<TraceContext> {
        let own = TraceContext::of_event(event)?;
        match slice {
            Some(slice) if slice.context.trace == own.trace && own.is_sampled() => {
                Some(own.with_span(slice.context.span))
            }
            _ => Some(own),
        }
    }

    /// The context of a call about all events of a slice without a span of its own: that of the first
    /// one that carries a context.
    pub(crate) fn passed_on<'a>(
        mut events: impl Iterator<Item = &'a Event>,
    ) -> Option<TraceContext> {
        events.find_map(TraceContext::of_event)
    }
}

/// The time that something waited in the queue of a pipeline, until now.
pub(crate) fn waited(
    tracer: &Tracer,
    own: &TraceContext,
    place: &str,
    (bot, id): (&BotId, &str),
    since: Duration,
) -> Option<Span> {
    let wait = tracer.start(own, Kind::Internal, || format!("wait {place}"))?.since(since);
    let wait = describe(wait, "wait", place, Some(bot));
    Some(wait.with("messaging.message.id", id.to_owned()))
}

/// A call to another server.
pub(crate) fn called(
    tracer: &Tracer,
    cause: &TraceContext,
    place: &str,
    bot: &BotId,
) -> Option<Span> {
    let span = tracer.start(cause, Kind::Client, || format!("call {place}"))?;
    Some(describe(span, "call", place, Some(bot)))
}

/// Describes the target and the result of an HTTP call.
pub(crate) fn http_call(span: Span, method: &str, host: &str, port: u16) -> Span {
    span.with("http.request.method", method.to_owned())
        .with("server.address", host.to_owned())
        .with("server.port", u64::from(port))
}

/// Adds the status of the answer. From 400 on, the call has failed.
pub(crate) fn http_answer(span: &mut Span, status: u16) {
    span.set("http.response.status_code", u64::from(status));
    if status >= 400 {
        span.fail(format!("the receiver answered {status}"));
    }
}
