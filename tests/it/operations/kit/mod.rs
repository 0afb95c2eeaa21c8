//! The production kit: the unit of systemd, the Debian package, the manifests for Kubernetes. Fairlane
//! understands their settings, and the systems that they are for accept them.

mod manifests;
mod package;
mod service;

use std::fs;
use std::path::Path;
use std::time::Duration;

use fairlane::config::Config;
use regex::Regex;

/// What the documentation adds to `shutdown_delay` and `shutdown_grace` for the last steps of a stop.
const LAST_STEPS: Duration = Duration::from_secs(10);
/// The share of it that a busy machine needs.
const RESERVE: Duration = Duration::from_secs(3);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The time in which a process with this configuration stops.
pub(super) fn time_to_stop(config: &Config) -> Duration {
    config.shutdown_delay + config.shutdown_grace + LAST_STEPS
}

#[test]
fn the_time_to_stop_covers_all_last_steps_with_a_reserve() {
    let step = Regex::new(r"\nconst LAST_\w+: Duration = Duration::from_secs\((\d+)\);").unwrap();
    let files = ["src/lifecycle.rs", "src/app/mod.rs", "src/main.rs"].map(text);
    let steps: Vec<u64> = files
        .iter()
        .flat_map(|file| step.captures_iter(file).map(|found| found[1].parse().unwrap()))
        .collect();
    assert_eq!(steps.len(), 4, "words of tasks, answers, calls of MongoDB, threads: {steps:?}");
    let steps = Duration::from_secs(steps.iter().sum());
    assert!(steps + RESERVE <= LAST_STEPS, "{steps:?} + {RESERVE:?} is more than {LAST_STEPS:?}");
    for page in [
        "docs/docker.md",
        "docs/edge.md",
        "docs/install.md",
        "docs/kubernetes.md",
        "docs/recipes.md",
    ] {
        let told = format!("`shutdown_delay` + `shutdown_grace` + {} s", LAST_STEPS.as_secs());
        assert!(text(page).contains(&told), "{page} does not say {told}");
    }
}
