//! `[pipelines.NAME]`.

use super::{VALID, pipeline_of, refusal};
use crate::config::{Config, PipelineConfig};
use crate::id::PipelineName;

#[test]
fn a_bad_setting_of_a_pipeline_is_refused_with_its_line_and_a_remedy() {
    let table = [
        (
            "handler_timeout = \"26s\"",
            "handler_timeout is 26s, above shutdown_grace (25s): a stop would cut handlers off; lower it or raise shutdown_grace",
        ),
        ("handler_timeout = \"0s\"", "handler_timeout is 0s; write at least 1ms"),
        ("lease_ttl = \"999ms\"", "lease_ttl is 999ms; write a duration from 1s to 1h"),
        ("lease_ttl = \"61m\"", "lease_ttl is 1h 1m; write a duration from 1s to 1h"),
        (
            "slice_time = \"11s\"",
            "slice_time is 11s, above a third of lease_ttl (30s), where the lease is renewed; lower it or raise lease_ttl",
        ),
        ("slice_time = \"0s\"", "slice_time is 0s; write at least 1ms"),
        ("batch = 0", "batch is 0; write a whole number from 1 to 5000"),
        ("batch = 5001", "batch is 5001; write a whole number from 1 to 5000"),
        ("max_attempts = 0", "max_attempts is 0; write a whole number from 1 to 1000000"),
        ("max_queue = -1", "max_queue is -1; write a whole number from 0 to 1000000000"),
        ("workers.min = 0", "workers.min is 0; write a whole number from 1 to 1024"),
        ("workers.max = 1025", "workers.max is 1025; write a whole number from 1 to 1024"),
        (
            "workers = { min = 65 }",
            "workers.min is 65, above workers.max (64); lower it or raise workers.max",
        ),
        (
            "backoff = { initial = \"6m\" }",
            "backoff.initial is 6m, above backoff.max (5m); lower it or raise backoff.max",
        ),
        ("backoff.initial = \"0s\"", "backoff.initial is 0s; write at least 1ms"),
        ("backoff.max = \"8d\"", "backoff.max is 8days; write a duration from 1ms to 7d"),
        ("backoff.jitter = 1.5", "backoff.jitter is 1.5; write a fraction from 0.0 to 1.0"),
        ("backoff.jitter = nan", "backoff.jitter is NaN; write a fraction from 0.0 to 1.0"),
        ("linger = \"2h\"", "linger is 2h; write a duration from 0s to 1h"),
        ("max_age = \"11years\"", "max_age is 11years; write a duration from 0s to 3650d"),
        (
            "max_age = \"2s\"\nlinger = \"2s\"",
            "max_age is 2s, but must be above linger (2s): an event would be too old before its slice starts; raise max_age or lower linger",
        ),
        ("dead = { max = 0 }", "dead.max is 0; write a whole number from 1 to 100000000"),
        ("dead.keep = \"0s\"", "dead.keep is 0s; write a duration from 1s to 3650d"),
        ("start = \"latest\"", r#"start is "latest"; write "new" or "earliest""#),
        ("on_overflow = \"drop\"", r#"on_overflow is "drop"; write "dead" or "drop_new""#),
    ];
    for (line, message) in table {
        let expected = format!("f.toml:4: pipelines.p.{message}");
        assert_eq!(refusal(&format!("{VALID}{line}")), expected, "{line}");
    }
    let table = [
        (
            "bacth = 1",
            r#"f.toml:4: unknown key "pipelines.p.bacth"; did you mean "pipelines.p.batch"?"#,
        ),
        (
            "workers = { mx = 1 }",
            r#"f.toml:4: unknown key "pipelines.p.workers.mx"; did you mean "pipelines.p.workers.max"?"#,
        ),
        (
            "keep = \"1d\"",
            r#"f.toml:4: unknown key "pipelines.p.keep"; did you mean "pipelines.p.dead.keep" or "pipelines.p.history.keep"?"#,
        ),
        (
            "weight = 3",
            r#"f.toml:4: unknown key "pipelines.p.weight"; `fairlane config` prints every key"#,
        ),
        (
            "url = \"https://user:secret@example.com\"",
            "f.toml:4: pipelines.p.url holds a user name or password, which would show up in logs; remove it: receivers authenticate requests by the signatures with callbacks.secrets",
        ),
        ("workers = 3", "f.toml:4: pipelines.p.workers must be a table, not a whole number"),
        ("batch = 1.5", "f.toml:4: pipelines.p.batch must be a whole number, not a fraction"),
    ];
    for (line, message) in table {
        assert_eq!(refusal(&format!("{VALID}{line}")), message, "{line}");
    }
}

#[test]
fn a_pipeline_without_handler_or_events_is_refused_at_its_first_line() {
    let table = [
        (
            "\n[pipelines.p]\nevents = [\"*\"]",
            "f.toml:2: pipelines.p.handler is not set; name a handler, such as \"log\"",
        ),
        (
            "\n[pipelines.p]\nhandler = \"log\"",
            r#"f.toml:2: pipelines.p.events is empty; name the types of events it takes, such as ["tag.*"], or set enabled = false"#,
        ),
        (
            "[pipelines.p]\nhandler = \"log\"\nevents = [\"\"]",
            "f.toml:3: pipelines.p.events holds an unusable type glob; each has 1 to 1024 bytes without control characters",
        ),
        (
            "[pipelines.P]\nhandler = \"log\"",
            "f.toml:1: pipelines.P is not a usable name: pipeline name holds 'P' at byte 0; a name begins with a-z or 0-9 and goes on with a-z, 0-9, '-' and '_'",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
    let text = "[pipelines.p]\nhandler = \"log\"\nenabled = false";
    assert!(!pipeline_of(&Config::from_toml(text, "f").unwrap(), "p").enabled);
}

#[test]
fn an_event_may_linger_for_less_than_its_maximum_age() {
    for lines in ["max_age = \"2s\"\nlinger = \"1999ms\"", "max_age = \"1ms\"", "linger = \"1h\""] {
        Config::from_toml(&format!("{VALID}{lines}"), "f.toml").expect(lines);
    }
}

#[test]
fn a_configuration_changed_in_code_can_be_checked_again() {
    let mut config = Config::default();
    config.check().unwrap();
    let mut pipeline = PipelineConfig::new("log", ["*"]);
    pipeline.slice_time = pipeline.lease_ttl;
    config.pipelines.insert(PipelineName::parse("p").unwrap(), pipeline);
    assert_eq!(
        config.check().unwrap_err().to_string(),
        "configuration: pipelines.p.slice_time is 30s, above a third of lease_ttl (30s), where the lease is renewed; lower it or raise lease_ttl"
    );
}
