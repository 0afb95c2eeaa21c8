//! The production kit: the unit of systemd, the Debian package, the manifests for Kubernetes. Fairlane
//! understands their settings, and the systems that they are for accept them.

mod manifests;
mod package;
mod service;

use std::fs;
use std::path::Path;
use std::time::Duration;

use fairlane::config::Config;

/// What a process needs to stop, besides `shutdown_delay` and `shutdown_grace`.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The time in which a process with this configuration stops.
fn time_to_stop(config: &Config) -> Duration {
    config.shutdown_delay + config.shutdown_grace + LAST_ANSWERS
}
