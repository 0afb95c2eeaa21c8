//! The exporter: sends spans to a collector, by OTLP over HTTP in protobuf.
//!
//! Spans wait in a bounded buffer. The exporter sends them in batches, at the latest after a second. A
//! batch that the collector does not take is sent again, twice at most. Meanwhile the buffer may become
//! full: further spans are dropped and counted. Nothing else ever waits for the collector.

use std::time::Duration;

use metrics::Counter;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message as _;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT};
use reqwest::{Client, Url};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::context::TraceContext;
use super::span::{Kind, SpanData, Tracer, Value};
use crate::clock::SharedClock;
use crate::metrics::{TraceDrop, trace_dropped, trace_exported};
use crate::telemetry::{Outage, Recovered};

/// Maximum number of spans in a call.
const BATCH: usize = 512;
/// How long spans wait for others.
const GATHER: Duration = Duration::from_secs(1);
/// Pauses before a batch is sent again.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];
/// After a stop, the last spans must be sent within this time.
const LAST: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The path of traces below the endpoint of a collector.
const PATH: &str = "/v1/traces";
const AGENT: &str = concat!("fairlane/", env!("CARGO_PKG_VERSION"));
/// The flags of a span whose parent may be in another process, and is known: see `SpanFlags` of OTLP.
const HAS_IS_REMOTE: u32 = 0x100;

/// The log about a collector that does not take spans.
static UNTAKEN: Outage = Outage::new(Duration::ZERO);

/// Where spans go, and how many.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The collector.
    pub(crate) endpoint: Url,
    /// Headers for the collector, such as an access token.
    pub(crate) headers: HeaderMap,
    /// The part of requests without a context that start a trace.
    pub(crate) root_ratio: f64,
    /// Maximum number of spans that wait.
    pub(crate) buffer: usize,
    /// Timeout of a call.
    pub(crate) timeout: Duration,
    /// `service.name`.
    pub(crate) service: String,
}

/// Sends the spans of a tracer.
pub(crate) struct Exporter {
    spans: mpsc::Receiver<SpanData>,
    client: Client,
    url: Url,
    headers: HeaderMap,
    timeout: Duration,
    resource: Resource,
    exported: Counter,
    failed: Counter,
    /// Spans of the batch that is being sent.
    sending: usize,
}

/// What the collector said to a batch.
enum Said {
    Taken,
    /// Another attempt may help.
    Later(String),
    Refused(String),
}

/// The URL for traces: the endpoint itself, or below it.
pub(crate) fn url_of(endpoint: &Url) -> Url {
    let mut url = endpoint.clone();
    let path = url.path().trim_end_matches('/').to_owned();
    if !path.ends_with(PATH) {
        url.set_path(&format!("{path}{PATH}"));
    }
    url
}

impl Exporter {
    /// A tracer and its exporter.
    ///
    /// # Errors
    /// If the HTTP client cannot be created.
    pub(crate) fn new(
        settings: Settings,
        clock: &SharedClock,
    ) -> Result<(Tracer, Self), reqwest::Error> {
        // Only the first call in a process installs the provider; any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Settings { endpoint, mut headers, root_ratio, buffer, timeout, service } = settings;
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        let builder = || {
            Client::builder()
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .connect_timeout(CONNECT_TIMEOUT)
                .pool_max_idle_per_host(1)
        };
        let client = match builder().build() {
            Ok(client) => client,
            // A machine without CA certificates can still call http:// URLs.
            Err(_) => builder().tls_certs_only([]).build()?,
        };
        let (sender, spans) = mpsc::channel(buffer.max(1));
        let tracer =
            Tracer::new(sender, clock.clone(), root_ratio, trace_dropped(TraceDrop::BufferFull));
        let exporter = Self {
            spans,
            client,
            url: url_of(&endpoint),
            headers,
            timeout,
            resource: resource(service),
            exported: trace_exported(),
            failed: trace_dropped(TraceDrop::NotTaken),
            sending: 0,
        };
        Ok((tracer, exporter))
    }

