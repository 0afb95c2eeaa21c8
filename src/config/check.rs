//! Checks that the types cannot express: bounds, and contradictions between settings.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use humantime::format_duration;
use reqwest::Url;

use super::built_in::{AUTOMATION, AUTOMATIONS, COUNTER, COUNTERS, NOTIFICATIONS, NOTIFY};
use super::certificates::{self, Unusable};
use super::error::{ConfigError, Origin};
use super::layers::Layers;
use super::{Config, OnOverflow, PipelineConfig, RedisUrl, Scope, TokenConfig};
use crate::admission::Class;
use crate::id::PipelineName;
use crate::outbound::headers;

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const WEEK: Duration = Duration::from_secs(7 * 86_400);
/// Maximum duration. A longer time is a typing error, and would overflow sums of times.
const TEN_YEARS: Duration = Duration::from_secs(3_650 * 86_400);

const STREAMS_MAX: usize = 64;
const EVENTS_MAX: usize = 1_000;
const NETS_MAX: usize = 1_000;
/// Maximum number of secrets: each one makes every call longer.
const SECRETS_MAX: usize = 8;
const HOSTS_MAX: usize = 100;
const THRESHOLDS_MAX: usize = 100;
/// Maximum number of caps of one name: each one is checked before every send.
const CAPS_MAX: usize = 8;
const TOKENS_MAX: usize = 1_000;
const TOKEN_BOTS_MAX: usize = 1_000;
const HEADER_SETS_MAX: usize = 100;
const NAME_MAX_BYTES: usize = 1_024;
const DATABASE_MAX_BYTES: usize = 63;
/// Characters that MongoDB forbids in a database name, on any of its platforms.
const DATABASE_FORBIDDEN: &[char] = &['/', '\\', '.', ' ', '"', '$', '*', '<', '>', ':', '|', '?'];
/// MongoDB's own databases.
const DATABASE_TAKEN: [&str; 3] = ["admin", "config", "local"];

/// The upper bounds of numbers.
pub(super) mod limits {
    pub(in super::super) const BATCH: u64 = 5_000;
    pub(in super::super) const WORKERS: u64 = 1_024;
    pub(in super::super) const ATTEMPTS: u64 = 1_000_000;
    pub(in super::super) const QUEUE: u64 = 1_000_000_000;
    pub(in super::super) const DEAD: u64 = 100_000_000;
    pub(in super::super) const PER_HOST: u64 = 1_024;
    /// Lower and upper bound.
    pub(in super::super) const CACHED_ADS: (u64, u64) = (1_000, 10_000_000);
    pub(in super::super) const BACKLOG: (u64, u64) = (1, 65_535);
    pub(in super::super) const CONNECTIONS: (u64, u64) = (16, 100_000);
    pub(in super::super) const IN_FLIGHT: (u64, u64) = (4, 100_000);
    pub(in super::super) const QUOTA: (u64, u64) = (0, 1_000_000);
    pub(in super::super) const PUBLIC_RATE: (u64, u64) = (1, 1_000_000);
    pub(in super::super) const HOST_RATE: (u64, u64) = (0, 1_000_000);
}

/// A violated rule. The error names the first key; any of the keys may be the cause.
#[derive(Debug)]
pub(super) struct Fault {
    keys: Vec<String>,
    problem: String,
}

impl Fault {
    fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { keys: vec![key.into()], problem: problem.into() }
    }

    fn or(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// The error, located where one of the keys was set.
    pub(super) fn into_error(self, layers: &Layers) -> ConfigError {
        let at = layers.origin(&self.keys);
        self.error_at(at)
    }

    fn error_at(mut self, at: Origin) -> ConfigError {
        ConfigError::Invalid { at, key: self.keys.swap_remove(0), problem: self.problem }
    }
}

