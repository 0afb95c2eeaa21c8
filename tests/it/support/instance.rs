//! A whole instance inside the test, where a test wants to look into the handler.

use std::net::SocketAddr;
use std::time::Duration;

use fairlane::app::{App, AppError};
use fairlane::config::Config;
use fairlane::handler::Handler;
use fairlane::id::PipelineName;
use fairlane::lifecycle::Shutdown;
use fairlane::queue::Queue;
use tokio::task::JoinSet;

use super::recorder::Log;

/// Runs until stopped or dropped.
pub(crate) struct Instance {
    pub(crate) address: SocketAddr,
    queues: Vec<Queue>,
    shutdown: Shutdown,
    running: JoinSet<Result<(), AppError>>,
}

impl Instance {
    /// Starts one from a configuration in TOML, with `handler` as the handler `recorder`.
    pub(crate) async fn start(config: &str, handler: impl Handler) -> Self {
        let config = Config::from_toml(config, "the test").unwrap();
        let names: Vec<PipelineName> = config.pipelines.keys().cloned().collect();
        let app = App::builder(config).handler("recorder", handler).build().await.unwrap();
        let address = app.metrics_address().unwrap();
        let queues = names.iter().filter_map(|name| app.queue(name)).collect();
        let shutdown = Shutdown::new();
        let mut running = JoinSet::new();
        running.spawn(app.run(shutdown.clone()));
        Self { address, queues, shutdown, running }
    }

    pub(crate) fn queue(&self, pipeline: &str) -> &Queue {
        self.queues.iter().find(|queue| queue.name().as_str() == pipeline).unwrap()
    }

    pub(crate) async fn stop(mut self) {
        self.shutdown.soft.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(20), self.running.join_next()).await;
        ended.expect("it stops").unwrap().unwrap().unwrap();
    }
}

/// The queues of a pipeline as an operator's command reaches them, without running anything.
pub(crate) async fn queue(config: &str, pipeline: &str) -> Queue {
    let config = Config::from_toml(config, "the test").unwrap();
    let app =
        App::builder(config).handler("recorder", Log::default().content()).build().await.unwrap();
    app.queue(&PipelineName::parse(pipeline).unwrap()).unwrap()
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.shutdown.hard.cancel();
    }
}
