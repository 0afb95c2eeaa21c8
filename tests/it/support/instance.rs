//! A whole instance inside the test process, for tests that look into the handler.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlane::app::{App, AppError, Roles};
use fairlane::clock::{SharedClock, SystemClock};
use fairlane::config::Config;
use fairlane::handler::Handler;
use fairlane::id::PipelineName;
use fairlane::lifecycle::Shutdown;
use fairlane::notifications::Notifications;
use fairlane::queue::Queue;
use tokio::task::JoinSet;

use super::http::{Client, until_ready};
use super::recorder::Log;

/// Runs until it is stopped or dropped.
pub(crate) struct Instance {
    pub(crate) address: SocketAddr,
    /// The address of its HTTP interface, if it has the role `http`.
    http: Option<SocketAddr>,
    queues: Vec<Queue>,
    notifications: Option<Notifications>,
    shutdown: Shutdown,
    running: JoinSet<Result<(), AppError>>,
}

impl Instance {
    /// Starts an instance from a configuration in TOML, with `handler` as the handler `recorder`.
    pub(crate) async fn start(config: &str, handler: impl Handler) -> Self {
        Self::start_as(Roles::ALL, config, handler).await
    }

    /// The same with only some of the roles.
    pub(crate) async fn start_as(roles: Roles, config: &str, handler: impl Handler) -> Self {
        Self::start_at(Arc::new(SystemClock), roles, config, handler).await
    }

    /// The same on another clock.
    pub(crate) async fn start_at(
        clock: SharedClock,
        roles: Roles,
        config: &str,
        handler: impl Handler,
    ) -> Self {
        let instance = Self::begin(clock, roles, config, handler).await;
        until_ready(&instance.address.to_string()).await;
        instance
    }

    /// Starts an instance that may not become ready, or late.
    pub(crate) async fn start_unready(config: &str, handler: impl Handler) -> Self {
        Self::begin(Arc::new(SystemClock), Roles::ALL, config, handler).await
    }

    async fn begin(clock: SharedClock, roles: Roles, config: &str, handler: impl Handler) -> Self {
        let config = Config::from_toml(config, "the test").unwrap();
        let names: Vec<PipelineName> = config.pipelines.keys().cloned().collect();
        let app = App::builder(config).clock(clock).roles(roles).handler("recorder", handler);
        let app = Box::pin(app.build()).await.unwrap();
        let address = app.metrics_address().unwrap();
        let http = app.http_address().unwrap();
        let queues = names.iter().filter_map(|name| app.queue(name)).collect();
        let notifications = app.notifications();
        let shutdown = Shutdown::new();
        let mut running = JoinSet::new();
        running.spawn(app.run(shutdown.clone()));
        Self { address, http, queues, notifications, shutdown, running }
    }

    pub(crate) fn queue(&self, pipeline: &str) -> &Queue {
        self.queues.iter().find(|queue| queue.name().as_str() == pipeline).unwrap()
    }

    pub(crate) fn notifications(&self) -> &Notifications {
        self.notifications.as_ref().expect("the pipeline of the notifications is enabled")
    }

    /// A client of its HTTP interface.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.http.expect("it has the role http").to_string())
    }

    pub(crate) async fn stop(mut self) {
        self.shutdown.soft.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(20), self.running.join_next()).await;
        ended.expect("the instance did not stop in time").unwrap().unwrap().unwrap();
    }
}

/// The queues of a pipeline as an operator's command uses them, without a running instance.
pub(crate) async fn queue(config: &str, pipeline: &str) -> Queue {
    let config = Config::from_toml(config, "the test").unwrap();
    let builder = App::builder(config).handler("recorder", Log::default().content());
    let app = Box::pin(builder.build()).await.unwrap();
    app.queue(&PipelineName::parse(pipeline).unwrap()).unwrap()
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.shutdown.hard.cancel();
    }
}