impl Config {
    /// Checks the bounds that the types leave open. Loading already did. Call it again for a
    /// configuration that was changed in code.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the first setting that is out of bounds or contradicts another
    /// one.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.find_fault().map_or(Ok(()), |fault| Err(fault.error_at(Origin::Code)))
    }

    pub(super) fn find_fault(&self) -> Option<Fault> {
        self.check_top().err().or_else(|| {
            self.pipelines.iter().find_map(|(name, pipeline)| {
                let prefix = format!("pipelines.{name}.");
                check_pipeline(name, pipeline, &prefix, self.shutdown_grace)
                    .and_then(|()| check_automating(name, pipeline, &prefix))
                    .and_then(|()| check_counting(name, pipeline, &prefix))
                    .and_then(|()| check_notifying(name, pipeline, &prefix))
                    .err()
            })
        })
    }

    fn check_top(&self) -> Result<(), Fault> {
        if self.data_dir.as_os_str().is_empty() {
            return Err(Fault::new("data_dir", "is empty; name a directory"));
        }
        within("shutdown_grace", self.shutdown_grace, MILLISECOND..=HOUR)?;
        within("shutdown_delay", self.shutdown_delay, Duration::ZERO..=HOUR)?;
        self.check_certificates()?;
        database("mongodb.database", &self.mongodb.database)?;
        within("bus.retention", self.bus.retention, Duration::ZERO..=TEN_YEARS)?;
        names("bus.streams", &self.bus.streams, STREAMS_MAX, "stream")?;
        if self.bus.streams.is_empty() {
            return Err(Fault::new("bus.streams", "is empty; name at least one stream"));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.bus.streams.iter().find(|stream| !seen.insert(*stream)) {
            return Err(Fault::new(
                "bus.streams",
                format!("names {twice:?} twice; name each stream once"),
            ));
        }
        // Reading that stream would copy unreadable events back to it for ever.
        let invalid = self.redis.prefix.invalid_stream();
        if self.bus.streams.contains(&invalid) {
            let problem = format!("names {invalid:?}, where unreadable events are put; remove it");
            return Err(Fault::new("bus.streams", problem));
        }
        let callbacks = &self.callbacks;
        at_most("callbacks.allow_nets", callbacks.allow_nets.len(), NETS_MAX)?;
        at_most("callbacks.secrets", callbacks.secrets.len(), SECRETS_MAX)?;
        let per_host = callbacks.max_per_host.get() as u64;
        number("callbacks.max_per_host", per_host, (1, limits::PER_HOST))?;
        self.check_notifications()?;
        number("counters.cached_ads", self.counters.cached_ads, limits::CACHED_ADS)?;
        let read_timeout = self.counters.read_timeout;
        within("counters.read_timeout", read_timeout, 10 * MILLISECOND..=10 * SECOND)?;
        // Port 0 means any free port, so two of them do not collide.
        if self.http.listen == self.metrics.listen && self.http.listen.port() != 0 {
            let problem =
                format!("is {}, as is http.listen; choose another port", self.metrics.listen);
            return Err(Fault::new("metrics.listen", problem).or("http.listen"));
        }
        names("http.hosts", &self.http.hosts, HOSTS_MAX, "name of a host")?;
        names("http.cors_origins", &self.http.cors_origins, HOSTS_MAX, "origin")?;
        if let Some(wrong) = self.http.cors_origins.iter().find(|text| !is_origin(text)) {
            let remedy = "write scheme, host and port exactly as browsers send them, such as \"https://shop.example\", without a path";
            return Err(Fault::new("http.cors_origins", format!("holds {wrong:?}; {remedy}")));
        }
        at_most("http.trusted_proxies", self.http.trusted_proxies.len(), NETS_MAX)?;
        if self.http.proxy_protocol && self.http.trusted_proxies.is_empty() {
            let problem = "is true, but http.trusted_proxies is empty, so no connection may carry the header; name the networks of the proxies";
            return Err(Fault::new("http.proxy_protocol", problem).or("http.trusted_proxies"));
        }
        self.check_admission()?;
        self.check_headers()?;
        self.check_auth()
    }

    fn check_headers(&self) -> Result<(), Fault> {
        let sets = &self.callbacks.headers;
        at_most("callbacks.headers", sets.len(), HEADER_SETS_MAX)?;
        let mut seen = BTreeSet::new();
        for (place, set) in sets.iter().enumerate() {
            let key = |name: &str| format!("callbacks.headers[{place}].{name}");
            names(&key("name"), std::slice::from_ref(&set.name), 1, "name")?;
            let max = headers::NAME_MAX_BYTES;
            if set.name.len() > max {
                let problem = format!("has {} bytes; at most {max} are allowed", set.name.len());
                return Err(Fault::new(key("name"), problem));
            }
            if !seen.insert(&set.name) {
                let problem = format!("is {:?} once more; give each its own", set.name);
                return Err(Fault::new(key("name"), problem));
            }
            if set.headers_file.as_os_str().is_empty() {
                return Err(Fault::new(key("headers_file"), "is not set; name a file"));
            }
            names(&key("bots"), &set.bots, TOKEN_BOTS_MAX, "glob")?;
            names(&key("hosts"), &set.hosts, TOKEN_BOTS_MAX, "host")?;
            if set.bots.is_empty() {
                let problem = "is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]";
                return Err(Fault::new(key("bots"), problem));
            }
            if set.hosts.is_empty() {
                let problem = "is empty; name the hosts that get these headers, such as [\"crm.example.com\"]";
                return Err(Fault::new(key("hosts"), problem));
            }
        }
        Ok(())
    }

    fn check_auth(&self) -> Result<(), Fault> {
        let tokens = &self.auth.tokens;
        if tokens.len() > TOKENS_MAX {
            let problem = format!("has {} entries; at most {TOKENS_MAX} are allowed", tokens.len());
            return Err(Fault::new("auth.tokens", problem));
        }
        let mut seen = BTreeSet::new();
        for (place, token) in tokens.iter().enumerate() {
            let key = |name: &str| format!("auth.tokens[{place}].{name}");
            names(&key("name"), std::slice::from_ref(&token.name), 1, "name")?;
            if !seen.insert(&token.name) {
                let problem = format!("is {:?} once more; give each its own", token.name);
                return Err(Fault::new(key("name"), problem));
            }
            if token.token_file.as_os_str().is_empty() {
                return Err(Fault::new(key("token_file"), "is not set; name a file"));
            }
            if token.scopes.is_empty() {
                let remedy = "name at least one of \"publish\", \"read\" and \"operate\", or \"count\" alone";
                return Err(Fault::new(key("scopes"), format!("is empty; {remedy}")));
            }
            names(&key("bots"), &token.bots, TOKEN_BOTS_MAX, "glob")?;
            if token.bots.is_empty() {
                let problem = "is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]";
                return Err(Fault::new(key("bots"), problem));
            }
        }
        for (place, token) in tokens.iter().enumerate() {
            self.check_public(token, |name| format!("auth.tokens[{place}].{name}"))?;
        }
        if self.auth.allow_anonymous && !tokens.is_empty() {
            let problem = "is true beside auth.tokens, which are asked for all the same; set it to false or remove the tokens";
            return Err(Fault::new("auth.allow_anonymous", problem).or("auth.tokens"));
        }
        let open = !self.http.listen.ip().to_canonical().is_loopback();
        if open && tokens.is_empty() && !self.auth.allow_anonymous {
            let problem = format!(
                "is {}, beyond the loopback, and there are no auth.tokens: every client could do everything; add tokens, listen on 127.0.0.1, or set auth.allow_anonymous = true",
                self.http.listen
            );
            return Err(Fault::new("http.listen", problem).or("auth.allow_anonymous"));
        }
        Ok(())
    }
}

