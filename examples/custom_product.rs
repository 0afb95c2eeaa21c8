//! A custom product: it counts the events of each bot, returns the counts over HTTP and forgets
//! quiet bots. It has a kind of pipeline, a handler, a route, a background task, a metric and a
//! section of the configuration. `cargo run --example custom_product`
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlane::app::{self, App};
use fairlane::clock::SharedClock;
use fairlane::config::{Config, PipelineConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::PipelineName;
use fairlane::pipeline::{Kind, Protected};
use fairlane::product::axum::{Json, extract::Path, routing::get};
use fairlane::product::metrics::gauge;
use fairlane::product::{
    Class, OpenError, Opening, Part, Product, Route, Scope, Seat, SharedHandler,
};
use fairlane::telemetry::{self, LevelFilter, LogFormat};
use serde::Deserialize;

const NAME: &str = "activity";

/// The section `[products.activity]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// A bot without events for this long is forgotten. Default: 1 hour.
    forget_after_seconds: Option<u64>,
}

/// Both instances count in the same map during a reload.
#[derive(Clone, Default)]
pub(crate) struct Activity {
    counts: Counts,
}

impl Product for Activity {
    fn pipeline(&self) -> &'static str {
        NAME
    }

    /// Operators cannot purge its queues: the counts would miss events.
    fn kind(&self, _: &Config, _: &SharedClock) -> Kind {
        let protected = Protected {
            code: "counts-events",
            title: "Counted events are not purged",
            reason: "the counts would miss the events that are queued",
        };
        Kind { protected: Some(protected), ..Kind::default() }
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        let settings: Settings = opening.section()?;
        let forget_after = Duration::from_secs(settings.forget_after_seconds.unwrap_or(3_600));
        Ok(Arc::new(ActivityPart { counts: self.counts.clone(), forget_after }))
    }
}

/// The number of events of each bot, and when the last one arrived.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<HashMap<String, (usize, Instant)>>>);

impl Counts {
    fn with<T>(&self, use_them: impl FnOnce(&mut HashMap<String, (usize, Instant)>) -> T) -> T {
        use_them(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Handler for Counts {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        self.with(|counts| {
            let (count, last) = counts.entry(slice.bot.to_string()).or_insert((0, Instant::now()));
            (*count, *last) = (*count + slice.events.len(), Instant::now());
        });
        Ok(Outcomes::done())
    }
}

struct ActivityPart {
    counts: Counts,
    forget_after: Duration,
}

impl Part for ActivityPart {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        self.counts.clone().into()
    }

    fn routes(&self) -> Vec<Route> {
        let counts = self.counts.clone();
        let tell = get(async move |Path(bot): Path<String>| {
            Json(counts.with(|counts| counts.get(&bot).map_or(0, |(count, _)| *count)))
        });
        vec![Route::new("/v1/bots/{bot}/activity", Scope::Read, Class::P1, tell)]
    }

    fn start(&self, seat: &Seat<'_>) {
        let (counts, forget_after) = (self.counts.clone(), self.forget_after);
        let stopping = seat.shutdown.soft.clone();
        seat.shutdown.spawn(stopping.run_until_cancelled_owned(async move {
            loop {
                let bots = counts.with(|counts| {
                    counts.retain(|_, (_, last)| last.elapsed() < forget_after);
                    counts.len()
                });
                gauge!("activity_bots").set(u32::try_from(bots).unwrap_or(u32::MAX));
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }));
    }
}

/// The text of an error names the remedy.
fn main() {
    if let Err(error) = serve() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

#[tokio::main]
async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    // Or install a subscriber of `tracing`.
    telemetry::init(LogFormat::Text, LevelFilter::INFO)?;
    let (name, activity) = (PipelineName::parse(NAME)?, Activity::default());
    let builder = move |mut config: Config| {
        config.pipelines.entry(name.clone()).or_insert(PipelineConfig::new(NAME, ["*"]));
        App::builder(config).product(activity.clone())
    };
    app::serve(Config::load(None)?, builder).await?;
    Ok(())
}
