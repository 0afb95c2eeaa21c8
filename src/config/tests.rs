//! The defaults, and the default text that is printed.

use std::net::SocketAddr;

use jiff::tz::TimeZone;

use super::*;

#[test]
fn the_printed_default_text_loads_as_the_defaults() {
    let printed = Config::from_toml(&default_text(), "printed").unwrap();
    assert_eq!(format!("{printed:?}"), format!("{:?}", Config::default()));
}

#[test]
fn the_printed_pipeline_block_loads_once_it_is_uncommented_and_filled_in() {
    let text = default_text();
    let (top, block) = text.split_once("# [pipelines.NAME]\n").unwrap();
    let block = uncommented(block)
        .replace("handler = \"\"", "handler = \"log\"")
        .replace("events = []", "events = [\"*\"]");
    let loaded = Config::from_toml(&format!("{top}[pipelines.log]\n{block}"), "printed").unwrap();
    let name = PipelineName::parse("log").unwrap();
    assert_eq!(
        format!("{:?}", loaded.pipelines[&name]),
        format!("{:?}", PipelineConfig::new("log", ["*"]))
    );
}

#[test]
fn the_printed_block_of_sources_loads_once_it_is_uncommented_and_filled_in() {
    let text = default_text();
    let (top, block) = text.split_once("# [[bus.sources]]\n").unwrap();
    let block = uncommented(block);
    let [nats, kafka] = [
        [
            ("name", "\"n\""),
            ("kind", "\"nats\""),
            ("servers", "[\"nats://h\"]"),
            ("stream", "\"S\""),
        ],
        [("name", "\"k\""), ("kind", "\"kafka\""), ("brokers", "[\"h:1\"]"), ("topics", "[\"t\"]")],
    ]
    .map(|values| {
        let lines = block.lines().map(|line| {
            let key = line.split(' ').next().unwrap();
            let value = values.iter().find(|(name, _)| *name == key);
            value.map_or_else(|| line.to_owned(), |(_, value)| format!("{key} = {value}"))
        });
        lines.collect::<Vec<_>>().join("\n")
    });
    let both = format!("{top}[[bus.sources]]\n{nats}\n[[bus.sources]]\n{kafka}");
    let sources = Config::from_toml(&both, "printed").unwrap().bus.sources;
    let short = "[[bus.sources]]\nname = \"n\"\nkind = \"nats\"\nservers = [\"nats://h\"]\nstream = \"S\"\n\
        [[bus.sources]]\nname = \"k\"\nkind = \"kafka\"\nbrokers = [\"h:1\"]\ntopics = [\"t\"]";
    assert_eq!(sources, Config::from_toml(short, "f").unwrap().bus.sources);
}

/// The lines of a block up to the first empty one.
fn uncommented(block: &str) -> String {
    let lines = block.lines().take_while(|line| !line.is_empty());
    lines.map(|line| line.strip_prefix("# ").unwrap().to_owned() + "\n").collect()
}

#[test]
fn the_printed_blocks_of_the_built_in_pipelines_load_as_their_defaults() {
    let text = default_text();
    for (name, _) in BUILT_IN {
        let head = format!("[pipelines.{name}]\n");
        let (_, block) = text.split_once(&format!("# {head}")).unwrap();
        let loaded = Config::from_toml(&(head + &uncommented(block)), "printed").unwrap();
        assert_eq!(format!("{loaded:?}"), format!("{:?}", Config::default()));
    }
}

