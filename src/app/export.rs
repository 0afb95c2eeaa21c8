//! The export of spans, from the start to the end of an instance.

use std::fs;

use super::AppError;
use crate::clock::SharedClock;
use crate::config::{Config, TracingConfig};
use crate::outbound::HeaderMap;
use crate::outbound::headers;
use crate::trace::Tracer;

/// The exporter of an instance, or nothing.
#[derive(Default)]
pub(super) struct Export {
    #[cfg(feature = "otel")]
    exporter: Option<Box<crate::trace::otlp::Exporter>>,
}

impl Export {
    /// Reads the configuration.
    #[cfg(feature = "otel")]
    pub(super) fn open(config: &Config, clock: &SharedClock) -> Result<(Tracer, Self), AppError> {
        use crate::trace::otlp::{Exporter, Settings};
        let headers = headers(&config.tracing)?;
        let TracingConfig { endpoint, root_ratio, buffer, timeout, service_name, .. } =
            config.tracing.clone();
        let Some(endpoint) = endpoint else {
            if let Some(problem) = &config.tracing.unusable {
                tracing::warn!(problem, "no spans are exported: this variable cannot be used");
            }
            return Ok((Tracer::default(), Self::default()));
        };
        let service = service_name;
        let settings = Settings { endpoint, headers, root_ratio, buffer, timeout, service };
        let (tracer, exporter) = Exporter::new(settings, clock).map_err(|source| {
            AppError::Tracing { problem: format!("the HTTP client cannot be created: {source}") }
        })?;
        Ok((tracer, Self { exporter: Some(Box::new(exporter)) }))
    }

    /// Exports nothing: this build has no exporter.
    #[cfg(not(feature = "otel"))]
    pub(super) fn open(config: &Config, _: &SharedClock) -> Result<(Tracer, Self), AppError> {
        headers(&config.tracing).map(|_| (Tracer::default(), Self::default()))
    }

    /// Starts to export. It goes on until [`Exporting::end`], also while everything else stops.
    pub(super) fn start(self) -> Exporting {
        #[allow(unused_mut, reason = "a build without an exporter starts nothing")]
        let mut exporting = Exporting::default();
        #[cfg(feature = "otel")]
        if let Some(exporter) = self.exporter {
            exporting.tasks.spawn(exporter.run(exporting.stop.clone()));
        }
        exporting
    }
}

/// A running export.
#[derive(Default)]
pub(super) struct Exporting {
    tasks: tokio::task::JoinSet<()>,
    stop: tokio_util::sync::CancellationToken,
}

impl Exporting {
    /// Sends the last spans. A collector that hangs delays this by a second at most.
    pub(super) async fn end(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The headers for the collector.
pub(crate) fn headers(config: &TracingConfig) -> Result<HeaderMap, AppError> {
    let Some(path) = &config.headers_file else { return Ok(HeaderMap::new()) };
    let text = fs::read(path).map_err(|error| AppError::Tracing {
        problem: format!(
            "tracing.headers_file: {} cannot be read: {error}; correct the path, or let this user read the file",
            path.display()
        ),
    })?;
    headers::parse(&text).map_err(|problem| AppError::Tracing {
        problem: format!("tracing.headers_file: {} {problem}", path.display()),
    })
}
