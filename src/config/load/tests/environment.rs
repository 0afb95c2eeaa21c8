//! Variables of the environment.

use super::{VALID, pipeline_of, with_environment};

#[test]
fn the_environment_wins_over_the_file_key_by_key_and_takes_the_type_of_the_default() {
    let text = format!("{VALID}batch = 7\nworkers.min = 2\n[redis]\nshards = 4");
    let config = with_environment(
        &text,
        &[
            ("FAIRLANE__REDIS__URL", "redis://:hidden@db/3"),
            ("fairlane__redis__shards", " 8 "),
            ("FAIRLANE__BUS__STREAMS", "a, b"),
            ("FAIRLANE__BUS__TRIM", "false"),
            ("FAIRLANE__HTTP__LISTEN", "[::1]:1"),
            ("FAIRLANE__PIPELINES__P__WORKERS__MAX", "3"),
            ("FAIRLANE__PIPELINES__P__BACKOFF__JITTER", "1"),
            ("FAIRLANE__PIPELINES__MY__OWN__HANDLER", "log"),
            ("FAIRLANE__PIPELINES__MY__OWN__EVENTS", "tag.*,note.*"),
            ("FAIRLANE_MONGOD", "/usr/bin/mongod"),
            ("FAIRLANE_MONGO", "/usr/bin/other"),
            ("HOME", "/root"),
        ],
    )
    .unwrap();
    assert_eq!(config.redis.url.as_ref().unwrap().expose(), "redis://:hidden@db/3");
    assert_eq!(config.redis.shards.get(), 8);
    assert_eq!(config.bus.streams, ["a", "b"]);
    assert!(!config.bus.trim);
    assert_eq!(config.http.listen.to_string(), "[::1]:1");
    let p = pipeline_of(&config, "p");
    assert_eq!((p.batch.get(), p.workers.min.get(), p.workers.max.get()), (7, 2, 3));
    assert!((p.backoff.jitter - 1.0).abs() < f64::EPSILON);
    assert_eq!(pipeline_of(&config, "my__own").events, ["tag.*", "note.*"]);
    assert_eq!(config.mongodb.program, Some("/usr/bin/mongod".into()));
    assert!(!format!("{config:?}").contains("hidden"));
}

#[test]
fn a_bad_variable_is_refused_by_its_name() {
    let table = [
        (
            ("FAIRLANE__REDIS__URI", "redis://:secret@db"),
            r#"unknown key "redis.uri"; did you mean "redis.url"?"#,
        ),
        (
            ("FAIRLANE__REDIS", "x"),
            r#"unknown key "redis"; this is a section: name one of its keys"#,
        ),
        (
            ("FAIRLANE__REDIS__SHARDS", "many"),
            "redis.shards must be a whole number, not what it holds",
        ),
        (("FAIRLANE__BUS__TRIM", "yes"), "bus.trim must be true or false, not what it holds"),
        (
            ("FAIRLANE__BUS__STREAMS", ""),
            "bus.streams is empty; name at least one stream, or add a source ([[bus.sources]])",
        ),
        (
            ("FAIRLANE__BUS__STREAMS", "a,,b"),
            "bus.streams holds an unusable stream; each has 1 to 1024 bytes without control characters",
        ),
        (
            ("FAIRLANE__PIPELINES__P__BATHC", "1"),
            r#"unknown key "pipelines.p.bathc"; did you mean "pipelines.p.batch"?"#,
        ),
        (
            ("FAIRLANE__PIPELINES__Q__BATCH", "1"),
            "pipelines.q.handler is not set; name a handler, such as \"log\"",
        ),
    ];
    for ((name, text), message) in table {
        let error = with_environment(VALID, &[(name, text)]).unwrap_err();
        assert_eq!(error.to_string(), format!("environment variable {name}: {message}"));
    }
    let twice = [("FAIRLANE__DATA_DIR", "a"), ("fairlane__data_dir", "b")];
    assert_eq!(
        with_environment("", &twice).unwrap_err().to_string(),
        "environment variable fairlane__data_dir: data_dir is also set by FAIRLANE__DATA_DIR; unset one of them"
    );
}