    /// Exports until `stop`. After it, the last spans have a second.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let over = async {
            stop.cancelled().await;
            sleep(LAST).await;
        };
        tokio::select! {
            biased;
            () = self.export(&stop) => {}
            () = over => {
                let left = self.sending + self.spans.len();
                self.failed.increment(left as u64);
                warn!(collector = %shown(&self.url), spans = left,
                    "the collector of spans took too long at the stop; the last spans are lost");
            }
        }
    }

    async fn export(&mut self, stop: &CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                received = self.spans.recv_many(&mut batch, BATCH) => if received == 0 {
                    return;
                },
                () = stop.cancelled() => return,
            }
            // Waits for more spans, to make fewer calls.
            let gathered = timeout(GATHER, async {
                while batch.len() < BATCH {
                    let room = BATCH - batch.len();
                    if self.spans.recv_many(&mut batch, room).await == 0 {
                        return;
                    }
                }
            });
            tokio::select! {
                biased;
                _ = gathered => {}
                () = stop.cancelled() => {}
            }
            self.send(std::mem::take(&mut batch), stop).await;
        }
    }

    /// Sends a batch, again if that may help.
    async fn send(&mut self, batch: Vec<SpanData>, stop: &CancellationToken) {
        let count = batch.len();
        self.sending = count;
        let body = request(&self.resource, batch).encode_to_vec();
        let mut pauses = PAUSES.iter();
        let problem = loop {
            match self.call(body.clone()).await {
                Said::Taken => break None,
                Said::Refused(problem) => break Some(problem),
                Said::Later(problem) => match pauses.next() {
                    Some(pause) if !stop.is_cancelled() => tokio::select! {
                        biased;
                        () = stop.cancelled() => {}
                        () = sleep(*pause) => {}
                    },
                    _ => break Some(problem),
                },
            }
        };
        self.sending = 0;
        let Some(problem) = problem else {
            self.exported.increment(count as u64);
            if let Some(Recovered { lasted, failures }) = UNTAKEN.succeeded() {
                info!(collector = %shown(&self.url), ?lasted, failures,
                    "the collector takes spans again");
            }
            return;
        };
        self.failed.increment(count as u64);
        if let Some(suppressed) = UNTAKEN.failed() {
            warn!(collector = %shown(&self.url), spans = count, problem, suppressed,
                "the collector did not take spans, and they are lost; check tracing.endpoint");
        }
    }

    async fn call(&self, body: Vec<u8>) -> Said {
        let call = self.client.post(self.url.clone()).headers(self.headers.clone()).body(body);
        let answer = match timeout(self.timeout, call.send()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Said::Later(root(&error)),
            Err(_) => return Said::Later("no answer in time (tracing.timeout)".to_owned()),
        };
        match answer.status().as_u16() {
            200..=299 => Said::Taken,
            status @ (429 | 502 | 503 | 504) => Said::Later(format!("it answered {status}")),
            status => Said::Refused(format!("it answered {status}")),
        }
    }
}

/// The innermost cause. Never contains the URL.
fn root(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    if std::ptr::eq(std::ptr::from_ref(cause).cast::<()>(), std::ptr::from_ref(error).cast()) {
        return "the call failed".to_owned();
    }
    cause.to_string()
}

/// A URL without its user, password and query, which may be secret.
fn shown(url: &Url) -> String {
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}

/// The attributes of this process.
fn resource(service: String) -> Resource {
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let instance = format!("{host}-{}", std::process::id());
    let attributes = [
        ("service.name", service),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance),
        ("host.name", host),
    ];
    let attributes = attributes.map(|(key, text)| attribute(key, Value::from(text)));
    Resource { attributes: attributes.into(), ..Resource::default() }
}

fn request(resource: &Resource, batch: Vec<SpanData>) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope {
        name: "fairlane".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_spans = vec![ScopeSpans {
        scope: Some(scope),
        spans: batch.into_iter().map(span).collect(),
        schema_url: String::new(),
    }];
    let resource = Some(resource.clone());
    let resource_spans = vec![ResourceSpans { resource, scope_spans, schema_url: String::new() }];
    ExportTraceServiceRequest { resource_spans }
}

fn span(data: SpanData) -> Span {
    let SpanData { context, parent, name, kind, start, end, attributes, links, error } = data;
    let kind = match kind {
        Kind::Internal => SpanKind::Internal,
        Kind::Client => SpanKind::Client,
        Kind::Producer => SpanKind::Producer,
        Kind::Consumer => SpanKind::Consumer,
    };
    let status = error
        .map(|message| Status { message, code: StatusCode::Error as i32 })
        .or_else(|| Some(Status::default()));
    Span {
        trace_id: context.trace.into(),
        span_id: context.span.into(),
        trace_state: context.state.into(),
        parent_span_id: parent.map(Into::into).unwrap_or_default(),
        flags: u32::from(context.flags),
        name,
        kind: kind as i32,
        start_time_unix_nano: nanos(start),
        end_time_unix_nano: nanos(end),
        attributes: attributes.into_iter().map(|(key, value)| attribute(key, value)).collect(),
        links: links.into_iter().map(link).collect(),
        status,
        ..Span::default()
    }
}

fn link(to: TraceContext) -> Link {
    Link {
        trace_id: to.trace.into(),
        span_id: to.span.into(),
        trace_state: to.state.into(),
        flags: u32::from(to.flags) | HAS_IS_REMOTE,
        ..Link::default()
    }
}

fn attribute(key: &'static str, value: Value) -> KeyValue {
    let text = |text: String| AnyValue { value: Some(Any::StringValue(text)) };
    let value = match value {
        Value::Text(value) => text(value.into_owned()),
        Value::Number(number) => AnyValue { value: Some(Any::IntValue(number)) },
        Value::Texts(texts) => {
            let values = texts.into_iter().map(text).collect();
            AnyValue { value: Some(Any::ArrayValue(ArrayValue { values })) }
        }
    };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_go_below_the_endpoint_unless_it_names_their_path() {
        for (endpoint, url) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://otel.example/tenant/7/", "https://otel.example/tenant/7/v1/traces"),
            ("https://otel.example/v1/traces", "https://otel.example/v1/traces"),
        ] {
            assert_eq!(url_of(&endpoint.parse().unwrap()).as_str(), url);
        }
    }

    #[test]
    fn a_log_line_shows_no_secret_of_the_endpoint() {
        let url: Url = "https://user:word@otel.example:99/v1/traces?key=word".parse().unwrap();
        assert_eq!(shown(&url), "https://otel.example:99/v1/traces");
    }
}
