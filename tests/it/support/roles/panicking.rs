//! A program with two products. One panics where the test asks for it, in the file `panics` beside the
//! configuration.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fairlane::app::{self, App};
use fairlane::cli::CliError;
use fairlane::clock::SharedClock;
use fairlane::config::Config;
use fairlane::event::Event;
use fairlane::fanout::Interest;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::{BotId, Shard};
use fairlane::ledger::{Account, Change, Ledger, Posting};
use fairlane::pipeline::Kind;
use fairlane::product::{
    Gauges, Listener, Offering, OpenError, Opening, Part, Product, Route, Seat, Seen, Services,
    SharedHandler, Wake,
};
use futures_util::future::BoxFuture;

use super::own::FILE;
use super::say;
use crate::support::process::variable;

/// Panics if the test asks for it at this place.
fn at(place: &str) {
    let file = Path::new(&variable(FILE).unwrap()).with_file_name("panics");
    assert_ne!(fs::read_to_string(file).unwrap(), place, "as the test asks");
}

/// The product of a pipeline. It prints what it is told.
#[derive(Debug, Clone, Copy)]
struct Told(&'static str);

impl Told {
    fn called(self, place: &str) {
        if self.0 == "loud" {
            at(place);
        }
    }
}

impl Product for Told {
    fn pipeline(&self) -> &'static str {
        self.0
    }

    fn kind(&self, _: &Config, _: &SharedClock) -> Kind {
        self.called("kind");
        Kind { selective: true, ledger: Some(Arc::new(*self)), ..Kind::default() }
    }

    fn open(&self, _: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        self.called("open");
        Ok(Arc::new(*self))
    }
}

impl Part for Told {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        self.called("handler");
        (*self).into()
    }

    fn offer(&self, _: &Offering<'_>, _: &mut Services) {
        self.called("offer");
    }

    fn routes(&self) -> Vec<Route> {
        self.called("routes");
        Vec::new()
    }

    fn start(&self, _: &Seat<'_>) {
        self.called("start");
    }

    fn interest(&self) -> Option<Arc<dyn Interest>> {
        Some(Arc::new(*self))
    }

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        self.called("gauges");
        Some(Box::new(*self))
    }

    fn listener(&self, _: &Seat<'_>) -> Option<Box<dyn Listener>> {
        self.called("listener");
        Some(Box::new(*self))
    }
}

impl Handler for Told {
    async fn handle(&self, _: &Environment, _: &Slice) -> Result<Outcomes, Failure> {
        say(&format!("{} handled", self.0));
        Ok(Outcomes::done())
    }

    fn shares_calls(&self) -> bool {
        self.called("shares_calls");
        true
    }

    fn committed(&self, _: &Slice, _: usize) {
        self.called("committed");
    }
}

impl Interest for Told {
    fn wants(&self, _: &Event) -> bool {
        self.called("wants");
        true
    }

    fn takes(&self, _: &BotId, _: &str) -> bool {
        self.called("takes");
        true
    }

    fn known(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.called("known") })
    }
}

impl Ledger for Told {
    fn enter(&self, event: &Event) -> (Event, Option<Posting>) {
        self.called("enter");
        (event.clone(), Some(Posting { account: Account::from("all"), amount: 1 }))
    }

    fn entry(&self, _: &Event) -> Option<(Account, Change)> {
        self.called("entry");
        Some((Account::from("all"), Change::Add(1)))
    }

    fn cached_accounts(&self) -> u64 {
        self.called("cached_accounts");
        1
    }

    fn posted(&self, _: u64) {
        self.called("posted");
    }
}

impl Listener for Told {
    fn heard(&self, _: Shard, _: &Wake) {
        self.called("heard");
        say(&format!("{} heard", self.0));
    }

    fn missed(&self) {
        self.called("missed");
    }
}

impl Gauges for Told {
    fn watches_delayed(&self) -> bool {
        self.called("watches_delayed");
        false
    }

    fn show(&self, _: &Seen) {
        self.called("show");
        say(&format!("{} shown", self.0));
    }
}

/// Runs until SIGTERM. Ends as the command does.
pub(super) fn run() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let served = runtime.block_on(async {
        let config = Config::load(Some(Path::new(&variable(FILE).unwrap()))).unwrap();
        let builder = |config| {
            at("builder");
            App::builder(config).product(Told("loud")).product(Told("calm"))
        };
        app::serve(config, builder).await
    });
    if let Err(error) = served {
        say(&format!("error: {error}"));
        std::process::exit(CliError::from(error).exit() as i32);
    }
}
