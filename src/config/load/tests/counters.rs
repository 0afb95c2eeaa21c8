//! `[counters]` and the built-in pipeline of that name: it can be tuned and disabled, and a setting
//! that would lose views is refused.

use std::path::PathBuf;
use std::time::Duration;

use super::refusal;
use crate::config::layers::Layers;
use crate::config::load::build;
use crate::config::{Config, ConfigError, PipelineConfig};
use crate::id::PipelineName;

fn with_variable(text: &str, name: &str, value: &str) -> Result<Config, ConfigError> {
    let mut layers = Layers::defaults();
    layers.add_toml(text, "f.toml")?;
    layers.add_variable(name, value)?;
    build(&layers)
}

fn counting(config: &Config) -> &PipelineConfig {
    &config.pipelines[&PipelineName::parse("counters").unwrap()]
}

#[test]
fn the_time_zone_and_the_cache_are_read_and_unusable_values_are_refused_with_a_remedy() {
    let text = "[counters]\ntime_zone = \"Europe/Berlin\"\ncached_ads = 1000";
    let counters = Config::from_toml(text, "f").unwrap().counters;
    assert_eq!(counters.time_zone.iana_name(), Some("Europe/Berlin"));
    assert_eq!(counters.cached_ads, 1_000);
    let most = Config::from_toml("counters.cached_ads = 10000000", "f").unwrap();
    assert_eq!(most.counters.cached_ads, 10_000_000);

    let patient = Config::from_toml("counters.read_timeout = \"10s\"", "f").unwrap();
    assert_eq!(patient.counters.read_timeout, Duration::from_secs(10));
    for time in ["9ms", "11s", "0s"] {
        let message =
            format!("f.toml:1: counters.read_timeout is {time}; write a duration from 10ms to 10s");
        assert_eq!(refusal(&format!("counters.read_timeout = {time:?}")), message);
    }

    for name in ["Europe/Berln", "", "+02:00", "CET-1CEST", "Etc/Unknown", "../UTC", "/etc/passwd"]
    {
        let message = format!(
            "f.toml:2: counters.time_zone is {name:?}, which is no known time zone; write an IANA name, such as \"UTC\" or \"Europe/Berlin\""
        );
        assert_eq!(refusal(&format!("[counters]\ntime_zone = {name:?}")), message);
    }
    for ads in ["999", "10000001", "0", "-1"] {
        let message = format!(
            "f.toml:1: counters.cached_ads is {ads}; write a whole number from 1000 to 10000000"
        );
        assert_eq!(refusal(&format!("counters.cached_ads = {ads}")), message);
    }
    assert_eq!(
        refusal("[counters]\ntimezone = \"UTC\""),
        r#"f.toml:2: unknown key "counters.timezone"; did you mean "counters.time_zone"?"#
    );
    let zone = with_variable("", "FAIRLANE__COUNTERS__TIME_ZONE", "Asia/Tokyo").unwrap();
    assert_eq!(zone.counters.time_zone.iana_name(), Some("Asia/Tokyo"));
}

#[test]
fn the_built_in_pipeline_is_tuned_key_by_key_and_switched_off() {
    let text = "[pipelines.counters]\nbatch = 100\nworkers.max = 4\nfilter = \"true\"";
    let config = Config::from_toml(text, "f").unwrap();
    let counters = counting(&config);
    assert_eq!((counters.batch.get(), counters.workers.max.get()), (100, 4));
    assert_eq!((counters.handler.as_str(), counters.linger), ("counter", Duration::from_secs(2)));
    assert_eq!(counters.filter.as_deref(), Some("true"));

    let off = Config::from_toml("pipelines.counters.enabled = false", "f").unwrap();
    assert!(!counting(&off).enabled);
    let off = with_variable("", "FAIRLANE__PIPELINES__COUNTERS__ENABLED", "false").unwrap();
    assert!(!counting(&off).enabled);
    let tuned = with_variable(text, "FAIRLANE__PIPELINES__COUNTERS__BATCH", "7").unwrap();
    assert_eq!((counting(&tuned).batch.get(), counting(&tuned).workers.max.get()), (7, 4));
}

