//! The common part of operator commands: the configuration, a Redis connection, the known
//! pipelines.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redis::TlsCertificates;

use super::error::CliError;
use super::output::tell;
use crate::config::{Config, PipelineConfig, RedisUrl, is_built_in};
use crate::formats;
use crate::id::{PipelineName, ShardCount};
use crate::pipeline::Kind;
use crate::presence::{self, Process};
use crate::products::{self, Kinds};
use crate::queue::{FAIR_SLICE_US, Queue};
use crate::redis::keys::ShardKeys;
use crate::redis::private::PrivateRedis;
use crate::redis::scripts::Limits;
use crate::redis::{Link, RedisError, Server, Target};

/// Timeout of one Redis call of an operator command.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// The same for a command that shows what is wrong: it must not wait for what does not answer.
const BRIEF: Duration = Duration::from_secs(3);

/// A connection for one command.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) config: Config,
    pub(super) server: Server,
    shards: ShardCount,
    /// Runs the scripts of no shard; for inspection only.
    looking: Arc<Link>,
}

impl Session {
    /// Runs `act` with the Redis of `redis.url`, or with the private Redis. A private Redis is
    /// started if necessary, and stopped afterwards if no other process uses it.
    ///
    /// # Cancel safety
    /// A private server that this call started keeps running; the next command adopts it.
    pub(super) async fn with<T>(
        config: Config,
        act: impl AsyncFnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        Self::within(TIMEOUT, false, config, act).await
    }

    /// The same with short timeouts, for a command that changes nothing. In a cluster, the primary that has
    /// the number of shards may be missing: the configuration is trusted then.
    ///
    /// # Cancel safety
    /// As for [`Self::with`].
    pub(super) async fn only_looking<T>(
        config: Config,
        act: impl AsyncFnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        Self::within(BRIEF, true, config, act).await
    }

    /// The same with short timeouts.
    ///
    /// # Cancel safety
    /// As for [`Self::with`].
    pub(super) async fn briefly<T>(
        config: Config,
        act: impl AsyncFnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        Self::within(BRIEF, false, config, act).await
    }

    async fn within<T>(
        limit: Duration,
        trusts: bool,
        config: Config,
        act: impl AsyncFnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let redis = Redis::open(limit, &config).await?;
        let result = async {
            let target = redis.target()?.with_prefix(config.redis.prefix.clone());
            let target = target.with_wait(config.redis.wait());
            let session = Self::open(config, target, limit, trusts).await?;
            act(&session).await
        }
        .await;
        redis.close().await;
        result
    }

    /// `trusts`: the configuration has the number of shards if its primary is missing.
    async fn open(
        config: Config,
        target: Target,
        limit: Duration,
        trusts: bool,
    ) -> Result<Self, CliError> {
        let server = Server::new(target.clone(), limit);
        let configured = config.redis.shards;
        let stored = server.shards().await;
        let stored = if trusts {
            unless_missing(server.link(), stored).await?.unwrap_or(Some(configured))
        } else {
            stored?
        };
        if stored.is_none() {
            notice_others(&server).await;
        }
        let shards = stored.unwrap_or(configured);
        if shards != configured {
            let (configured, stored) = (configured.get(), shards.get());
            return Err(CliError::Shards { configured, stored });
        }
        // Neither this link nor that of `Self::queue` is pooled. The command is alone in its
        // process, so a large answer delays no other call, and one connection opens faster than
        // several.
        let looking = Arc::new(Link::new(target, Vec::new(), FAIR_SLICE_US, limit));
        if stored.is_some() {
            let place = formats::place(looking.prefix());
            let marks = formats::look(&looking).await;
            let marks = if trusts {
                unless_missing(&looking, marks).await?.unwrap_or_default()
            } else {
                marks?
            };
            marks.accept(products::formats(), &place)?;
        }
        Ok(Self { config, server, shards, looking })
    }

    /// The pipelines of the configuration and those that have run before, sorted by name. A
    /// built-in pipeline is listed only if it has run before, because its store may be missing
    /// here.
    pub(super) async fn pipelines(&self) -> Result<Vec<PipelineName>, RedisError> {
        let written = self.config.pipelines.keys().filter(|name| !is_built_in(name));
        let mut names: BTreeSet<_> = written.cloned().collect();
        names.extend(self.server.pipelines().await?);
        Ok(names.into_iter().collect())
    }

    /// The running processes.
    pub(super) async fn processes(&self) -> Result<Vec<Process>, CliError> {
        Ok(presence::processes(&self.looking).await?)
    }

    /// The pipeline of `--pipeline`, or the only one that exists. Built-in pipelines do not count.
    pub(super) async fn choose(
        &self,
        wanted: Option<&PipelineName>,
    ) -> Result<PipelineName, CliError> {
        let known = self.pipelines_or(wanted).await?;
        let written: Vec<_> = known.iter().filter(|name| !is_built_in(name)).collect();
        match (known.as_slice(), written.as_slice()) {
            ([only], _) => Ok(only.clone()),
            (_, [only]) => Ok((*only).clone()),
            ([], _) => Err(CliError::NoPipeline),
            _ => Err(CliError::WhichPipeline { known }),
        }
    }

