//! A receiver of OTLP over HTTP, which decodes the spans that it gets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;

use super::receiver::{Receiver, Reply};
use super::wait::eventually;

/// Runs until it is dropped.
pub(crate) struct Collector {
    receiver: Receiver,
}

/// A span with readable ids.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty for the first span of a trace.
    pub(crate) parent: String,
    pub(crate) name: String,
    pub(crate) attributes: BTreeMap<String, String>,
    /// The linked traces and spans.
    pub(crate) links: BTreeSet<(String, String)>,
    pub(crate) span: Span,
    /// `service.name` of its process.
    pub(crate) service: String,
}

impl Seen {
    /// The value of `traceparent` for what this span causes.
    pub(crate) fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.trace, self.id)
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.span.status.as_ref().is_some_and(|status| status.code == 2)
    }
}

impl Collector {
    /// Takes everything.
    pub(crate) async fn start() -> Self {
        Self { receiver: Receiver::start(async |_| Reply::new(200, "")).await }
    }

    /// Accepts connections and requests, and never answers.
    pub(crate) async fn hanging() -> Self {
        let receiver = Receiver::start(async |_| {
            tokio::time::sleep(Duration::from_secs(3_600)).await;
            Reply::Nothing
        });
        Self { receiver: receiver.await }
    }

    /// Answers the first requests with this status, and takes the others.
    pub(crate) async fn refusing(first: usize, status: u16) -> Self {
        let answer = move |call: super::receiver::Call| async move {
            Reply::new(if call.number < first { status } else { 200 }, "")
        };
        Self { receiver: Receiver::start(answer).await }
    }

    /// The value of `tracing.endpoint`.
    pub(crate) fn endpoint(&self) -> String {
        format!("\"http://{}\"", self.receiver.address)
    }

    pub(crate) fn called(&self) -> usize {
        self.receiver.called()
    }

    /// The headers of each request.
    pub(crate) fn headers(&self) -> Vec<BTreeMap<String, String>> {
        self.receiver.calls().into_iter().map(|call| call.headers).collect()
    }

    /// All spans so far.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        let mut all = Vec::new();
        for call in self.receiver.calls() {
            assert!(call.line.starts_with("POST /v1/traces "), "{}", call.line);
            assert_eq!(call.headers["content-type"], "application/x-protobuf");
            let request = ExportTraceServiceRequest::decode(&*call.body).unwrap();
            for of_process in request.resource_spans {
                let resource = texts(of_process.resource.unwrap().attributes);
                let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
                all.extend(spans.map(|span| seen(span, resource["service.name"].clone())));
            }
        }
        all
    }

    /// Waits until there is a span of each name, and returns all.
    pub(crate) async fn until(&self, names: &[&str]) -> Vec<Seen> {
        let mut spans = Vec::new();
        let started = std::time::Instant::now();
        eventually(Duration::from_secs(60), "all spans are exported", async || {
            spans = self.spans();
            let left: Vec<_> =
                names.iter().filter(|name| !spans.iter().any(|span| span.name == **name)).collect();
            let found: Vec<_> = spans.iter().map(|span| &span.name).collect();
            let is_late = started.elapsed() > Duration::from_secs(50);
            assert!(left.is_empty() || !is_late, "{left:?} are missing in {found:?}");
            left.is_empty()
        })
        .await;
        spans
    }
}

fn seen(span: Span, service: String) -> Seen {
    assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
    assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
    let links = span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id)));
    Seen {
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name.clone(),
        attributes: texts(span.attributes.clone()),
        links: links.collect(),
        span,
        service,
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    fn text(value: Option<AnyValue>) -> String {
        match value.unwrap().value.unwrap() {
            Value::StringValue(text) => text,
            Value::IntValue(number) => number.to_string(),
            Value::ArrayValue(array) => {
                let values: Vec<_> =
                    array.values.into_iter().map(|value| text(Some(value))).collect();
                values.join(",")
            }
            other => panic!("{other:?}"),
        }
    }
    attributes.into_iter().map(|KeyValue { key, value, .. }| (key, text(value))).collect()
}