#[test]
fn a_short_grace_shortens_a_default_timeout_and_contradicts_a_written_one() {
    let config = Config::from_toml("shutdown_grace = \"10s\"", "f").unwrap();
    assert_eq!(counting(&config).handler_timeout, Duration::from_secs(10));
    let written = "shutdown_grace = \"10s\"\npipelines.counters.handler_timeout = \"11s\"";
    assert_eq!(
        refusal(written),
        "f.toml:2: pipelines.counters.handler_timeout is 11s, above shutdown_grace (10s): a stop would cut handlers off; lower it or raise shutdown_grace"
    );
}

#[test]
fn a_setting_that_would_lose_views_is_refused_with_its_line_the_reason_and_a_remedy() {
    let table = [
        ("max_queue = 5", "max_queue is 5: a view beyond it would be lost; remove it"),
        (
            "on_overflow = \"drop_new\"",
            r#"on_overflow is "drop_new": a view that is dropped would be lost; remove it"#,
        ),
        (
            "max_age = \"2d\"",
            "max_age is 2days: a view that waited longer would be lost; remove it",
        ),
        (
            "max_attempts = 10",
            "max_attempts is 10: a view that is given up would be lost; remove it",
        ),
        (
            "handler = \"log\"",
            r#"handler is "log": the views would be lost, which "counter" alone counts; remove it, or set enabled = false, and give the other handler a pipeline of another name"#,
        ),
        (
            "url = \"http://h/\"",
            r#"url is set, but the handler is "counter"; remove it, or set handler = "push""#,
        ),
        (
            "events = []",
            r#"events is empty; name the types of events it takes, such as ["tag.*"], or set enabled = false"#,
        ),
        ("batch = 5001", "batch is 5001; write a whole number from 1 to 5000"),
    ];
    for (line, message) in table {
        let text = format!("\n[pipelines.counters]\n{line}");
        assert_eq!(refusal(&text), format!("f.toml:3: pipelines.counters.{message}"), "{line}");
    }
    let error = with_variable("", "FAIRLANE__PIPELINES__COUNTERS__MAX_QUEUE", "9").unwrap_err();
    assert_eq!(
        error.to_string(),
        "environment variable FAIRLANE__PIPELINES__COUNTERS__MAX_QUEUE: pipelines.counters.max_queue is 9: a view beyond it would be lost; remove it"
    );
    // The defaults, written out, change nothing.
    let same = "[pipelines.counters]\nmax_queue = 0\non_overflow = \"dead\"\nmax_age = \"0s\"";
    assert_eq!(
        format!("{:?}", Config::from_toml(same, "f").unwrap()),
        format!("{:?}", Config::default())
    );
}

#[test]
fn only_the_built_in_pipeline_counts() {
    assert_eq!(
        refusal("[pipelines.views]\nhandler = \"counter\"\nevents = [\"ad.viewed\"]"),
        r#"f.toml:2: pipelines.views.handler is "counter", which only the built-in pipeline "counters" may have: the views that arrive are put there, and those elsewhere would be lost; tune [pipelines.counters], or name another handler"#
    );
    let mut config = Config::default();
    let name = PipelineName::parse("counters").unwrap();
    config.pipelines.insert(name, PipelineConfig::new("counter", ["ad.viewed"]));
    assert_eq!(
        config.check().unwrap_err().to_string(),
        "configuration: pipelines.counters.max_attempts is 10: a view that is given up would be lost; remove it"
    );
    config.pipelines.clear();
    config.check().unwrap();
    config.counters.cached_ads = 1;
    assert!(config.check().unwrap_err().to_string().contains("counters.cached_ads is 1;"));
}

#[test]
fn the_program_of_a_private_mongodb_comes_from_the_environment_alone() {
    let load = |text: &str| {
        let variable = ("FAIRLANE_MONGOD".to_owned(), text.to_owned());
        Config::load_with(None, std::iter::once(variable)).unwrap().mongodb.program
    };
    assert_eq!(load("/opt/mongod"), Some(PathBuf::from("/opt/mongod")));
    assert_eq!(load(""), None);
    assert!(refusal("[mongodb]\nprogram = \"mongod\"").contains("unknown key"));
}
