//! A program with its own handler, which reloads its configuration as `fairlane serve` does.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fairlane::app::{self, App};
use fairlane::config::Config;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};

use super::say;
use crate::support::process::variable;

/// The path of the configuration.
pub(crate) const FILE: &str = "FAIRLANE_TEST_FILE";

/// Prints the number of events of each slice, and of all slices so far.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl Handler for Counting {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let events = slice.events.len();
        let total = self.0.fetch_add(events, Ordering::Relaxed) + events;
        say(&format!("slice {events} total {total}"));
        Ok(Outcomes::done())
    }
}

/// Runs until SIGTERM. Ends with code 0 if it stopped without an error.
pub(super) fn run() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let config = Config::load(Some(Path::new(&variable(FILE).unwrap()))).unwrap();
        let counting = Counting::default();
        let builder = move |config| App::builder(config).handler("own", counting.clone());
        app::serve(config, builder).await.unwrap();
    });
}