impl Config {
    /// A token with the scope `count` is public, so it may have no other permission.
    fn check_public(&self, token: &TokenConfig, key: impl Fn(&str) -> String) -> Result<(), Fault> {
        let origins = &self.http.cors_origins;
        names(&key("origins"), &token.origins, HOSTS_MAX, "origin")?;
        if !token.scopes.contains(&Scope::Count) {
            if token.origins.is_empty() {
                return Ok(());
            }
            let problem = "is set, but only a token with the scope \"count\" is for certain origins; remove it";
            return Err(Fault::new(key("origins"), problem).or(key("scopes")));
        }
        if token.scopes.len() > 1 {
            let problem = "holds \"count\" beside other scopes, but such a token is public; make another token for the others";
            return Err(Fault::new(key("scopes"), problem));
        }
        if token.bots.iter().any(|bot| bot == "*") {
            let problem = "holds \"*\", but a token with the scope \"count\" is public; name the bots whose views it may count";
            return Err(Fault::new(key("bots"), problem).or(key("scopes")));
        }
        if origins.is_empty() {
            let problem = "holds \"count\", but http.cors_origins is empty; name the sites whose pages count there";
            return Err(Fault::new(key("scopes"), problem).or("http.cors_origins"));
        }
        if let Some(other) = token.origins.iter().find(|origin| !origins.contains(origin)) {
            let problem =
                format!("holds {other:?}, which http.cors_origins does not; add it there");
            return Err(Fault::new(key("origins"), problem));
        }
        Ok(())
    }
}

