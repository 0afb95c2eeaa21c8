//! The file as a whole, and the settings outside `[pipelines]`, `[callbacks]` and the products.

use std::path::Path;

use super::{VALID, refusal, with_environment};
use crate::config::Config;

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
            "f.toml:2: redis.url is not a usable Redis URL; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT, redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]/NAME[/DB] or redis+unix:///PATH",
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
            "f.toml:3: redis.ca_file is set, but redis.url does not ask for TLS; write rediss://…, rediss+cluster://… or rediss+sentinel://… there, or leave it out",
        ),
        (
            "[redis]\nurl = \"db:6379\"",
            "f.toml:2: redis.url does not start with a known scheme; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT, redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]/NAME[/DB] or redis+unix:///PATH",
        ),
        (
            "[redis]\nurl = \"redis://:secret@db:x\"",
            "f.toml:2: redis.url is not a usable Redis URL; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT, redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]/NAME[/DB] or redis+unix:///PATH",
        ),
        (
            "[bus]\nsource = \"kafka\"",
            r#"f.toml:2: bus.source is "kafka"; write "redis", or remove it; other buses are [[bus.sources]]"#,
        ),
        (
            "[bus]\nstreams = []",
            "f.toml:2: bus.streams is empty; name at least one stream, or add a source ([[bus.sources]])",
        ),
        ("[bus]\ndedup = \"8d\"", "f.toml:2: bus.dedup is 8days; write a duration from 0s to 7d"),
        (
            "[bus]\npublish = \"x\"",
            r#"f.toml:2: bus.publish is "x", which is neither in bus.streams nor the name of a source; write one of ["fairlane:events"]"#,
        ),
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
fn a_file_that_was_named_must_be_there() {
    let error = Config::load(Some(Path::new("/nowhere/fairlane.toml"))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/nowhere/fairlane.toml: the configuration cannot be read: No such file or directory (os error 2)"
    );
}
