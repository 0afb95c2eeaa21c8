//! A product that panics ends neither the other pipelines nor a process that works. A process that it keeps
//! from starting ends with an error.

use std::fs;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, configs};
use crate::support::http::Client;
use crate::support::process::{WorkerProcess, signal};
use crate::support::redis::{Options, RedisServer};
use crate::support::roles::own::FILE;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A program with the products `calm` and `loud`.
struct Program {
    process: WorkerProcess,
    directory: TempDir,
    server: RedisServer,
    published: usize,
}

impl Program {
    /// Its product `loud` panics at this place.
    fn start(place: &str) -> Self {
        let server = RedisServer::start(Options::default());
        let directory = tempfile::tempdir().unwrap();
        let (file, handler) = (directory.path().join("fairlane.toml"), "\"own\"");
        let settings = [
            ("pipelines.calm.handler", handler),
            ("pipelines.calm.events", "[\"test\"]"),
            ("pipelines.loud.handler", handler),
        ];
        fs::write(&file, configs(&server, &["calm", "loud"], &settings)).unwrap();
        fs::write(directory.path().join("panics"), place).unwrap();
        let process = WorkerProcess::spawn("panicking", &[(FILE, file.display().to_string())]);
        Self { process, directory, server, published: 0 }
    }

    /// From now on, it panics at this place.
    fn panics_at(&self, place: &str) {
        fs::write(self.directory.path().join("panics"), place).unwrap();
    }

    /// The printed lines with this text.
    fn lines(&self, text: &str) -> Vec<String> {
        self.process.lines().into_iter().filter(|line| line.contains(text)).collect()
    }

    /// A client of its HTTP interface.
    fn client(&self) -> Client {
        let line = self.lines("fairlane is running").pop().unwrap();
        let address = line.split_once(" http=").and_then(|(_, rest)| rest.split(' ').next());
        Client::new(address.unwrap())
    }

    async fn says(&self, text: &str, times: usize) {
        eventually(LONG, text, async || self.lines(text).len() >= times).await;
    }

    /// Publishes events for both products until it has said this so many times.
    async fn publish_until(&mut self, text: &str, times: usize) {
        eventually(LONG, text, async || {
            self.published += 1;
            add(&self.server, STREAM, &[event("bot", "test", self.published)]).await;
            self.lines(text).len() >= times
        })
        .await;
    }

    /// The same until it says this once more.
    async fn says_again(&mut self, text: &str) {
        let times = self.lines(text).len() + 1;
        self.publish_until(text, times).await;
    }
}

#[tokio::test]
async fn a_panic_while_a_product_starts_ends_the_process_with_an_error() {
    for place in ["handler", "start", "listener", "gauges"] {
        let mut program = Program::start(place);
        let ended = program.process.wait_exit(LONG).and_then(|status| status.code());
        assert_eq!(ended, Some(1), "{place}: {:#?}", program.lines(""));
        let told = program.lines("error: a part of the program panicked; the log above has");
        assert_eq!(told.len(), 1, "{place}: {:#?}", program.lines(""));
    }
}

#[tokio::test]
async fn a_panic_of_a_listener_or_a_gauge_ends_only_its_call_and_is_logged() {
    let mut program = Program::start("missed");
    program.says("fairlane is running", 1).await;
    for (place, call) in [
        ("missed", "Listener::missed"),
        ("heard", "Listener::heard"),
        ("watches_delayed", "Gauges::watches_delayed"),
        ("show", "Gauges::show"),
    ] {
        program.panics_at(place);
        program.publish_until(call, 1).await;
        let told = program.lines(call);
        assert!(told[0].contains("panicked") && told[0].contains("pipeline=loud"), "{told:?}");
        program.says_again("calm heard").await;
        program.says_again("calm shown").await;
    }
    program.panics_at("");
    program.says_again("loud heard").await;
    program.says_again("loud shown").await;
    program.process.sigterm();
    assert!(program.process.wait_exit(LONG).is_some_and(|status| status.success()));
}

#[tokio::test]
async fn a_panic_of_an_interest_a_ledger_or_beside_a_slice_ends_only_its_call_and_is_logged() {
    let mut program = Program::start("known");
    program.says("fairlane is running", 1).await;
    for (place, call) in [
        ("known", "Interest::known"),
        ("wants", "Interest::wants"),
        ("enter", "Ledger::enter"),
        ("cached_accounts", "Ledger::cached_accounts"),
        ("posted", "Ledger::posted"),
        ("entry", "Ledger::entry"),
        ("committed", "Handler::committed"),
        ("shares_calls", "Handler::shares_calls"),
    ] {
        program.panics_at(place);
        program.publish_until(call, 1).await;
        let told = program.lines(call);
        assert!(told[0].contains("panicked") && told[0].contains("pipeline=loud"), "{told:?}");
        program.says_again("calm handled").await;
        program.says_again("loud handled").await;
    }
    // Only the loud pipeline names this type.
    program.panics_at("takes");
    let rare = event("bot", "rare", "1");
    let answer = program.client().publish("application/cloudevents+json", rare).await;
    assert_eq!(answer.code, 202);
    assert!(answer.json()["unmatched"].is_null(), "in doubt, it is taken");
    program.says("Interest::takes", 1).await;
    program.panics_at("");
    program.says_again("loud handled").await;
    program.process.sigterm();
    assert!(program.process.wait_exit(LONG).is_some_and(|status| status.success()));
}

#[tokio::test]
async fn a_reload_that_makes_the_program_panic_is_refused_and_the_process_works_on() {
    let mut program = Program::start("");
    program.says("fairlane is running", 1).await;
    let (refused, ended) = ("it made the program panic; the log has", "it has ended; the log says");
    let places = [
        ("builder", refused),
        ("kind", refused),
        ("open", refused),
        ("routes", refused),
        ("offer", refused),
        ("handler", ended),
        ("start", ended),
        ("listener", ended),
        ("gauges", ended),
    ];
    for (times, (place, reason)) in (1..).zip(places) {
        program.panics_at(place);
        signal(program.process.id(), "HUP");
        program.says("nothing is reloaded", times).await;
        let told = program.lines("nothing is reloaded").pop().unwrap();
        assert!(told.contains(reason), "{place}: {told}");
        program.panics_at("");
        program.says_again("calm heard").await;
    }
    signal(program.process.id(), "HUP");
    program.says("the configuration is reloaded", 1).await;
    program.says_again("loud heard").await;
    program.process.sigterm();
    assert!(program.process.wait_exit(LONG).is_some_and(|status| status.success()));
}