/// Whether a text is an origin in the form that browsers send.
fn is_origin(text: &str) -> bool {
    let Ok(url) = Url::parse(text) else { return false };
    matches!(url.scheme(), "http" | "https") && url.origin().ascii_serialization() == text
}

impl Config {
    fn check_notifications(&self) -> Result<(), Fault> {
        const KEY: &str = "notifications.type_thresholds";
        let notifications = &self.notifications;
        let times = Duration::ZERO..=TEN_YEARS;
        let threshold = notifications.user_poll_threshold;
        within("notifications.user_poll_threshold", threshold, times.clone())?;
        within("notifications.online_threshold", notifications.online_threshold, times.clone())?;
        number("notifications.host_rate", notifications.host_rate, limits::HOST_RATE)?;
        at_most("notifications.caps", notifications.caps.len(), CAPS_MAX)?;
        for (key, named) in [
            ("notifications.bot_caps", &notifications.bot_caps),
            ("notifications.type_caps", &notifications.type_caps),
        ] {
            at_most(key, named.len(), THRESHOLDS_MAX)?;
            for (name, caps) in named {
                if caps.len() > CAPS_MAX {
                    let problem =
                        format!("has {} for {name:?}; at most {CAPS_MAX} are allowed", caps.len());
                    return Err(Fault::new(key, problem));
                }
            }
        }
        at_most(KEY, notifications.type_thresholds.len(), THRESHOLDS_MAX)?;
        let mut seen = BTreeSet::new();
        for (kind, threshold) in &notifications.type_thresholds {
            within(KEY, *threshold, times.clone())?;
            if !seen.insert(kind) {
                return Err(Fault::new(KEY, format!("names {kind:?} twice; name each type once")));
            }
        }
        Ok(())
    }

    fn check_admission(&self) -> Result<(), Fault> {
        let (http, admission) = (&self.http, &self.admission);
        number("http.backlog", http.backlog.into(), limits::BACKLOG)?;
        number("http.max_connections", http.max_connections as u64, limits::CONNECTIONS)?;
        let per_address = http.max_connections_per_address;
        if !(1..=http.max_connections).contains(&per_address) {
            let problem = format!(
                "is {per_address}; write 1 to {}, which is http.max_connections",
                http.max_connections
            );
            let key = "http.max_connections_per_address";
            return Err(Fault::new(key, problem).or("http.max_connections"));
        }
        let limit_max = admission.settings.limit_max as u64;
        number("admission.limit_max", limit_max, limits::IN_FLIGHT)?;
        for (class, deadline) in Class::ALL.into_iter().zip(admission.deadlines) {
            let key = format!("admission.{}_deadline", class.as_str());
            within(&key, deadline.unwrap_or_default(), Duration::ZERO..=HOUR)?;
        }
        for (whose, quota) in [("bot", admission.bot), ("token", admission.token)] {
            let key = |what: &str| format!("admission.{whose}_{what}");
            number(&key("rate"), quota.rate.into(), limits::QUOTA)?;
            number(&key("in_flight"), quota.in_flight.into(), limits::QUOTA)?;
        }
        Ok(())
    }

