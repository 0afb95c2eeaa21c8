//! Reads what the findings are made of. Each part has its own time limit: a store that is slow or
//! gone takes that time once, and the facts say which parts could not be looked at.

use std::time::Duration;

use futures_util::future::join_all;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::clock::millis;
use crate::id::{BotId, PipelineName};
use crate::presence::{self, BusView, Pace, Process};
use crate::queue::{Failing, LetterOfBot, PipelineView, Queue, Throttled};
use crate::redis::{Link, RedisError, ServerInfo, StreamView};

/// Time limit of one part.
const LIMIT: Duration = Duration::from_secs(2);
/// Time limit of all parts together: those behind it are not looked at.
const ALL: Duration = Duration::from_secs(5);
/// Pings that measure the latency: the best one counts. The first may include the connection.
const PINGS: usize = 3;
/// After this time no further ping is sent, but the second one is.
const PINGING: Duration = Duration::from_millis(500);
/// Number of pipelines that are looked at concurrently.
const CONCURRENT: usize = 4;
/// Number of the newest dead letters that are looked at, of each pipeline.
const LETTERS: usize = 20;
/// The part of the processes.
pub(super) const PROCESSES: &str = "the processes";

/// Where the facts are read: the connections and the configuration of a process or a command.
pub(crate) trait Site: Sync {
    /// The link for inspection.
    fn link(&self) -> &Link;
    /// The link that measures the latency. Large answers do not delay it.
    fn prompt(&self) -> &Link;
    /// The bus streams of the configuration.
    fn streams(&self) -> &[String];
    /// The names of the buses beside Redis in the configuration.
    fn buses(&self) -> Vec<String>;
    /// The known pipelines.
    fn pipelines(&self) -> impl Future<Output = Result<Vec<PipelineName>, RedisError>> + Send;
    /// The state of a pipeline by configuration alone.
    fn configured(&self, name: &PipelineName) -> PipelineState;
    /// Whether events of the bus are copied for a pipeline.
    fn takes_of_bus(&self, name: &PipelineName) -> bool;
    /// How long events of a pipeline wait for further ones.
    fn linger(&self, name: &PipelineName) -> Duration;
    /// The queues of a known pipeline.
    fn queue(&self, name: &PipelineName) -> Queue;
    /// Whether MongoDB answers; `None`: unknown or not used here.
    fn mongodb(&self) -> Option<bool>;
    /// The time since 1970.
    fn now(&self) -> Duration;
}

/// What was read.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    pub(crate) redis: RedisFacts,
    /// Whether all else was looked at in spite of an error of Redis.
    #[serde(skip)]
    pub(super) others_seen: bool,
    pub(crate) streams: Vec<StreamView>,
    /// The buses beside Redis.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) buses: Vec<BusView>,
    /// Bus entries that could not be read.
    pub(crate) invalid: u64,
    #[serde(skip)]
    pub(crate) invalid_stream: String,
    pub(crate) processes: Vec<Process>,
    pub(crate) pipelines: Vec<PipelineFacts>,
    /// Whether MongoDB answers this process.
    #[serde(skip)]
    pub(crate) mongodb: Option<bool>,
    /// The parts that could not be looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) not_seen: Vec<NotSeen>,
    /// When they were read, ms since 1970.
    #[serde(skip)]
    pub(crate) now_ms: u64,
}

/// Redis.
#[derive(Debug, Default, Serialize)]
pub(crate) struct RedisFacts {
    pub(crate) target: String,
    /// Whether connections to it are encrypted.
    #[serde(skip)]
    pub(crate) tls: bool,
    #[serde(flatten)]
    pub(crate) info: Option<ServerInfo>,
    /// The best of a few round trips, in ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ping_ms: Option<u64>,
    /// Whether it refuses every write, because it cannot write to its disk.
    #[serde(skip)]
    pub(crate) refuses_writes: bool,
    /// The number of replicas that must confirm a write (`redis.wait_replicas`); 0: none.
    pub(crate) wait_replicas: u8,
    /// Why it does not answer, or which primaries of a cluster do not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Whether `error` concerns only some primaries of a cluster, and others answer.
    #[serde(skip)]
    pub(crate) others_answer: bool,
}

/// A part that could not be looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct NotSeen {
    pub(crate) part: String,
    pub(crate) reason: String,
}

