//! What is wrong: the findings that `fairlane status`, the web page, `GET /v1/problems` and the
//! metric `fairlane_problems` share.
//!
//! [`facts`] reads a bounded amount from Redis, each part with a time limit. [`find`] decides
//! without any I/O. So a finding is worded, ranked and linked to the runbook in one place only.

mod facts;
mod find;
mod installation;
#[cfg(test)]
mod tests;
pub(crate) mod text;

use serde::Serialize;
use utoipa::ToSchema;

pub(crate) use self::facts::{Facts, PipelineFacts, PipelineState, Site, fullest, look_at};
pub(crate) use self::find::{Viewer, find};
pub(crate) use self::installation::MEMORY_PERCENT;
use crate::id::{BotId, PipelineName};

/// How urgent a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Events are not accepted or not handled. A person must act immediately.
    Critical,
    /// A part does not work, or soon will not. A person must act today.
    Warning,
    /// Something to know or to clean up.
    Notice,
}

impl Severity {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

macro_rules! codes {
    ($($name:ident $code:literal $severity:ident $section:literal;)+) => {
        /// The kind of a finding.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum Code {
            $(#[doc = concat!("See the section ", $section, " of the runbook.")] $name,)+
        }

        impl Code {
            /// All of them, the most urgent ones first.
            pub(crate) const ALL: &[Self] = &[$(Self::$name),+];

            pub(crate) fn as_str(self) -> &'static str {
                match self { $(Self::$name => $code,)+ }
            }

            pub(crate) fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity,)+ }
            }

            /// The section of the runbook.
            pub(crate) fn runbook(self) -> &'static str {
                match self { $(Self::$name => concat!("docs/runbook.md#", $section),)+ }
            }
        }
    };
}

codes! {
    RedisUnavailable "redis-unavailable" Critical "redis-unavailable";
    RedisFull "redis-full" Critical "redis-full";
    RedisReadOnly "redis-read-only" Critical "unsafe-redis-settings";
    RedisDiskFull "redis-disk-full" Critical "unsafe-redis-settings";
    ReplicasMissing "replicas-missing" Critical "missing-replicas";
    NoProcess "no-process" Critical "process-gone";
    NotAStream "not-a-stream" Critical "no-process-reads-the-bus";
    NoReader "no-reader" Critical "no-process-reads-the-bus";
    BusUnavailable "bus-unavailable" Critical "bus-unavailable";
    MongodbUnavailable "mongodb-unavailable" Critical "mongodb-unavailable";
    PipelineFails "pipeline-fails" Critical "broken-target";
    NoWorkers "no-workers" Critical "stuck-pipeline";
    RedisSlow "redis-slow" Warning "slow-redis";
    RedisMemory "redis-memory" Warning "redis-full";
    RedisEvicts "redis-evicts" Warning "unsafe-redis-settings";
    RedisForgets "redis-forgets" Warning "unsafe-redis-settings";
    ReplicaLags "replica-lags" Warning "missing-replicas";
    PipelinesDiffer "pipelines-differ" Warning "different-pipelines";
    BusLag "bus-lag" Warning "bus-lag";
    BotsFail "bots-fail" Warning "stuck-bot";
    HostUnavailable "host-unavailable" Warning "open-breaker";
    PipelinePaused "pipeline-paused" Warning "paused-pipeline";
    PipelineLate "pipeline-late" Warning "late-pipeline";
    ViewsLate "views-late" Warning "views-not-written";
    BotsThrottled "bots-throttled" Warning "throttled-bots";
    DeadLetters "dead-letters" Warning "dead-letters";
    InvalidEntries "invalid-entries" Warning "invalid-entries";
    NotSeen "not-seen" Warning "slow-redis";
    BotsPaused "bots-paused" Notice "stuck-bot";
    NotConfigured "not-configured" Notice "stuck-pipeline";
}

/// Something that is wrong, and what helps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Finding)]
pub(crate) struct Finding {
    /// Its kind.
    pub(crate) code: Code,
    /// How urgent it is.
    pub(crate) severity: Severity,
    /// Since when, ms since 1970; absent: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since_ms: Option<u64>,
    /// The pipeline that it concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pipeline: Option<PipelineName>,
    /// Bots that it concerns: at most three.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) bots: Vec<BotId>,
    /// Processes that it concerns, as machine and process id: at most three.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) processes: Vec<String>,
    /// What is wrong, and why, in one sentence.
    pub(crate) problem: String,
    /// What helps: a command, or what to do.
    pub(crate) remedy: String,
    /// The section of the runbook.
    pub(crate) runbook: &'static str,
}

impl Finding {
    fn new(code: Code, problem: String, remedy: String) -> Self {
        Self {
            code,
            severity: code.severity(),
            since_ms: None,
            pipeline: None,
            bots: Vec::new(),
            processes: Vec::new(),
            problem,
            remedy,
            runbook: code.runbook(),
        }
    }

    fn since(mut self, ms: impl Into<Option<u64>>) -> Self {
        self.since_ms = ms.into();
        self
    }

    fn in_pipeline(mut self, name: &PipelineName) -> Self {
        self.pipeline = Some(name.clone());
        self
    }

    fn of_bots<'a>(mut self, bots: impl IntoIterator<Item = &'a BotId>) -> Self {
        self.bots = bots.into_iter().take(find::NAMED).cloned().collect();
        self
    }

    fn of_processes(mut self, processes: Vec<String>) -> Self {
        self.processes = processes;
        self.processes.truncate(find::NAMED);
        self
    }
}