    /// Checks that the certificate files can be read, and that TLS is in use.
    fn check_certificates(&self) -> Result<(), Fault> {
        let redis = &self.redis;
        let named = [
            ("redis.ca_file", &redis.ca_file),
            ("redis.cert_file", &redis.cert_file),
            ("redis.key_file", &redis.key_file),
        ];
        let named = named.into_iter().find(|(_, path)| path.is_some());
        if let Some((key, _)) = named
            && !redis.url.as_ref().is_some_and(RedisUrl::is_tls)
        {
            let problem = "is set, but redis.url does not ask for TLS; write rediss://… or \
                           rediss+cluster://… there, or leave it out";
            return Err(Fault::new(key, problem).or("redis.url"));
        }
        match certificates::read(redis) {
            Ok(_) => Ok(()),
            // The one of the pair that is not set has no location.
            Err(Unusable { key, problem }) => {
                Err(Fault::new(key, problem).or("redis.cert_file").or("redis.key_file"))
            }
        }
    }
}

fn check_pipeline(
    name: &PipelineName,
    p: &PipelineConfig,
    prefix: &str,
    grace: Duration,
) -> Result<(), Fault> {
    let key = |name: &str| format!("{prefix}{name}");
    if p.handler.is_empty() {
        return Err(Fault::new(key("handler"), "is not set; name a handler, such as \"log\""));
    }
    names(&key("events"), &p.events, EVENTS_MAX, "type glob")?;
    if p.enabled && p.events.is_empty() && !name.is(NOTIFICATIONS) {
        let remedy =
            "name the types of events it takes, such as [\"tag.*\"], or set enabled = false";
        return Err(Fault::new(key("events"), format!("is empty; {remedy}")));
    }
    if p.url.is_some() && p.handler != "push" {
        let problem = format!(
            "is set, but the handler is {:?}; remove it, or set handler = \"push\"",
            p.handler
        );
        return Err(Fault::new(key("url"), problem).or(key("handler")));
    }
    number(&key("batch"), p.batch.get() as u64, (1, limits::BATCH))?;
    number(&key("max_attempts"), p.max_attempts.get().into(), (1, limits::ATTEMPTS))?;
    number(&key("workers.max"), p.workers.max.get() as u64, (1, limits::WORKERS))?;
    number(&key("max_queue"), p.max_queue.map_or(0, u64::from), (0, limits::QUEUE))?;
    number(&key("dead.max"), p.dead.max.get(), (1, limits::DEAD))?;
    if p.workers.min > p.workers.max {
        let (min, max) = (p.workers.min, p.workers.max);
        let problem = format!("is {min}, above workers.max ({max}); lower it or raise workers.max");
        return Err(Fault::new(key("workers.min"), problem).or(key("workers.max")));
    }
    check_times(p, &key, grace)?;
    if !(0.0..=1.0).contains(&p.backoff.jitter) {
        let problem = format!("is {}; write a fraction from 0.0 to 1.0", p.backoff.jitter);
        return Err(Fault::new(key("backoff.jitter"), problem));
    }
    Ok(())
}

/// Checks that a built-in pipeline and its handler are used together. Returns whether this is that
/// pipeline. `why` holds two consequences: of its handler elsewhere, and of another handler here.
fn reserved(
    (name, p, prefix): (&PipelineName, &PipelineConfig, &str),
    (built_in, handler): (&str, &str),
    [elsewhere, otherwise]: [&str; 2],
) -> Result<bool, Fault> {
    let refused = |problem| Err(Fault::new(format!("{prefix}handler"), problem));
    match (name.as_str() == built_in, p.handler == handler) {
        (false, true) => refused(format!(
            "is {handler:?}, which only the built-in pipeline {built_in:?} may have: {elsewhere}; tune [pipelines.{built_in}], or name another handler"
        )),
        (true, false) => refused(format!(
            "is {:?}: {otherwise}; remove it, or set enabled = false, and give the other handler a pipeline of another name",
            p.handler
        )),
        (is_built_in, _) => Ok(is_built_in),
    }
}

