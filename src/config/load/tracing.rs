//! `[tracing]`, and the variables of OpenTelemetry that it follows.

use std::path::PathBuf;

use reqwest::Url;

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{Config, ConfigError, TracingConfig};

/// The variable with the endpoint of a collector, as all programs with OpenTelemetry read it.
pub(super) const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The variable with the protocol of that collector.
pub(super) const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";

/// The port of collectors for OTLP over gRPC.
const GRPC_PORT: u16 = 4317;
const REMEDY: &str =
    "write the URL of a collector that takes OTLP over HTTP, such as \"http://localhost:4318\"";

pub(super) fn tracing(top: &Reader<'_>) -> Result<TracingConfig, ConfigError> {
    const KEY: &str = "tracing.endpoint";
    let endpoint = match top.text(KEY) {
        "" => None,
        text => Some(endpoint(text).map_err(|problem| top.invalid(KEY, problem))?),
    };
    let path = top.text("tracing.headers_file");
    Ok(TracingConfig {
        endpoint,
        unusable: None,
        headers_file: Some(PathBuf::from(path)).filter(|path| !path.as_os_str().is_empty()),
        root_ratio: top.fraction("tracing.root_ratio"),
        buffer: top.count("tracing.buffer", limits::SPANS)?,
        timeout: top.duration("tracing.timeout")?,
        service_name: top.text("tracing.service_name").to_owned(),
    })
}

/// Takes the endpoint of the variable, unless the configuration has one. The variable is for all
/// programs of a machine, and most of them take gRPC too. So an unusable one is no mistake of this
/// configuration: nothing is exported.
pub(super) fn follow(config: &mut Config, variable: Option<&str>, protocol: Option<&str>) {
    let Some(text) = variable.filter(|_| cfg!(feature = "otel")) else { return };
    if config.tracing.endpoint.is_some() {
        return;
    }
    let is_grpc = protocol.is_some_and(|protocol| protocol.trim().eq_ignore_ascii_case("grpc"));
    let parsed = if is_grpc {
        let remedy = format!("set tracing.endpoint: {REMEDY}");
        Err(format!("is for gRPC ({PROTOCOL}); {remedy}"))
    } else {
        endpoint(text)
    };
    match parsed {
        Ok(endpoint) => config.tracing.endpoint = Some(endpoint),
        Err(problem) => config.tracing.unusable = Some(format!("{ENDPOINT} {problem}")),
    }
}

/// The problem never quotes the text: a URL may hold a password.
fn endpoint(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("is not a URL ({error}); {REMEDY}"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(format!("is not an http or https URL; {REMEDY}"));
    }
    let is_secret = !url.username().is_empty() || url.password().is_some();
    if is_secret || url.query().is_some() || url.fragment().is_some() {
        let remedy = "remove it, and put a token into a header (tracing.headers_file)";
        return Err(format!("has a user, a password, a query or a fragment; {remedy}"));
    }
    if url.port() == Some(GRPC_PORT) {
        let remedy = "write the port for OTLP over HTTP, usually 4318";
        return Err(format!("has port {GRPC_PORT}, where collectors take only gRPC; {remedy}"));
    }
    Ok(url)
}