#[test]
fn the_defaults_are_those_of_the_outside_contract() {
    let config = Config::default();
    assert_eq!(config.data_dir, PathBuf::from("./fairlane-data"));
    assert_eq!(config.shutdown_grace, Duration::from_secs(25));
    assert_eq!(config.shutdown_delay, Duration::ZERO);
    assert!(config.redis.url.is_none());
    assert!(config.redis.ca_file.is_none() && config.redis.cert_file.is_none());
    assert!(config.redis.key_file.is_none());
    assert_eq!(config.redis.shards.get(), 16);
    assert!(config.mongodb.url.is_none());
    assert_eq!(config.mongodb.database, "fairlane");
    assert_eq!(config.bus.streams, ["fairlane:events"]);
    assert_eq!(config.bus.retention, Duration::from_secs(600));
    assert!(config.bus.trim);
    assert!(config.bus.sources.is_empty() && config.bus.dedup.is_zero());
    assert_eq!(config.bus.published(), "fairlane:events");
    assert_eq!(config.http.listen, SocketAddr::from(([127, 0, 0, 1], 8080)));
    assert!(config.callbacks.allow_nets.is_empty() && config.callbacks.secrets.is_empty());
    assert_eq!(config.callbacks.max_per_host.get(), 64);
    assert!(config.http.hosts.is_empty() && config.http.cors_origins.is_empty());
    let deadlines = [10, 30, 300].map(|seconds| Some(Duration::from_secs(seconds)));
    assert_eq!(config.admission.deadlines[1..], deadlines);
    assert_eq!(config.admission.deadlines[0], None);
    assert!(config.http.trusted_proxies.is_empty() && !config.http.proxy_protocol);
    let quotas = config.quotas.general();
    let bytes = [quotas.queued_bytes, quotas.delayed_bytes, quotas.pending_bytes];
    assert_eq!((bytes, quotas.dead_bytes), ([64 << 20; 3], 16 << 20));
    let counts = (quotas.delayed_events, quotas.pending, quotas.dead_letters);
    assert_eq!(counts, (100_000, 100_000, 1_000));
    assert_eq!((quotas.key_bytes, quotas.ended_bytes), (256 << 20, 256 << 20));
    assert_eq!(quotas.profiles, 2_000_000);
    assert!(config.quotas.bots.is_empty());
    assert!(config.auth.tokens.is_empty() && !config.auth.allow_anonymous);
    assert_eq!(config.metrics.listen, SocketAddr::from(([127, 0, 0, 1], 9464)));
    assert_eq!(config.counters.time_zone, TimeZone::UTC);
    assert_eq!(config.counters.cached_ads, 100_000);
    assert_eq!(config.counters.read_timeout, Duration::from_millis(250));
    assert_eq!(config.mongodb.program, None);
    let names: Vec<_> = config.pipelines.keys().map(PipelineName::as_str).collect();
    assert_eq!(names, ["automations", "counters", "notifications"]);
    let notifications = &config.notifications;
    assert_eq!(notifications.user_poll_threshold, Duration::from_secs(1_800));
    assert_eq!(notifications.type_thresholds, []);
    assert_eq!(notifications.on_throttle, OnThrottle::Drop);
    assert_eq!(notifications.online_threshold, Duration::from_secs(10));
    assert_eq!(notifications.host_rate, 2_000);
    let notifications = &config.pipelines[&PipelineName::parse("notifications").unwrap()];
    assert!(notifications.enabled && notifications.events.is_empty());
    assert_eq!(notifications.handler, "notify");

    let counters = &config.pipelines[&PipelineName::parse("counters").unwrap()];
    assert!(counters.enabled);
    assert_eq!(counters.handler, "counter");
    assert_eq!(counters.events, ["ad.viewed"]);
    assert_eq!(counters.batch.get(), 5_000);
    assert_eq!(counters.linger, Duration::from_secs(2));
    assert_eq!((counters.workers.min.get(), counters.workers.max.get()), (1, 16));
    assert_eq!(counters.backoff.initial, Duration::from_millis(250));
    assert_eq!(counters.backoff.max, Duration::from_secs(10));
    assert!((counters.backoff.jitter - 0.2).abs() < f64::EPSILON);
    assert_eq!(counters.max_attempts.get(), 1_000_000);
    assert_eq!(counters.handler_timeout, Duration::from_secs(20));
    assert_eq!(counters.start, Start::New);

    let pipeline = PipelineConfig::new("log", ["tag.*"]);
    assert!(pipeline.enabled);
    assert_eq!(pipeline.handler, "log");
    assert_eq!(pipeline.events, ["tag.*"]);
    assert_eq!(pipeline.start, Start::New);
    assert_eq!(pipeline.filter, None);
    assert_eq!(pipeline.url, None);
    assert_eq!(pipeline.batch.get(), 100);
    assert_eq!(pipeline.slice_time, Duration::from_millis(200));
    assert_eq!(pipeline.lease_ttl, Duration::from_secs(30));
    assert_eq!(pipeline.handler_timeout, Duration::from_secs(20));
    assert_eq!((pipeline.workers.min.get(), pipeline.workers.max.get()), (1, 64));
    assert_eq!(pipeline.max_attempts.get(), 10);
    assert_eq!(pipeline.backoff.initial, Duration::from_secs(1));
    assert_eq!(pipeline.backoff.max, Duration::from_secs(300));
    assert!((pipeline.backoff.jitter - 0.2).abs() < f64::EPSILON);
    assert_eq!(pipeline.linger, Duration::ZERO);
    assert_eq!(pipeline.max_queue, None);
    assert_eq!(pipeline.on_overflow, OnOverflow::Dead);
    assert_eq!(pipeline.max_age, None);
    assert_eq!(pipeline.dead.max.get(), 100_000);
    assert_eq!(pipeline.dead.keep, Duration::from_secs(7 * 86_400));
}
