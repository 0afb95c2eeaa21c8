//! A program with two products. One panics where the test asks for it, in the file `panics` beside the
//! configuration.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fairlane::app::{self, App};
use fairlane::cli::CliError;
use fairlane::clock::SharedClock;
use fairlane::config::Config;
use fairlane::id::Shard;
use fairlane::pipeline::Kind;
use fairlane::product::{
    Gauges, Listener, Offering, OpenError, Opening, Part, Product, Route, Seat, Seen, Services,
    SharedHandler, Wake,
};

use super::own::FILE;
use super::say;
use crate::support::process::variable;
use crate::support::recorder::Log;

/// Panics if the test asks for it at this place.
fn at(place: &str) {
    let file = Path::new(&variable(FILE).unwrap()).with_file_name("panics");
    assert_ne!(fs::read_to_string(file).unwrap(), place, "as the test asks");
}

/// The product of a pipeline. It prints what it is told.
#[derive(Clone, Copy)]
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
        Kind::default()
    }

    fn open(&self, _: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        self.called("open");
        Ok(Arc::new(*self))
    }
}

impl Part for Told {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        self.called("handler");
        Log::default().content().into()
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

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        self.called("gauges");
        Some(Box::new(*self))
    }

    fn listener(&self, _: &Seat<'_>) -> Option<Box<dyn Listener>> {
        self.called("listener");
        Some(Box::new(*self))
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