/// Checks that every accepted view is counted: no setting may drop a view.
fn check_counting(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let refused = |key: &str, problem: String| Err(Fault::new(format!("{prefix}{key}"), problem));
    let why = [
        "the views that arrive are put there, and those elsewhere would be lost",
        "the views would be lost, which \"counter\" alone counts",
    ];
    if !reserved((name, p, prefix), (COUNTERS, COUNTER), why)? {
        return Ok(());
    }
    if let Some(most) = p.max_queue {
        return refused(
            "max_queue",
            format!("is {most}: a view beyond it would be lost; remove it"),
        );
    }
    if p.on_overflow != OnOverflow::Dead {
        let problem = "is \"drop_new\": a view that is dropped would be lost; remove it";
        return refused("on_overflow", problem.to_owned());
    }
    if let Some(age) = p.max_age {
        let age = format_duration(age);
        let problem = format!("is {age}: a view that waited longer would be lost; remove it");
        return refused("max_age", problem);
    }
    let attempts = u64::from(p.max_attempts.get());
    if attempts != limits::ATTEMPTS {
        let problem = format!("is {attempts}: a view that is given up would be lost; remove it");
        return refused("max_attempts", problem);
    }
    Ok(())
}

/// Checks that only one pipeline evaluates rules.
fn check_automating(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let why = [
        "the fan-out copies there what bots have rules for",
        "no rule would be evaluated, which \"automation\" alone does",
    ];
    reserved((name, p, prefix), (AUTOMATIONS, AUTOMATION), why).map(drop)
}

/// How long a notification is kept after its end: `KEPT_MS` of `lua/notifications.lua`.
const NOTIFICATION_KEPT: Duration = Duration::from_secs(7 * 86_400);

/// Checks that every accepted notification is sent or ends in one of the counted ways: no setting
/// may drop its event.
fn check_notifying(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let refused = |key: &str, problem: String| Err(Fault::new(format!("{prefix}{key}"), problem));
    let why =
        ["what is due is put there", "what is due would not be sent, which \"notify\" alone does"];
    if !reserved((name, p, prefix), (NOTIFICATIONS, NOTIFY), why)? {
        return Ok(());
    }
    if !p.events.is_empty() {
        let problem = "is not empty: no event of the bus is a notification; remove it";
        return refused("events", problem.to_owned());
    }
    if let Some(age) = p.max_age {
        let age = format_duration(age);
        let problem =
            format!("is {age}: a notification has a time of its own, expires_in; remove it");
        return refused("max_age", problem);
    }
    if p.dead.keep > NOTIFICATION_KEPT {
        let keep = format_duration(p.dead.keep);
        let problem = format!(
            "is {keep}, but a notification is kept for 7 days after its end, and redriven later it could not be sent; lower it to \"7d\""
        );
        return refused("dead.keep", problem);
    }
    Ok(())
}

