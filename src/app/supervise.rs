//! Supervises the private servers.

use std::time::Duration;

use futures_util::future::{OptionFuture, join3};
use tracing::{debug, error, info, warn};

use super::{AppError, Private, Site};
use crate::config::Config;
use crate::lifecycle::Shutdown;
use crate::mongo::client::Mongo;
use crate::mongo::private::PrivateMongo;
use crate::redis::Link;
use crate::redis::private::PrivateRedis;
use crate::telemetry::{Outage, Recovered};

/// Interval of the checks.
const SUPERVISE: Duration = Duration::from_secs(2);

impl Private {
    /// Supervises the servers until the soft stop.
    pub(super) async fn supervise(&mut self, site: &Site, shutdown: &Shutdown) {
        // Not pooled: Redis is not dead when operators use all pooled connections.
        let (config, link) = (&site.config, &site.links.prompt);
        let redis = self.redis.as_mut().map(|private| redis(private, config, link, shutdown));
        let mongo = self.mongo.as_mut().zip(site.needs.mongo.clone().ok());
        let mongo = mongo.map(|(private, store)| mongo_server(private, config, store, shutdown));
        let (redis, mongo) = (OptionFuture::from(redis), OptionFuture::from(mongo));
        join3(redis, mongo, shutdown.soft.cancelled()).await;
    }

    /// Stops the servers that no other process uses: also the second one if the first one cannot be
    /// stopped.
    pub(super) async fn stop(self) -> Result<(), AppError> {
        let redis = OptionFuture::from(self.redis.map(PrivateRedis::stop)).await.transpose();
        match redis {
            Ok(Some(true)) => info!("stopped the private Redis"),
            Ok(Some(false)) => info!("left the private Redis running: others still use it"),
            Ok(None) | Err(_) => {}
        }
        let mongo = OptionFuture::from(self.mongo.map(PrivateMongo::stop)).await.transpose();
        match mongo {
            Ok(Some(true)) => info!("stopped the private MongoDB"),
            Ok(Some(false)) => info!("left the private MongoDB running: others still use it"),
            Ok(None) | Err(_) => {}
        }
        redis?;
        mongo?;
        Ok(())
    }

    /// The same after a failure, which matters more than one of the stop.
    pub(super) async fn stop_after(self, failure: AppError) -> AppError {
        if let Err(error) = self.stop().await {
            warn!(%error, "cannot stop a private server");
        }
        failure
    }
}

/// Restarts the private Redis when it dies, until the soft stop.
async fn redis(private: &mut PrivateRedis, config: &Config, link: &Link, shutdown: &Shutdown) {
    let outage = Outage::new(Duration::ZERO);
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(SUPERVISE) => {}
        }
        let answers = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            answer = link.ping() => answer.is_ok(),
        };
        if answers {
            if let Some(Recovered { lasted, .. }) = outage.succeeded() {
                info!(pid = private.pid(), ?lasted, "the private Redis answers again");
            }
            continue;
        }
        let suppressed = outage.failed();
        if let Some(suppressed) = suppressed {
            let pid = private.pid();
            warn!(pid, suppressed, "the private Redis does not answer; starting it again");
        }
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            started = PrivateRedis::start(&config.data_dir) => match started {
                Ok(again) => *private = again,
                Err(error) if suppressed.is_some() => warn!(%error, "cannot start the private Redis"),
                Err(error) => debug!(%error, "cannot start the private Redis"),
            },
        }
    }
}

/// Restarts the private MongoDB when it dies, until the soft stop.
async fn mongo_server(
    private: &mut PrivateMongo,
    config: &Config,
    mongo: Mongo,
    shutdown: &Shutdown,
) {
    let outage = Outage::new(Duration::ZERO);
    loop {
        let answers = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            answer = async {
                tokio::time::sleep(SUPERVISE).await;
                mongo.ping().await
            } => answer.is_ok(),
        };
        if answers {
            if let Some(Recovered { lasted, .. }) = outage.succeeded() {
                info!(pid = private.pid(), ?lasted, "the private MongoDB answers again");
            }
            continue;
        }
        let suppressed = outage.failed();
        if let Some(suppressed) = suppressed {
            let pid = private.pid();
            warn!(pid, suppressed, "the private MongoDB does not answer; starting it again");
        }
        let starting = PrivateMongo::start(&config.data_dir, config.mongodb.program.as_deref());
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            started = starting => match started {
                // Our connections would never find a server at another address.
                Ok(again) if again.url().expose() != private.url().expose() => {
                    error!("the port of the private MongoDB is taken: restart this process");
                    *private = again;
                }
                Ok(again) => *private = again,
                Err(error) if suppressed.is_some() => {
                    warn!(%error, "cannot start the private MongoDB");
                }
                Err(error) => debug!(%error, "cannot start the private MongoDB"),
            },
        }
    }
}
