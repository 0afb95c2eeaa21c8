//! A receiver that continues the trace of a push, and exports its own span to the same collector.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, span::SpanKind};
use prost::Message as _;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{CALLER, LONG, TRACE, named, parent};
use crate::support::automation_rig::event;
use crate::support::collector::{Collector, Seen};
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

/// Sends a span as the child of `traceparent`, as an OpenTelemetry SDK does.
async fn export(collector: &str, traceparent: &str, name: &str, number: u8) {
    let mut parts = traceparent.split('-');
    let (version, trace) = (parts.next().unwrap(), parts.next().unwrap());
    let (parent, flags) = (parts.next().unwrap(), parts.next().unwrap());
    assert_eq!((version, flags), ("00", "01"), "{traceparent}");
    let bytes = |hex: &str| -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect()
    };
    let now = SystemClock.now();
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap();
    let span = Span {
        trace_id: bytes(trace),
        span_id: vec![7, 7, 7, 7, 7, 7, 7, number],
        parent_span_id: bytes(parent),
        name: name.to_owned(),
        kind: SpanKind::Server as i32,
        start_time_unix_nano: nanos(now),
        end_time_unix_nano: nanos(now + Duration::from_millis(1)),
        ..Span::default()
    };
    let service = AnyValue { value: Some(Any::StringValue("shop".to_owned())) };
    let name = "service.name".to_owned();
    let attributes = vec![KeyValue { key: name, value: Some(service), ..KeyValue::default() }];
    let resource = Some(Resource { attributes, ..Resource::default() });
    let scope_spans = vec![ScopeSpans { spans: vec![span], ..ScopeSpans::default() }];
    let resource_spans = vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }];
    let body = ExportTraceServiceRequest { resource_spans }.encode_to_vec();
    let length = body.len().to_string();
    let headers = [("content-type", "application/x-protobuf"), ("content-length", &*length)];
    let head = Client::new(collector).head("POST", "/v1/traces", &headers);
    let mut stream = TcpStream::connect(collector).await.unwrap();
    stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
    // The collector keeps the connection open.
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
}

#[tokio::test]
async fn the_span_of_a_receiver_is_a_child_of_the_call_in_the_same_trace() {
    let redis = RedisServer::start(Options::default());
    let collector = Collector::start().await;
    let endpoint = collector.endpoint();
    let address = endpoint.trim_matches('"').trim_start_matches("http://").to_owned();
    // The first attempt fails: each attempt has a call of its own, and so has the receiver's span.
    let answer = move |call: Call| {
        let address = address.clone();
        async move {
            let attempt = u8::try_from(call.json()["attempt"].as_u64().unwrap()).unwrap();
            let name = format!("handle order, attempt {attempt}");
            export(&address, &call.headers["traceparent"], &name, attempt).await;
            Reply::new(if attempt == 1 { 500 } else { 200 }, "")
        }
    };
    let receiver = Receiver::start(answer).await;
    let mut all = super::pushing(&receiver);
    all.push(("tracing.endpoint", endpoint));
    let served = Served::start(&config(&redis, "push", &super::settings(&all))).await;
    let client = Client::new(&served.http());
    let headers = [("content-type", super::STRUCTURED), ("traceparent", &*parent(true))];
    let body = event("shop", "ann", "1", "order.paid", json!({})).to_string();
    let answer = client.send("POST", "/v1/events", &headers, body.as_bytes()).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());

    let mut spans = Vec::new();
    eventually(LONG, "both attempts are exported", async || {
        spans = collector.spans();
        spans.iter().filter(|span| span.name == "commit push").count() == 2
    })
    .await;
    assert!(spans.iter().all(|span| span.trace == TRACE), "{spans:#?}");
    let parent_of = |span: &Seen| -> Seen {
        let found = spans.iter().find(|other| other.id == span.parent);
        found.unwrap_or_else(|| panic!("no parent of {span:#?}")).clone()
    };
    for attempt in ["1", "2"] {
        let own = named(&spans, &format!("handle order, attempt {attempt}"));
        assert_eq!((&*own.service, own.span.kind), ("shop", SpanKind::Server as i32));
        let call = parent_of(own);
        assert_eq!((&*call.name, &*call.service), ("call push", "fairlane"));
        assert_eq!(call.is_failed(), attempt == "1", "{call:#?}");
        assert!(call.span.start_time_unix_nano <= own.span.start_time_unix_nano);
        let slice = parent_of(&call);
        assert_eq!((&*slice.name, &*slice.attributes["fairlane.attempt"]), ("slice push", attempt));
        let publish = parent_of(&slice);
        assert_eq!((&*publish.name, &*publish.parent), ("publish fairlane:events", CALLER));
    }
}
