//! The shared resources, and the measurement of the quiet bots for each.

use clap::ValueEnum;
use fairlane::config::Config;
use serde::Serialize;

/// A resource that all bots share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Resource {
    /// The workers, beside a backlog of 100,000 events.
    Queue,
    /// Admission control, beside a burst of published events over HTTP.
    Publish,
    /// The bus, beside bursts of one producer.
    Bus,
    /// Batches of the fan-out and the committer, beside events of 1 MB.
    LargeEvents,
    /// Name look-ups, beside names that do not resolve.
    Dns,
    /// Places for outbound calls, beside hosts that never answer.
    Tarpits,
    /// The circuit breaker of a host, beside a failing path of the same host.
    SharedHost,
    /// Memory of the process, beside listings of large events.
    Listings,
    /// Live pages, beside a client that holds as many as it can.
    LivePages,
    /// Connections and bodies, beside slow clients without a token.
    Connections,
    /// Callers of admission control, beside invented tokens.
    Tokens,
    /// Time for CEL and regular expressions, beside heavy rules.
    Rules,
    /// Dead letters, beside a flood of them.
    DeadLetters,
    /// Memory of Redis, beside notifications a year ahead.
    RedisMemory,
    /// Leases of receivers, beside leases that are never completed.
    Leases,
    /// Exports of views, beside a client that exports all the time.
    Exports,
    /// Log lines, beside a flood of bad input.
    LogFlood,
}

/// Work of the quiet bots, sent by the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quiet {
    /// Events on the bus, until the receiver has them.
    Events,
    /// The same, published over HTTP.
    Published,
    /// The same, handled by a rule.
    Ruled,
    /// Notifications, from the due time until the receiver has them.
    Notifications,
    /// Requests for the state of a bot.
    Requests,
    /// Requests for totals.
    Totals,
    /// Live pages, until the head of the answer.
    LivePages,
}

impl Quiet {
    /// The times in the report.
    pub(super) fn measure(self) -> &'static str {
        match self {
            Self::Events | Self::Published | Self::Ruled => "publish to handled",
            Self::Notifications => "lateness",
            Self::Requests | Self::Totals | Self::LivePages => "request",
        }
    }
}

/// The texts of a resource: its name, and its two phases.
macro_rules! texts {
    ($name:literal) => {
        [$name, concat!($name, ", alone"), concat!($name, ", beside"), concat!($name, ", starting")]
    };
}

impl Resource {
    /// Its name, and the texts of the phases: alone, beside, starting.
    fn texts(self) -> [&'static str; 4] {
        match self {
            Self::Queue => texts!("queue"),
            Self::Publish => texts!("publish"),
            Self::Bus => texts!("bus"),
            Self::LargeEvents => texts!("large-events"),
            Self::Dns => texts!("dns"),
            Self::Tarpits => texts!("tarpits"),
            Self::SharedHost => texts!("shared-host"),
            Self::Listings => texts!("listings"),
            Self::LivePages => texts!("live-pages"),
            Self::Connections => texts!("connections"),
            Self::Tokens => texts!("tokens"),
            Self::Rules => texts!("rules"),
            Self::DeadLetters => texts!("dead-letters"),
            Self::RedisMemory => texts!("redis-memory"),
            Self::Leases => texts!("leases"),
            Self::Exports => texts!("exports"),
            Self::LogFlood => texts!("log-flood"),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.texts()[0]
    }

    pub(super) fn alone(self) -> &'static str {
        self.texts()[1]
    }

    pub(super) fn beside(self) -> &'static str {
        self.texts()[2]
    }

    pub(super) fn starting(self) -> &'static str {
        self.texts()[3]
    }

    /// The work of the quiet bots. The first one names the times in the report.
    pub(super) fn quiet(self) -> &'static [Quiet] {
        match self {
            Self::Queue | Self::Bus | Self::DeadLetters | Self::Leases | Self::LogFlood => {
                &[Quiet::Events]
            }
            Self::Publish | Self::LargeEvents | Self::Connections => &[Quiet::Published],
            Self::Dns | Self::Tarpits | Self::SharedHost => &[Quiet::Notifications],
            Self::Listings | Self::Tokens => &[Quiet::Requests],
            Self::LivePages => &[Quiet::LivePages],
            Self::Rules => &[Quiet::Ruled],
            Self::RedisMemory => &[Quiet::Published, Quiet::Notifications],
            Self::Exports => &[Quiet::Totals],
        }
    }

    pub(super) fn needs_mongo(self) -> bool {
        matches!(self, Self::Rules | Self::Exports)
    }

    /// Why it cannot be measured with this build.
    pub(super) fn missing(self) -> Option<&'static str> {
        const SERVERS: &str = "callbacks.name_servers = [\"127.0.0.1:53\"]";
        let is_missing = self == Self::Dns && Config::from_toml(SERVERS, "the bench").is_err();
        is_missing.then_some("skipped: this build cannot resolve names by a server of the bench")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_resource_is_documented_by_its_name() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/benchmarks.md");
        let page = std::fs::read_to_string(page).expect("the page");
        let (_, section) = page.split_once("\n## Isolation\n").expect("the section");
        let section = section.split("\n## ").next().unwrap_or_default();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let names = Resource::value_variants().iter().map(|resource| resource.name());
        // One table explains the resources, and one has their figures.
        let twice = names.clone().chain(names);
        assert_eq!(rows.collect::<Vec<_>>(), twice.collect::<Vec<_>>());
        for resource in Resource::value_variants() {
            let value = resource.to_possible_value().expect("none is hidden");
            assert_eq!(value.get_name(), resource.name());
        }
    }
}