fn check_times(
    p: &PipelineConfig,
    key: &impl Fn(&str) -> String,
    grace: Duration,
) -> Result<(), Fault> {
    within(&key("lease_ttl"), p.lease_ttl, SECOND..=HOUR)?;
    at_least(&key("slice_time"), p.slice_time, MILLISECOND)?;
    if p.slice_time > p.lease_ttl / 3 {
        let problem = format!(
            "is {}, above a third of lease_ttl ({}), where the lease is renewed; lower it or raise lease_ttl",
            format_duration(p.slice_time),
            format_duration(p.lease_ttl),
        );
        return Err(Fault::new(key("slice_time"), problem).or(key("lease_ttl")));
    }
    at_least(&key("handler_timeout"), p.handler_timeout, MILLISECOND)?;
    if p.handler_timeout > grace {
        let problem = format!(
            "is {}, above shutdown_grace ({}): a stop would cut handlers off; lower it or raise shutdown_grace",
            format_duration(p.handler_timeout),
            format_duration(grace),
        );
        return Err(Fault::new(key("handler_timeout"), problem).or("shutdown_grace"));
    }
    within(&key("backoff.max"), p.backoff.max, MILLISECOND..=WEEK)?;
    at_least(&key("backoff.initial"), p.backoff.initial, MILLISECOND)?;
    if p.backoff.initial > p.backoff.max {
        let problem = format!(
            "is {}, above backoff.max ({}); lower it or raise backoff.max",
            format_duration(p.backoff.initial),
            format_duration(p.backoff.max),
        );
        return Err(Fault::new(key("backoff.initial"), problem).or(key("backoff.max")));
    }
    within(&key("linger"), p.linger, Duration::ZERO..=HOUR)?;
    within(&key("max_age"), p.max_age.unwrap_or_default(), Duration::ZERO..=TEN_YEARS)?;
    within(&key("dead.keep"), p.dead.keep, SECOND..=TEN_YEARS)
}

fn within(key: &str, time: Duration, bounds: RangeInclusive<Duration>) -> Result<(), Fault> {
    if bounds.contains(&time) {
        return Ok(());
    }
    let (least, most) = bounds.into_inner();
    let problem = format!(
        "is {}; write a duration from {} to {}",
        format_duration(time),
        plain(least),
        plain(most),
    );
    Err(Fault::new(key, problem))
}

/// A bound in the units of the documentation: `3650d`, not `9years 11months …`.
fn plain(time: Duration) -> String {
    match time.as_secs() {
        secs if secs > 0 && secs % 86_400 == 0 => format!("{}d", secs / 86_400),
        _ => format_duration(time).to_string(),
    }
}

fn at_least(key: &str, time: Duration, least: Duration) -> Result<(), Fault> {
    if time >= least {
        return Ok(());
    }
    let problem =
        format!("is {}; write at least {}", format_duration(time), format_duration(least));
    Err(Fault::new(key, problem))
}

fn number(key: &str, number: u64, (least, most): (u64, u64)) -> Result<(), Fault> {
    if (least..=most).contains(&number) {
        return Ok(());
    }
    Err(Fault::new(key, format!("is {number}; {}", between(least, most))))
}

/// The remedy for a number out of bounds.
pub(super) fn between(least: u64, most: u64) -> String {
    format!("write a whole number from {least} to {most}")
}

fn database(key: &str, name: &str) -> Result<(), Fault> {
    let forbidden = |c: char| c.is_control() || DATABASE_FORBIDDEN.contains(&c);
    if name.is_empty() || name.len() > DATABASE_MAX_BYTES || name.contains(forbidden) {
        let problem = format!(
            "is {name:?}; write 1 to {DATABASE_MAX_BYTES} bytes without spaces and without {}",
            DATABASE_FORBIDDEN.iter().filter(|c| **c != ' ').collect::<String>(),
        );
        return Err(Fault::new(key, problem));
    }
    if DATABASE_TAKEN.iter().any(|taken| name.eq_ignore_ascii_case(taken)) {
        let problem = format!("is {name:?}, which belongs to MongoDB itself; choose another name");
        return Err(Fault::new(key, problem));
    }
    Ok(())
}

fn at_most(key: &str, entries: usize, most: usize) -> Result<(), Fault> {
    if entries <= most {
        return Ok(());
    }
    Err(Fault::new(key, format!("has {entries} entries; at most {most} are allowed")))
}

fn names(key: &str, names: &[String], most: usize, what: &str) -> Result<(), Fault> {
    at_most(key, names.len(), most)?;
    let bad = |name: &&String| {
        name.is_empty() || name.len() > NAME_MAX_BYTES || name.chars().any(char::is_control)
    };
    match names.iter().find(bad) {
        Some(_) => {
            let rule = format!("1 to {NAME_MAX_BYTES} bytes without control characters");
            Err(Fault::new(key, format!("holds an unusable {what}; each has {rule}")))
        }
        None => Ok(()),
    }
}
