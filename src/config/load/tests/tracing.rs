//! `[tracing]`, and the variable of OpenTelemetry.

use std::time::Duration;

use super::{refusal, with_environment};
use crate::config::{Config, TracingConfig};

const VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

#[test]
fn tracing_is_read() {
    let none = Config::default().tracing;
    assert_eq!((none.endpoint, none.headers_file, none.buffer), (None, None, 8192));
    let text = "[tracing]\nendpoint = \"https://otel.example/x\"\nheaders_file = \"h\"\nroot_ratio = 0.25\nbuffer = 16\ntimeout = \"1s\"\nservice_name = \"orders\"";
    let expected = TracingConfig {
        endpoint: Some("https://otel.example/x".parse().unwrap()),
        unusable: None,
        headers_file: Some("h".into()),
        root_ratio: 0.25,
        buffer: 16,
        timeout: Duration::from_secs(1),
        service_name: "orders".to_owned(),
    };
    assert_eq!(Config::from_toml(text, "f").unwrap().tracing, expected);
}

#[test]
fn a_bad_setting_is_refused_with_its_place_and_remedy() {
    let url =
        "write the URL of a collector that takes OTLP over HTTP, such as \"http://localhost:4318\"";
    let secret = "endpoint has a user, a password, a query or a fragment; remove it, and put a token into a header (tracing.headers_file)";
    let table = [
        (
            "endpoint = \"localhost\"",
            format!("endpoint is not a URL (relative URL without a base); {url}"),
        ),
        (
            "endpoint = \"localhost:4318\"",
            format!("endpoint is not an http or https URL; {url}"),
        ),
        (
            "endpoint = \"http://localhost:4317\"",
            "endpoint has port 4317, where collectors take only gRPC; write the port for OTLP over HTTP, usually 4318".to_owned(),
        ),
        ("endpoint = \"https://me:hidden@otel.example\"", secret.to_owned()),
        ("endpoint = \"https://otel.example?key=hidden\"", secret.to_owned()),
        ("root_ratio = 1.5", "root_ratio is 1.5; write a number from 0.0 to 1.0".to_owned()),
        ("buffer = 15", "buffer is 15; write a whole number from 16 to 1000000".to_owned()),
        ("timeout = \"61s\"", "timeout is 1m 1s; write a duration from 100ms to 1m".to_owned()),
        (
            "service_name = \"\"",
            "service_name must have 1 to 255 bytes without control characters".to_owned(),
        ),
    ];
    for (text, problem) in table {
        let message = refusal(&format!("[tracing]\n{text}"));
        assert_eq!(message, format!("f.toml:2: tracing.{problem}"), "{text}");
    }
}

#[test]
fn the_variable_of_opentelemetry_counts_unless_the_configuration_names_an_endpoint() {
    let endpoint = |text: &str, variables: &[(&str, &str)]| {
        let tracing = with_environment(text, variables).unwrap().tracing;
        tracing.endpoint.map(|url| url.to_string())
    };
    let given = [(VARIABLE, "http://a:4318")];
    assert_eq!(endpoint("", &given).as_deref(), Some("http://a:4318/"));
    assert_eq!(endpoint("", &[(VARIABLE, "")]), None);
    let own = "[tracing]\nendpoint = \"http://b\"";
    assert_eq!(endpoint(own, &given).as_deref(), Some("http://b/"));
    let both = [given[0], ("FAIRLANE__TRACING__ENDPOINT", "http://c")];
    assert_eq!(endpoint(own, &both).as_deref(), Some("http://c/"));
}

#[test]
fn an_unusable_variable_is_no_mistake_of_the_configuration() {
    let url = "the URL of a collector that takes OTLP over HTTP, such as \"http://localhost:4318\"";
    let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    for (variables, problem) in [
        (
            &[(VARIABLE, "http://a:4317")][..],
            "has port 4317, where collectors take only gRPC; write the port for OTLP over HTTP, usually 4318".to_owned(),
        ),
        (
            &[(VARIABLE, "https://otel.example"), grpc],
            format!("is for gRPC (OTEL_EXPORTER_OTLP_PROTOCOL); set tracing.endpoint: write {url}"),
        ),
        (&[(VARIABLE, "a:4318")], format!("is not an http or https URL; write {url}")),
    ] {
        let tracing = with_environment("", variables).unwrap().tracing;
        assert_eq!(tracing.endpoint, None);
        assert_eq!(tracing.unusable.unwrap(), format!("{VARIABLE} {problem}"));
        // An endpoint of the configuration wins, and a mistake there is refused.
        let own = with_environment("[tracing]\nendpoint = \"http://b\"", variables).unwrap();
        assert_eq!((own.tracing.unusable, own.tracing.endpoint.is_some()), (None, true));
        let wrong = with_environment("[tracing]\nendpoint = \"http://b:4317\"", variables);
        assert!(wrong.unwrap_err().to_string().contains("tracing.endpoint has port 4317"));
    }
    let used = [(VARIABLE, "http://a:4318"), (grpc.0, "http/protobuf")];
    assert!(with_environment("", &used).unwrap().tracing.endpoint.is_some());
}
