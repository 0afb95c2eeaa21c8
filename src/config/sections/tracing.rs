//! `[tracing]`.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;

/// The section `[tracing]`: the export of spans to an OpenTelemetry collector.
#[derive(Debug, Clone, PartialEq)]
pub struct TracingConfig {
    /// The collector; `None`: no spans are exported.
    pub endpoint: Option<Url>,
    /// Why the variable `OTEL_EXPORTER_OTLP_ENDPOINT` is not followed, and the remedy.
    pub unusable: Option<String>,
    /// A file with headers for the collector, one per line.
    pub headers_file: Option<PathBuf>,
    /// The part of HTTP requests without a trace context that start a trace: 0 to 1.
    pub root_ratio: f64,
    /// Maximum number of spans that wait: 16 to 1,000,000.
    pub buffer: usize,
    /// Timeout of a call to the collector: 100 ms to 60 s.
    pub timeout: Duration,
    /// The attribute `service.name` of the spans: 1 to 255 bytes.
    pub service_name: String,
}