/// A pipeline with its name.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PipelineFacts {
    pub(crate) name: PipelineName,
    pub(crate) state: PipelineState,
    #[serde(flatten)]
    pub(crate) view: PipelineView,
    /// Bots whose calls all fail, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failing: Option<Failing>,
    /// The bots that their rate holds back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) throttled: Option<Throttled>,
    /// The newest dead letters.
    #[serde(skip)]
    pub(crate) letters: Vec<(BotId, LetterOfBot)>,
    /// Workers of all processes.
    #[serde(flatten)]
    pub(crate) pace: Pace,
    #[serde(skip)]
    pub(crate) takes_of_bus: bool,
    #[serde(skip)]
    pub(crate) linger: Duration,
}

/// The state of a pipeline by configuration and operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PipelineState {
    Enabled,
    /// Paused by an operator.
    Paused,
    /// `enabled = false`.
    Disabled,
    /// Present in Redis, absent from the configuration.
    Unconfigured,
}

impl PipelineState {
    /// The state by the setting `enabled`; `None`: the pipeline is not in the configuration.
    pub(crate) fn of(enabled: Option<bool>) -> Self {
        match enabled {
            None => Self::Unconfigured,
            Some(false) => Self::Disabled,
            Some(true) => Self::Enabled,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::Unconfigured => "unconfigured",
        }
    }
}

impl Facts {
    /// Reads all parts. It fails never, and takes at most a few seconds.
    pub(crate) async fn read(site: &impl Site) -> Self {
        let (link, limit) = (site.link(), Limit::new());
        let mut facts = Self::empty(site);
        let prompt = site.prompt();
        let (pinged, missing) = tokio::join!(limit.of(ping(prompt)), prompt.missing(LIMIT));
        // Behind sentinels, the primary is known from here on.
        let target = link.target();
        let mut redis = RedisFacts {
            target: target.to_string(),
            tls: target.is_tls(),
            wait_replicas: target.wait_replicas(),
            ..RedisFacts::default()
        };
        match pinged {
            Ok((took, writes)) => {
                (redis.ping_ms, redis.refuses_writes) = (Some(millis(took)), !writes);
            }
            // Every other part would wait in vain.
            Err(error) if missing.is_empty() => {
                facts.redis = RedisFacts { error: Some(error), ..redis };
                return facts;
            }
            Err(_) => {
                redis.error = Some(missing.join(", "));
                (redis.others_answer, facts.others_seen) = (true, true);
            }
        }
        let is_whole = redis.error.is_none();
        let (info, processes, invalid, streams) = tokio::join!(
            limit.of(state(link, is_whole)),
            limit.of(presence::processes(link)),
            limit.of(invalid_entries(link)),
            join_all(site.streams().iter().map(|name| limit.of(StreamView::read(link, name)))),
        );
        // It stopped to answer behind the ping. With a full disk it answers, but it refuses the
        // scripts of new connections.
        if is_whole && let (Err(error), Err(_), false) = (&info, &processes, redis.refuses_writes) {
            facts.redis = RedisFacts { error: Some(error.clone()), ..redis };
            return facts;
        }
        redis.info = facts.part("the state of Redis", info).flatten();
        facts.redis = redis;
        facts.invalid = facts.part("unreadable bus entries", invalid).unwrap_or_default();
        for (name, view) in site.streams().iter().zip(streams) {
            let view = facts.part(&format!("bus stream {name}"), view);
            facts.streams.extend(view);
        }
        let processes = match facts.part(PROCESSES, processes) {
            None if is_whole => return facts,
            // In a cluster, one primary has them.
            processes => processes.unwrap_or_default(),
        };
        let names = facts.part("the list of pipelines", limit.of(site.pipelines()).await);
        for names in names.unwrap_or_default().chunks(CONCURRENT) {
            let mut looks = Vec::with_capacity(names.len());
            for name in names {
                looks.push(limit.of(look_at(site, name.clone(), &processes)));
            }
            for (name, found) in names.iter().zip(join_all(looks).await) {
                let found = facts.part(&format!("pipeline {name}"), found);
                facts.pipelines.extend(found);
            }
        }
        facts.buses = site.buses().iter().map(|bus| BusView::of(bus, &processes)).collect();
        facts.processes = processes;
        facts
    }

    /// The facts of a Redis that cannot even be connected to.
    pub(crate) fn unavailable(target: String, error: String, now: Duration) -> Self {
        Self {
            redis: RedisFacts { target, error: Some(error), ..RedisFacts::default() },
            others_seen: false,
            streams: Vec::new(),
            buses: Vec::new(),
            invalid: 0,
            invalid_stream: String::new(),
            processes: Vec::new(),
            pipelines: Vec::new(),
            mongodb: None,
            not_seen: Vec::new(),
            now_ms: millis(now),
        }
    }