    /// The pipeline of `--pipeline`, or all pipelines.
    pub(super) async fn pipelines_or(
        &self,
        wanted: Option<&PipelineName>,
    ) -> Result<Vec<PipelineName>, CliError> {
        let known = self.pipelines().await?;
        match wanted {
            Some(name) if known.contains(name) => Ok(vec![name.clone()]),
            Some(name) => Err(CliError::UnknownPipeline { name: name.clone(), known }),
            None => Ok(known),
        }
    }

    /// The link for inspection.
    pub(super) fn link(&self) -> &Link {
        &self.looking
    }

    /// [`Self::link`], for sources of the bus.
    pub(super) fn shared_link(&self) -> &Arc<Link> {
        &self.looking
    }

    /// The kind of a pipeline.
    pub(super) fn kind(&self, name: &PipelineName) -> Kind {
        Kinds::today(&self.config).of(name)
    }

    /// The queues of a pipeline, for inspection.
    pub(super) fn view(&self, name: &PipelineName) -> Queue {
        let kind = self.kind(name);
        Queue::new(name.clone(), self.shards, self.limits(name), Arc::clone(&self.looking))
            .of_kind(kind)
            .with_quotas(self.config.quotas.quotas())
    }

    /// The queues of a pipeline, for changes.
    pub(super) fn queue(&self, name: &PipelineName) -> Queue {
        let keys = |shard| ShardKeys::new(self.looking.prefix(), name, shard);
        let keys = self.shards.shards().map(keys).collect();
        let link = Link::new(self.looking.target().clone(), keys, FAIR_SLICE_US, TIMEOUT);
        self.view(name).over(Arc::new(link))
    }

    fn limits(&self, name: &PipelineName) -> Limits {
        let defaults = || PipelineConfig::new("", [""; 0]);
        let config = self.config.pipelines.get(name).cloned().unwrap_or_else(defaults);
        config.limits(self.shards)
    }
}

/// `None` if the primary that was asked is missing, while others of its cluster serve.
async fn unless_missing<T>(
    link: &Link,
    read: Result<T, RedisError>,
) -> Result<Option<T>, RedisError> {
    let error = match read {
        Ok(read) => return Ok(Some(read)),
        Err(error) => error,
    };
    let missing = link.missing_behind(&error, BRIEF).await;
    if missing.is_empty() { Err(error) } else { Ok(None) }
}

/// Prints a note if this Redis has data under other prefixes only: the user may mean one of those.
async fn notice_others(server: &Server) {
    // Ignore errors: the command itself reports them.
    let Ok(others) = server.environments().await else { return };
    if !others.is_empty() {
        let others: Vec<_> = others.iter().map(|other| format!("{other:?}")).collect();
        tell(format_args!(
            "note: there is no data yet under redis.prefix = {:?}; this Redis has data under {}",
            server.target().prefix(),
            others.join(", ")
        ));
    }
}

/// The configured Redis: remote or private.
#[derive(Debug)]
pub(super) enum Redis {
    At(RedisUrl, Option<Box<TlsCertificates>>),
    Private(Box<PrivateRedis>),
}

impl Redis {
    /// `limit`: a private Redis that is frozen or loads its data would hold up the command for long.
    pub(super) async fn open(limit: Duration, config: &Config) -> Result<Self, CliError> {
        if let Some(url) = &config.redis.url {
            return Ok(Self::At(url.clone(), config.redis.certificates()?.map(Box::new)));
        }
        let starting = tokio::time::timeout(limit, PrivateRedis::start(&config.data_dir));
        let Ok(private) = starting.await else {
            let (dir, seconds) = (config.data_dir.clone(), limit.as_secs());
            return Err(CliError::PrivateSilent { dir, seconds });
        };
        let private = private?;
        if private.was_started() && is_lost(config) {
            tell(lost_notice(config));
        }
        Ok(Self::Private(Box::new(private)))
    }

    pub(super) fn target(&self) -> Result<Target, CliError> {
        let (url, certificates) = match self {
            Self::At(url, certificates) => (url, certificates.as_deref()),
            Self::Private(private) => (private.url(), None),
        };
        // The client's error is dropped on purpose: it may quote the address with its password.
        Target::open(url, certificates).map_err(|_| CliError::Address)
    }

    /// Every connection must be closed before this call.
    pub(super) async fn close(self) {
        if let Self::Private(private) = self
            && let Err(error) = private.stop().await
        {
            tracing::warn!(%error, "cannot stop the private Redis; it keeps running");
        }
    }
}

/// Whether no setting locates the data. Then the current directory is probably the wrong one.
fn is_lost(config: &Config) -> bool {
    config.file.is_none() && config.data_dir == Config::default().data_dir
}

fn lost_notice(config: &Config) -> String {
    let data = config.data_dir.display();
    format!(
        "note: no fairlane.toml here, so a private Redis was started under {data} for this command; if yours is elsewhere, go to its directory, or name its configuration with --config FILE"
    )
}
