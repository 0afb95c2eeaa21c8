//! Bad configurations and what is said about them, word by word.

use std::io::Write as _;

use super::*;
use crate::id::PipelineName;

const VALID: &str = "[pipelines.p]\nhandler = \"log\"\nevents = [\"*\"]\n";

fn refusal(text: &str) -> String {
    match Config::from_toml(text, "f.toml") {
        Ok(config) => panic!("{text:?} was accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

fn with_environment(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let variables = variables.iter().map(|&(name, text)| (name.to_owned(), text.to_owned()));
    Config::load_with(Some(file.path()), variables)
}

fn pipeline_of(config: &Config, name: &str) -> PipelineConfig {
    config.pipelines[&PipelineName::parse(name).unwrap()].clone()
}

#[test]
fn a_top_level_key_that_is_unknown_or_of_the_wrong_type_is_refused_with_its_line() {
    let table = [
        ("\ndata_dir", "f.toml:2: invalid TOML: key with no value, expected `=`"),
        ("data_dri = \"x\"", r#"f.toml:1: unknown key "data_dri"; did you mean "data_dir"?"#),
        ("[reddis]\nurl = \"\"", r#"f.toml:1: unknown key "reddis"; did you mean "redis"?"#),
        (
            "[pipeline.log]\nbatch = 1",
            r#"f.toml:1: unknown key "pipeline"; did you mean "pipelines"?"#,
        ),
        ("shards = 4", r#"f.toml:1: unknown key "shards"; did you mean "redis.shards"?"#),
        (
            "[http]\nlisten = \"[::]:1\"\nport = 1",
            r#"f.toml:3: unknown key "http.port"; `fairlane config` prints every key"#,
        ),
        (
            "[redis]\npassword = \"secret\"",
            r#"f.toml:2: unknown key "redis.password"; `fairlane config` prints every key"#,
        ),
        ("data_dir = 1", "f.toml:1: data_dir must be a text in quotes, not a whole number"),
        ("[redis]\nshards = \"16\"", "f.toml:2: redis.shards must be a whole number, not a text"),
        (
            "[redis]\nshards = 99999999999999999999",
            "f.toml:2: redis.shards must be a whole number, not one of that size",
        ),
        ("bus.trim = 1", "f.toml:1: bus.trim must be true or false, not a whole number"),
        (
            "[bus]\nstreams = [\"a\", 1]",
            r#"f.toml:2: bus.streams must be a list of texts such as ["a", "b"], not a list of other things"#,
        ),
        (
            "bus.streams = \"a\"",
            r#"f.toml:1: bus.streams must be a list of texts such as ["a", "b"], not a text"#,
        ),
        ("redis = 1", "f.toml:1: redis must be a table, not a whole number"),
        ("[[redis]]\nurl = \"\"", "f.toml:1: redis must be a table, not a list"),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
}

#[test]
fn a_key_set_twice_is_named_with_both_lines_and_the_remedy() {
    let key = "remove one of the two";
    let table = "put the keys of both under one heading and remove the other";
    let cases = [
        ("data_dir = \"a\"\n\ndata_dir = \"b\"", "3: key data_dir", Some(1), key),
        ("[callbacks]\n# x\n[redis]\n\n [callbacks]", "5: table [callbacks]", Some(1), table),
        (
            "[http]\nlisten = \"[::]:1\"\n[redis]\n\"listen\" = 1\nurl = \"\"\nurl = \"\"",
            "6: key redis.url",
            Some(5),
            key,
        ),
        (
            "[pipelines.a]\nbatch = 1\n[pipelines.b]\n[pipelines.a]",
            "4: table [pipelines.a]",
            Some(1),
            table,
        ),
        ("redis.url = \"\"\n[redis]\nshards = 1", "2: table [redis]", Some(1), table),
        ("[redis]\nurl = \"\"\n[\"redis\"]", "3: table [redis]", Some(1), table),
        (
            "[pipelines.a.workers]\nmin = 1\n[pipelines.a]\nworkers.min = 2",
            "4: key pipelines.a.workers",
            Some(1),
            key,
        ),
        (
            "[[auth.tokens]]\nname = \"a\"\n[[auth.tokens]]\nname = \"b\"\nname = \"c\"",
            "5: key auth.tokens.name",
            Some(4),
            key,
        ),
        ("auth.tokens = []\n[[auth.tokens]]", "2: table [[auth.tokens]]", Some(1), table),
        ("[pipelines.a]\nworkers = { min = 1, min = 2 }", "2: key min", Some(2), key),
        ("x = \"\"\"\nx = 1\n\"\"\"\nx = 2", "4: key x", Some(1), key),
        ("[a]\n[b]\n[\"c d\"]\n[\"c d\"]", "4: table [\"c d\"]", Some(3), table),
    ];
    for (text, second, first, remedy) in cases {
        let first = first.map_or_else(String::new, |line: usize| format!(", in line {line}"));
        let expected = format!("f.toml:{second} is in the file already{first}; {remedy}");
        assert_eq!(refusal(text), expected, "{text}");
    }
}

#[test]
fn the_settings_of_proxies_and_admission_are_checked_too() {
    let table = [
        (
            "[http]\ntrusted_proxies = [\"10.0.0.0/33\"]",
            r#"f.toml:2: http.trusted_proxies holds "10.0.0.0/33"; write ADDRESS/BITS, such as "10.0.0.0/8" or "fd00::/8""#,
        ),
        (
            "[http]\nproxy_protocol = true",
            "f.toml:2: http.proxy_protocol is true, but http.trusted_proxies is empty, so no connection may carry the header; name the networks of the proxies",
        ),
        (
            "[admission]\np2_deadline = \"61m\"",
            "f.toml:2: admission.p2_deadline is 1h 1m; write a duration from 0s to 1h",
        ),
        (
            "shutdown_delay = \"61m\"",
            "f.toml:1: shutdown_delay is 1h 1m; write a duration from 0s to 1h",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
}

#[test]
fn a_top_level_value_out_of_bounds_is_refused_with_its_line_and_a_remedy() {
    let table = [
        ("data_dir = \"\"", "f.toml:1: data_dir is empty; name a directory"),
        (
            "shutdown_grace = \"25\"",
            r#"f.toml:1: shutdown_grace is "25", not a duration (time unit needed, for example 25sec or 25ms); write a number with a unit, such as "200ms", "30s" or "7d""#,
        ),
        (
            "shutdown_grace = \"0s\"",
            "f.toml:1: shutdown_grace is 0s; write a duration from 1ms to 1h",
        ),
        (
            "shutdown_grace = \"2h\"",
            "f.toml:1: shutdown_grace is 2h; write a duration from 1ms to 1h",
        ),
        ("[redis]\nshards = 0", "f.toml:2: redis.shards is 0; write a whole number from 1 to 1024"),
        (
            "[redis]\nshards = 1025",
            "f.toml:2: redis.shards is 1025; write a whole number from 1 to 1024",
        ),
        (
            "[redis]\nshards = -1",
            "f.toml:2: redis.shards is -1; write a whole number from 1 to 1024",
        ),
        (
            "[redis]\nurl = \"rediss://:secret@db#insecure\"",
            "f.toml:2: redis.url is not a usable Redis URL; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT or redis+unix:///PATH",
        ),
        (
            "[redis]\nurl = \"redis+cluster://:secret@db:1,db:2/3\"",
            "f.toml:2: redis.url names a database of a cluster, which has only one; leave out what follows the last /",
        ),
        (
            "[redis]\nurl = \"rediss://db\"\nca_file = \"/nowhere/ca.pem\"",
            "f.toml:3: redis.ca_file names /nowhere/ca.pem, which cannot be read (No such file or directory (os error 2))",
        ),
        (
            "[redis]\nurl = \"rediss://db\"\nca_file = \"/dev/null\"",
            "f.toml:3: redis.ca_file names /dev/null, which holds no certificate in PEM",
        ),
        (
            "[redis]\nurl = \"rediss://db\"\ncert_file = \"/dev/null\"",
            "f.toml:3: redis.key_file is not set, but redis.cert_file is; set both, or neither",
        ),
        (
            "[redis]\nurl = \"redis://db\"\nca_file = \"/dev/null\"",
            "f.toml:3: redis.ca_file is set, but redis.url does not ask for TLS; write rediss://… or rediss+cluster://… there, or leave it out",
        ),
        (
            "[redis]\nurl = \"db:6379\"",
            "f.toml:2: redis.url does not start with a known scheme; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT or redis+unix:///PATH",
        ),
        (
            "[redis]\nurl = \"redis://:secret@db:x\"",
            "f.toml:2: redis.url is not a usable Redis URL; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT or redis+unix:///PATH",
        ),
        ("[bus]\nsource = \"kafka\"", r#"f.toml:2: bus.source is "kafka"; write "redis""#),
        ("[bus]\nstreams = []", "f.toml:2: bus.streams is empty; name at least one stream"),
        (
            "[bus]\nstreams = [\"a\", \"b\", \"a\"]",
            r#"f.toml:2: bus.streams names "a" twice; name each stream once"#,
        ),
        (
            "[bus]\nstreams = [\"\"]",
            "f.toml:2: bus.streams holds an unusable stream; each has 1 to 1024 bytes without control characters",
        ),
        (
            "[bus]\nstreams = [\"fairlane:invalid\"]",
            r#"f.toml:2: bus.streams names "fairlane:invalid", where unreadable events are put; remove it"#,
        ),
        (
            "[bus]\nretention = \"11years\"",
            "f.toml:2: bus.retention is 11years; write a duration from 0s to 3650d",
        ),
        (
            "[http]\nlisten = \"localhost:8080\"",
            r#"f.toml:2: http.listen is "localhost:8080"; write IP:PORT, such as "127.0.0.1:8080" or "[::]:8080""#,
        ),
        (
            "[http]\nlisten = \"127.0.0.1:9464\"",
            "f.toml:2: metrics.listen is 127.0.0.1:9464, as is http.listen; choose another port",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
}

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
            r#"f.toml:4: unknown key "pipelines.p.keep"; did you mean "pipelines.p.dead.keep"?"#,
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
fn a_mongodb_that_cannot_be_used_is_refused_without_quoting_it() {
    let table = [
        (
            "[mongodb]\nurl = \"localhost:27017\"",
            "f.toml:2: mongodb.url does not start with a known scheme; write mongodb://[USER:PASSWORD@]HOST[:PORT][,HOST…][/?OPTIONS] or mongodb+srv://HOST",
        ),
        (
            "[mongodb]\nurl = \"mongodb://u:sec@ret@db\"",
            "f.toml:2: mongodb.url is not a usable MongoDB URL; write mongodb://[USER:PASSWORD@]HOST[:PORT][,HOST…][/?OPTIONS] or mongodb+srv://HOST; characters such as @ : / % in a user or password are written as %40 %3A %2F %25",
        ),
        (
            "[mongodb]\ndatabase = \"a.b\"",
            r#"f.toml:2: mongodb.database is "a.b"; write 1 to 63 bytes without spaces and without /\."$*<>:|?"#,
        ),
        (
            "[mongodb]\ndatabase = \"Admin\"",
            r#"f.toml:2: mongodb.database is "Admin", which belongs to MongoDB itself; choose another name"#,
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
}

#[test]
fn settings_of_notifications_are_read_and_their_faults_named() {
    let text = "[notifications]\nuser_poll_threshold = \"1h\"\non_throttle = \"defer\"\n\
                type_thresholds = [\"receipt=0s\", \"daily news = 1d\"]\nonline_threshold = \"0s\"";
    let config = Config::from_toml(text, "f.toml").unwrap().notifications;
    assert_eq!(config.user_poll_threshold, Duration::from_secs(3_600));
    assert_eq!(config.on_throttle, OnThrottle::Defer);
    assert_eq!(config.online_threshold, Duration::ZERO);
    let caps = "[notifications]\ncaps = [\"10/day\", \"3/1h\"]\n\
                bot_caps = [\"shop-7 = 20/day\", \"a=b-* = none\", \"shop-7=5/1h\"]\ntype_caps = [\"promo = 2/day\"]";
    let caps = Config::from_toml(caps, "f.toml").unwrap().notifications;
    let cap = |text: &str| text.parse::<Cap>().unwrap();
    assert_eq!(caps.caps, [cap("10/day"), cap("3/1h")]);
    let shop = ("shop-7".to_owned(), vec![cap("20/day"), cap("5/1h")]);
    assert_eq!(caps.bot_caps, [shop, ("a=b-*".to_owned(), Vec::new())]);
    assert_eq!(caps.type_caps, [("promo".to_owned(), vec![cap("2/day")])]);
    let expected = [("receipt", Duration::ZERO), ("daily news", Duration::from_secs(86_400))]
        .map(|(kind, time)| (kind.to_owned(), time));
    assert_eq!(config.type_thresholds, expected);
    let table = [
        (
            "notifications.type_thresholds = [\"x\"]",
            r#"f.toml:1: notifications.type_thresholds holds "x"; write TYPE = DURATION, such as "digest = 1d""#,
        ),
        (
            "notifications.type_thresholds = [\"x=1\"]",
            r#"f.toml:1: notifications.type_thresholds holds "x=1"; write TYPE = DURATION, such as "digest = 1d""#,
        ),
        (
            "notifications.type_thresholds = [\"x=1s\", \"x = 2s\"]",
            r#"f.toml:1: notifications.type_thresholds names "x" twice; name each type once"#,
        ),
        (
            "notifications.caps = [\"10\"]",
            r#"f.toml:1: notifications.caps holds "10"; write NUMBER/TIME, such as "10/day", "3/1h" or "100/7d""#,
        ),
        (
            "notifications.caps = [\"0/day\"]",
            r#"f.toml:1: notifications.caps holds "0/day"; write a number from 1 to 1000 before the stroke"#,
        ),
        (
            "notifications.bot_caps = [\"10/day\"]",
            r#"f.toml:1: notifications.bot_caps holds "10/day"; write NAME = NUMBER/TIME, such as "shop-7 = 10/day" or "shop-7 = none""#,
        ),
        (
            "notifications.type_caps = [\"promo = 1/500d\"]",
            r#"f.toml:1: notifications.type_caps holds "promo = 1/500d"; write a time from 1s to 366d behind the stroke, such as "promo = 10/day" or "promo = none""#,
        ),
        (
            "notifications.type_caps = [\"x = none\", \"x = 2/day\"]",
            r#"f.toml:1: notifications.type_caps holds "x = 2/day" beside "x = none"; remove that, or the others of this name"#,
        ),
        (
            "notifications.caps = [\"1/1s\",\"1/2s\",\"1/3s\",\"1/4s\",\"1/5s\",\"1/6s\",\"1/7s\",\"1/8s\",\"1/9s\"]",
            "f.toml:1: notifications.caps has 9 entries; at most 8 are allowed",
        ),
        (
            "pipelines.notifications.handler = \"log\"",
            r#"f.toml:1: pipelines.notifications.handler is "log": what is due would not be sent, which "notify" alone does; remove it, or set enabled = false, and give the other handler a pipeline of another name"#,
        ),
        (
            "pipelines.x.handler = \"notify\"\npipelines.x.events = [\"*\"]",
            r#"f.toml:1: pipelines.x.handler is "notify", which only the built-in pipeline "notifications" may have: what is due is put there; tune [pipelines.notifications], or name another handler"#,
        ),
        (
            "pipelines.notifications.events = [\"*\"]",
            "f.toml:1: pipelines.notifications.events is not empty: no event of the bus is a notification; remove it",
        ),
        (
            "pipelines.notifications.max_age = \"1h\"",
            "f.toml:1: pipelines.notifications.max_age is 1h: a notification has a time of its own, expires_in; remove it",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(text), message, "{text}");
    }
}

#[test]
fn a_contradiction_is_reported_where_the_setting_that_was_made_stands() {
    assert_eq!(
        refusal(&format!("shutdown_grace = \"10s\"\n{VALID}")),
        "f.toml:1: pipelines.p.handler_timeout is 20s, above shutdown_grace (10s): a stop would cut handlers off; lower it or raise shutdown_grace"
    );
    assert_eq!(
        refusal(&format!("{VALID}[pipelines.p.workers]\nmax = 4\nmin = 5")),
        "f.toml:6: pipelines.p.workers.min is 5, above workers.max (4); lower it or raise workers.max"
    );
    let error = with_environment(VALID, &[("FAIRLANE__SHUTDOWN_GRACE", "10s")]).unwrap_err();
    assert!(error.to_string().starts_with("environment variable FAIRLANE__SHUTDOWN_GRACE: pipe"));
}

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
        (("FAIRLANE__BUS__STREAMS", ""), "bus.streams is empty; name at least one stream"),
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

#[test]
fn a_file_that_was_named_must_be_there() {
    let error = Config::load(Some(Path::new("/nowhere/fairlane.toml"))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/nowhere/fairlane.toml: the configuration cannot be read: No such file or directory (os error 2)"
    );
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

#[test]
fn callbacks_and_urls_are_read_and_their_secrets_never_shown() {
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let push = "[pipelines.p]\nhandler = \"push\"\nevents = [\"*\"]\n";
    let callbacks =
        format!("[callbacks]\nallow_nets = [\"10.0.0.0/8\", \"::1\"]\nsecrets = [\"{SECRET}\"]");
    let url = "url = \"http://127.0.0.1:9000/hook?token=hidden\"";
    let config = Config::from_toml(&format!("{push}{url}\n{callbacks}"), "f").unwrap();
    let nets: Vec<String> = config.callbacks.allow_nets.iter().map(ToString::to_string).collect();
    assert_eq!(nets, ["10.0.0.0/8", "::1/128"]);
    assert_eq!(config.callbacks.secrets.len(), 1);
    assert_eq!(pipeline_of(&config, "p").url.unwrap().to_string(), "http://127.0.0.1:9000/hook");
    let shown = format!("{config:?}");
    assert!(!shown.contains("MfKQ") && !shown.contains("hidden"), "{shown}");

    let table = [
        (
            "[callbacks]\nallow_nets = [\"10.0.0.0/33\"]".to_owned(),
            r#"f.toml:2: callbacks.allow_nets holds "10.0.0.0/33"; write ADDRESS/BITS, such as "10.0.0.0/8" or "fd00::/8""#,
        ),
        (
            format!("[callbacks]\nsecrets = [\"{SECRET}\", \"whsec_c2VjcmV0\"]"),
            "f.toml:2: callbacks.secrets number 2 has 6 bytes; 24 to 64 are allowed",
        ),
        (
            "[callbacks]\nmax_per_host = 0".to_owned(),
            "f.toml:2: callbacks.max_per_host is 0; write a whole number from 1 to 1024",
        ),
        (
            format!("[callbacks]\nsecrets = {:?}", [SECRET; 9]),
            "f.toml:2: callbacks.secrets has 9 entries; at most 8 are allowed",
        ),
        (
            format!("{push}url = \"http://me:hidden@h/\""),
            "f.toml:4: pipelines.p.url holds a user name or password, which would show up in logs; remove it: receivers authenticate requests by the signatures with callbacks.secrets",
        ),
        (
            format!("{push}url = \"h/hook\""),
            "f.toml:4: pipelines.p.url is not a URL (relative URL without a base); write http://HOST/PATH or https://HOST/PATH",
        ),
        (
            format!("{VALID}url = \"http://h/\""),
            r#"f.toml:4: pipelines.p.url is set, but the handler is "log"; remove it, or set handler = "push""#,
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), message, "{text}");
    }
    let error = with_environment("", &[("FAIRLANE__CALLBACKS__SECRETS", "hidden")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "environment variable FAIRLANE__CALLBACKS__SECRETS: callbacks.secrets number 1 does not start with whsec_; `echo whsec_$(openssl rand -base64 32)` makes one"
    );
}
