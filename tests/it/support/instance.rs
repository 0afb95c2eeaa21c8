//! A whole instance inside the test, where a test wants to look into the handler.

use std::net::SocketAddr;
use std::time::Duration;

use fairlane::app::{App, AppError};
use fairlane::config::Config;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::PipelineName;
use fairlane::lifecycle::Shutdown;
use fairlane::queue::Queue;
use tokio::task::JoinSet;

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

impl Drop for Instance {
    fn drop(&mut self) {
        self.shutdown.hard.cancel();
    }
}

/// A closure as a handler.
pub(crate) struct With<F>(pub(crate) F);

impl<F> Handler for With<F>
where
    F: AsyncAnswer,
{
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        self.0.answer(environment, slice.clone()).await
    }
}

/// What a closure must be for [`With`].
pub(crate) trait AsyncAnswer: Send + Sync + 'static {
    fn answer(
        &self,
        environment: &Environment,
        slice: Slice,
    ) -> impl Future<Output = Result<Outcomes, Failure>> + Send;
}

impl<F, R> AsyncAnswer for F
where
    F: Fn(String, Slice) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Outcomes, Failure>> + Send,
{
    fn answer(
        &self,
        environment: &Environment,
        slice: Slice,
    ) -> impl Future<Output = Result<Outcomes, Failure>> + Send {
        self(environment.pipeline.to_string(), slice)
    }
}