    /// Why nothing but Redis was looked at; `None`: all was.
    pub(crate) fn only_error(&self) -> Option<&str> {
        self.redis.error.as_deref().filter(|_| !self.others_seen)
    }

    /// Whether it is known which processes run.
    pub(super) fn knows_processes(&self) -> bool {
        !self.not_seen.iter().any(|part| part.part == PROCESSES)
    }

    fn empty(site: &impl Site) -> Self {
        let prefix = site.link().prefix();
        let mongodb = site.mongodb();
        let invalid_stream = prefix.invalid_stream();
        let facts = Self::unavailable(String::new(), String::new(), site.now());
        Self { redis: RedisFacts::default(), mongodb, invalid_stream, ..facts }
    }

    /// Notes a part that could not be looked at.
    fn part<T>(&mut self, part: &str, read: Result<T, String>) -> Option<T> {
        let note = |reason| self.not_seen.push(NotSeen { part: part.to_owned(), reason });
        read.map_err(note).ok()
    }
}

/// Looks at one pipeline.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn look_at(
    site: &impl Site,
    name: PipelineName,
    processes: &[Process],
) -> Result<PipelineFacts, RedisError> {
    let queue = site.queue(&name);
    let view = queue.view(site.now()).await?;
    let failing = if view.depth > 0 { queue.failing().await? } else { None };
    let throttled = if view.parked > 0 { queue.throttled().await? } else { None };
    let letters = if view.dead > 0 {
        queue.glimpse_dead_letters(None, &|_| true, None, LETTERS).await?.letters
    } else {
        Vec::new()
    };
    let state = match site.configured(&name) {
        PipelineState::Enabled if view.stopped => PipelineState::Paused,
        state => state,
    };
    let (pace, takes_of_bus) = (presence::pace(processes, &name), site.takes_of_bus(&name));
    let linger = site.linger(&name);
    Ok(PipelineFacts { name, state, view, failing, throttled, letters, pace, takes_of_bus, linger })
}

/// The time that is left for the parts.
#[derive(Clone, Copy)]
struct Limit {
    until: Instant,
}

impl Limit {
    fn new() -> Self {
        Self { until: Instant::now() + ALL }
    }

    /// Waits for a part for at most [`LIMIT`], and not beyond [`ALL`].
    async fn of<T>(self, part: impl Future<Output = Result<T, RedisError>>) -> Result<T, String> {
        match timeout_at(self.until.min(Instant::now() + LIMIT), part).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) if Instant::now() >= self.until => {
                Err(format!("Redis is slow: the {} s for all parts are used up", ALL.as_secs()))
            }
            Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
        }
    }
}

/// The best of a few round trips, and whether writes are accepted.
async fn ping(link: &Link) -> Result<(Duration, bool), RedisError> {
    let (began, mut best, mut writes) = (Instant::now(), Duration::MAX, true);
    for nth in 0..PINGS {
        if nth > 1 && began.elapsed() > PINGING {
            break;
        }
        let sent = Instant::now();
        writes = link.ping().await?;
        best = best.min(sent.elapsed());
    }
    Ok((best, writes))
}

/// The state of Redis; in a cluster, of the primary with the highest share of its memory in use.
pub(crate) async fn fullest(link: &Link) -> Result<ServerInfo, RedisError> {
    Ok(state(link, true).await?.unwrap_or_default())
}

/// The same; unless `is_whole`, only of the primaries that answer. `None`: none does.
async fn state(link: &Link, is_whole: bool) -> Result<Option<ServerInfo>, RedisError> {
    let info = redis::cmd("INFO");
    let answers = if is_whole {
        link.ask_every("INFO", &info).await?
    } else {
        link.ask_serving(info, LIMIT).await
    };
    let infos = answers.into_iter().map(|value| {
        ServerInfo::parse(&redis::from_redis_value::<String>(value).unwrap_or_default())
    });
    Ok(ServerInfo::worst(infos))
}

async fn invalid_entries(link: &Link) -> Result<u64, RedisError> {
    let length = redis::Cmd::xlen(link.prefix().invalid_stream());
    let length = link.command("XLEN", length).await?;
    link.read("XLEN", length)
}
