//! A program with its own handler, which reloads its configuration as `fairlane serve` does.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fairlane::app::{self, App};
use fairlane::config::{Config, RedisUrl};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use serde::{Deserialize, Serialize};

use super::say;
use super::worker::CONFIG;
use crate::support::process::variable;

/// The path of the configuration. With [`CONFIG`], the program does not load this file, which is in its
/// working directory.
pub(crate) const FILE: &str = "FAIRLANE_TEST_FILE";
/// [`Own`] as JSON.
pub(crate) const OWN: &str = "FAIRLANE_TEST_OWN";

/// What the program itself adds to each configuration.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Own {
    /// `redis.url`.
    pub(crate) redis: Option<String>,
    /// `shutdown_grace` and every `handler_timeout`.
    pub(crate) grace: Option<Duration>,
    /// `admission.bot_rate`.
    pub(crate) bot_rate: Option<u32>,
    /// How long its handler takes.
    pub(crate) takes: Duration,
}

impl Own {
    fn set(&self, config: &mut Config) {
        if let Some(url) = &self.redis {
            config.redis.url = Some(RedisUrl::parse(url).unwrap());
        }
        if let Some(grace) = self.grace {
            config.shutdown_grace = grace;
            for pipeline in config.pipelines.values_mut() {
                pipeline.handler_timeout = grace;
            }
        }
        if let Some(rate) = self.bot_rate {
            config.admission.bot.rate = rate;
        }
    }
}

/// Prints the number of events of each slice, and of all slices so far.
#[derive(Clone, Default)]
struct Counting {
    total: Arc<AtomicUsize>,
    takes: Duration,
}

impl Handler for Counting {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        if !self.takes.is_zero() {
            say("begun");
            tokio::time::sleep(self.takes).await;
        }
        let events = slice.events.len();
        let total = self.total.fetch_add(events, Ordering::Relaxed) + events;
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
        let file = PathBuf::from(variable(FILE).unwrap());
        let config = if let Some(text) = variable(CONFIG) {
            std::env::set_current_dir(file.parent().unwrap()).unwrap();
            Config::from_toml(&text, "the test").unwrap()
        } else {
            Config::load(Some(&file)).unwrap()
        };
        let own = variable(OWN).map(|text| serde_json::from_str(&text).unwrap());
        let own: Own = own.unwrap_or_default();
        let counting = Counting { takes: own.takes, ..Counting::default() };
        let builder = move |mut config| {
            own.set(&mut config);
            App::builder(config).handler("own", counting.clone())
        };
        app::serve(config, builder).await.unwrap();
    });
}
