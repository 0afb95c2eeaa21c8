//! `[[bus.sources]]`: what they become, and the exact messages.

use std::io::Write as _;
use std::time::Duration;

use super::refusal;
use crate::config::{
    BotFrom, Config, Hidden, NatsLogin, PublishFormat, Sasl, SaslMechanism, SourceConfig,
    SourceKind, SourceStart, TypeFrom,
};

const NATS: &str = "[[bus.sources]]\nname = \"n\"\nkind = \"nats\"\nservers = [\"nats://h\"]\nstream = \"S\"\npublish_subject = \"e\"\n";
const KAFKA: &str = "[[bus.sources]]\nname = \"k\"\nkind = \"kafka\"\nbrokers = [\"h:9092\"]\ntopics = [\"t\", \"u\"]\n";
const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";

fn only(text: &str) -> SourceConfig {
    Config::from_toml(text, "f").unwrap().bus.sources.remove(0)
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn a_source_has_the_defaults_of_its_kind() {
    let nats = only(NATS);
    assert_eq!((&*nats.name, &nats.start, &nats.bot), ("n", &SourceStart::Pipeline, &None));
    assert_eq!(
        (nats.event_type.clone(), nats.format),
        (TypeFrom::Topic, PublishFormat::Structured)
    );
    assert_eq!(nats.log_prefix(), "nats:n/");
    let SourceKind::Nats(nats) = nats.kind else { panic!("{nats:?}") };
    assert_eq!((&*nats.servers, &*nats.stream), (&["nats://h".to_owned()][..], "S"));
    assert_eq!((nats.login, nats.trim), (NatsLogin::None, false));
    let kafka = only(&format!("redis.prefix = \"x\"\n{KAFKA}"));
    assert_eq!(kafka.log_prefix(), "kafka:k/");
    let SourceKind::Kafka(kafka) = kafka.kind else { panic!("{kafka:?}") };
    assert_eq!((&*kafka.publish_topic, &*kafka.group), ("t", "fairlane-x"));
    assert_eq!(
        (kafka.security_protocol(), kafka.partition_wait),
        ("PLAINTEXT", Duration::from_secs(300))
    );
    assert!(!kafka.check_crcs);
    let SourceKind::Kafka(checked) = only(&format!("{KAFKA}check_crcs = true")).kind else {
        panic!()
    };
    assert!(checked.check_crcs);
}

#[test]
fn plain_records_have_their_bot_and_type_where_the_source_says() {
    let source = only(&format!(
        "{NATS}start = \"group:g\"\nbot = \"subject:2\"\ntype = \"fixed:a.b:c\"\nformat = \"binary\""
    ));
    assert_eq!(source.start, SourceStart::Group("g".to_owned()));
    assert_eq!(source.bot, Some(BotFrom::Subject(2)));
    assert_eq!(source.event_type, TypeFrom::Fixed("a.b:c".to_owned()));
    assert_eq!(source.format, PublishFormat::Binary);
    let source = only(&format!("{KAFKA}bot = \"key\"\ntype = \"header:ce:type\""));
    assert_eq!(source.bot, Some(BotFrom::Key));
    assert_eq!(source.event_type, TypeFrom::Header("ce:type".to_owned()));
}

#[test]
fn secrets_come_from_the_text_or_a_file_and_are_never_shown() {
    let secret = file("  from-file\n");
    let path = secret.path().display();
    let hidden = Hidden::new("from-file");
    let login = |keys: &str| match only(&format!("{NATS}{keys}")).kind {
        SourceKind::Nats(nats) => nats.login,
        SourceKind::Kafka(_) => panic!("{keys}"),
    };
    let user = NatsLogin::User { user: "u".to_owned(), password: hidden.clone() };
    assert_eq!(login(&format!("user = \"u\"\npassword_file = \"{path}\"")), user);
    assert_eq!(login("user = \"u\"\npassword = \"from-file\""), user);
    assert_eq!(login(&format!("token_file = \"{path}\"")), NatsLogin::Token(hidden.clone()));
    assert_eq!(login(&format!("nkey_seed = \"{SEED}\"")), NatsLogin::Nkey(Hidden::new(SEED)));
    let creds = NatsLogin::Credentials(secret.path().to_owned());
    assert_eq!(login(&format!("creds_file = \"{path}\"")), creds);

    let sasl = |keys: &str| match only(&format!("{KAFKA}security = \"sasl_tls\"\n{keys}")).kind {
        SourceKind::Kafka(kafka) => (kafka.security_protocol(), kafka.sasl.unwrap()),
        SourceKind::Nats(_) => panic!("{keys}"),
    };
    let mechanism = SaslMechanism::ScramSha512;
    let scram = Sasl::Password { mechanism, username: "u".to_owned(), password: hidden };
    let keys =
        format!("sasl_mechanism = \"SCRAM-SHA-512\"\nusername = \"u\"\npassword_file = \"{path}\"");
    assert_eq!(sasl(&keys), ("SASL_SSL", scram));
    let bearer = Sasl::OauthBearer { token_file: secret.path().to_owned() };
    assert_eq!(bearer.mechanism(), "OAUTHBEARER");
    assert_eq!(
        sasl(&format!("sasl_mechanism = \"OAUTHBEARER\"\ntoken_file = \"{path}\"")).1,
        bearer
    );

    let config = Config::from_toml(&format!("{NATS}user = \"u\"\npassword = \"hidden\""), "f");
    let shown = format!("{:?}", config.unwrap());
    assert!(!shown.contains("hidden") && shown.contains("***"), "{shown}");
}

#[test]
fn events_are_published_to_the_first_stream_or_else_the_first_source() {
    let bus = |text: &str| Config::from_toml(text, "f").unwrap().bus;
    assert_eq!(bus(&format!("{NATS}{KAFKA}")).published_stream(), Some("fairlane:events"));
    let both = bus(&format!("bus.streams = []\n{KAFKA}{NATS}"));
    assert_eq!((both.published(), both.published_stream()), ("k", None));
    let both = bus(&format!("bus.publish = \"n\"\n{KAFKA}{NATS}"));
    assert_eq!(
        (both.published_source().unwrap().name.as_str(), both.published_stream()),
        ("n", None)
    );
    // The only subject is where they go.
    let text = NATS.replace("publish_subject = \"e\"", "subjects = [\"a.b\"]");
    let SourceKind::Nats(nats) = only(&text).kind else { panic!("{text}") };
    assert_eq!(nats.publish_subject.as_deref(), Some("a.b"));
}

#[test]
fn a_source_that_cannot_be_used_is_refused_with_its_line_key_and_remedy() {
    let name = |name: &str| NATS.replace("\"n\"", &format!("{name:?}"));
    let nats = |line: &str| format!("{NATS}{line}");
    let table = [
        (name(""), "2: bus.sources[0].name is not set; give the source a name, such as \"orders\""),
        (name("A b"), "2: bus.sources[0].name is \"A b\"; write 1 to 64 of a-z, 0-9 and '-'"),
        (format!("{NATS}{NATS}"), "8: bus.sources[1].name is \"n\" once more; give each its own"),
        (
            format!("bus.streams = [\"n\"]\n{NATS}"),
            "3: bus.sources[0].name is \"n\", as is one of bus.streams; rename it",
        ),
        (
            format!("bus.streams = [\"nats:n/x\"]\n{NATS}"),
            "1: bus.streams names \"nats:n/x\", but positions of the source \"n\" are stored under such names; rename the source",
        ),
        (
            "[[bus.sources]]\nname = \"a\"".to_owned(),
            "1: bus.sources[0].kind is not set; write \"nats\" or \"kafka\"",
        ),
        (
            "[[bus.sources]]\nkind = \"redis\"".to_owned(),
            "2: bus.sources[0].kind is \"redis\"; name the streams of Redis in bus.streams, and remove this table",
        ),
        (
            "[[bus.sources]]\nkind = \"amqp\"".to_owned(),
            "2: bus.sources[0].kind is \"amqp\"; write \"nats\" or \"kafka\"",
        ),
        (
            nats("topic = \"t\""),
            "7: unknown key \"bus.sources[0].topic\"; did you mean \"bus.sources[0].topics\"?",
        ),
        (
            nats("topics = [\"t\"]"),
            "7: bus.sources[0].topics is a key of Kafka, but kind is \"nats\"; remove it",
        ),
        (
            nats("start = \"group:\""),
            "7: bus.sources[0].start names no group; write \"group:NAME\", or \"pipeline\"",
        ),
        (
            nats("start = \"end\""),
            "7: bus.sources[0].start is \"end\"; write \"pipeline\" or \"group:NAME\"",
        ),
        (
            nats("bot = \"subject:0\""),
            "7: bus.sources[0].bot is \"subject:0\"; tokens count from 1: write \"subject:1\" to \"subject:64\"",
        ),
        (
            nats("bot = \"subject:x\""),
            "7: bus.sources[0].bot is \"subject:x\"; write \"key\", \"header:NAME\" or \"subject:N\"",
        ),
        (
            nats("bot = \"key\""),
            "7: bus.sources[0].bot is \"key\", but messages of NATS have no key; write \"header:NAME\" or \"subject:N\"",
        ),
        (
            nats("bot = \"header:\""),
            "7: bus.sources[0].bot has an unusable header; it has 1 to 1024 bytes without control characters",
        ),
        (
            nats("type = \"fixed:a\""),
            "7: bus.sources[0].type has no effect on CloudEvents, which have their own; set bot, or remove it",
        ),
        (
            nats("type = \"x\""),
            "7: bus.sources[0].type is \"x\"; write \"topic\", \"header:NAME\" or \"fixed:TEXT\"",
        ),
        (
            nats("format = \"avro\""),
            "7: bus.sources[0].format is \"avro\"; write \"structured\" or \"binary\"",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), format!("f.toml:{message}"), "{text}");
    }
}

#[test]
fn servers_streams_and_subjects_that_cannot_be_used_are_refused() {
    let nats = |line: &str| format!("{NATS}{line}");
    let servers = |list: &str| NATS.replace("[\"nats://h\"]", list);
    let table = [
        (
            servers("[]"),
            "4: bus.sources[0].servers is not set; name some servers, such as [\"nats://host:4222\"]",
        ),
        (
            servers("[\"h:4222\"]"),
            "4: bus.sources[0].servers holds an address without a known scheme; write nats://HOST[:PORT], or tls://HOST[:PORT] with TLS",
        ),
        (
            servers("[\"nats://h/x\"]"),
            "4: bus.sources[0].servers holds \"nats://h/x\"; write nats://HOST[:PORT], or tls://HOST[:PORT] with TLS",
        ),
        (
            servers("[\"nats://u:secret@h\"]"),
            "4: bus.sources[0].servers holds a user, password or token, which would show up in logs; use user and password_file, or token_file",
        ),
        (
            servers("[\"nats://h\", \"tls://h\"]"),
            "4: bus.sources[0].servers holds nats:// and tls://; write tls:// for all servers, or for none",
        ),
        (NATS.replace("\"S\"", "\"\""), "5: bus.sources[0].stream is not set; name the stream"),
        (
            NATS.replace("\"S\"", "\"a.b\""),
            "5: bus.sources[0].stream is \"a.b\"; write 1 to 255 bytes without spaces and without . * > / \\",
        ),
        (
            nats("subjects = [\"a..b\"]"),
            "7: bus.sources[0].subjects holds \"a..b\"; write tokens between dots, such as \"events.*\" or \"orders.>\"",
        ),
        (
            NATS.replace("\"e\"", "\"e.*\""),
            "6: bus.sources[0].publish_subject is \"e.*\"; write a subject without wildcards, such as \"events.{bot}\"",
        ),
        (
            nats("subjects = [\"a\"]"),
            "6: bus.sources[0].publish_subject is \"e\", which `subjects` does not hold: Fairlane would not read what it publishes; add it there",
        ),
        (
            format!("bus.publish = \"n\"\n{}", NATS.replace("publish_subject = \"e\"", "")),
            "2: bus.sources[0].publish_subject is not set, but HTTP and rules publish to this source (bus.publish); write a subject of the stream, such as \"events.{bot}\"",
        ),
        (
            nats("ca_file = \"/dev/null\""),
            "7: bus.sources[0].ca_file is set, but servers do not ask for TLS; write tls://… there, or leave it out",
        ),
        (
            servers("[\"tls://h\"]") + "ca_file = \"/nowhere/ca.pem\"",
            "7: bus.sources[0].ca_file names /nowhere/ca.pem, which cannot be read (No such file or directory (os error 2))",
        ),
        (
            servers("[\"tls://h\"]") + "cert_file = \"/dev/null\"",
            "1: bus.sources[0].key_file is not set, but bus.sources[0].cert_file is; set both, or neither",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), format!("f.toml:{message}"), "{text}");
    }
}

#[test]
fn a_login_that_cannot_be_used_is_refused_without_quoting_it() {
    let nats = |lines: &str| format!("{NATS}{lines}");
    let kafka = |lines: &str| format!("{KAFKA}{lines}");
    let table = [
        (
            nats("user = \"u\"\ntoken = \"secret\""),
            "8: bus.sources[0].token is set beside user; log in one way, and remove the other",
        ),
        (nats("user = \"u\""), "1: bus.sources[0].password is not set; set it or password_file"),
        (
            nats("password = \"secret\""),
            "1: bus.sources[0].user is not set, but it belongs to the password; set it",
        ),
        (
            nats("user = \"u\"\npassword = \"secret\"\npassword_file = \"f\""),
            "9: bus.sources[0].password_file is set beside password; remove one of them",
        ),
        (
            nats("token_file = \"/nowhere/token\""),
            "7: bus.sources[0].token_file names /nowhere/token, which cannot be read (No such file or directory (os error 2))",
        ),
        (
            nats("token_file = \"/dev/null\""),
            "7: bus.sources[0].token_file names /dev/null, which is empty",
        ),
        (
            nats("nkey_seed = \"SUsecret\""),
            "7: bus.sources[0].nkey_seed is no seed of a user; it has 58 characters and starts with SU",
        ),
        (
            nats("creds_file = \"/nowhere/creds\""),
            "7: bus.sources[0].creds_file names /nowhere/creds, which cannot be read (No such file or directory (os error 2))",
        ),
        (
            kafka("username = \"u\""),
            "6: bus.sources[0].username is set, but security does not ask for SASL; write \"sasl_tls\" there, or remove it",
        ),
        (
            kafka("user = \"u\""),
            "6: bus.sources[0].user is a key of NATS, but kind is \"kafka\"; remove it",
        ),
        (
            kafka("security = \"ssl\""),
            "6: bus.sources[0].security is \"ssl\"; write \"plaintext\" or \"tls\" or \"sasl\" or \"sasl_tls\"",
        ),
        (
            kafka("security = \"sasl_tls\""),
            "1: bus.sources[0].sasl_mechanism is not set; write \"PLAIN\" or \"SCRAM-SHA-256\" or \"SCRAM-SHA-512\" or \"OAUTHBEARER\"",
        ),
        (
            kafka("security = \"sasl_tls\"\nsasl_mechanism = \"GSSAPI\""),
            "7: bus.sources[0].sasl_mechanism is \"GSSAPI\"; write \"PLAIN\" or \"SCRAM-SHA-256\" or \"SCRAM-SHA-512\" or \"OAUTHBEARER\"",
        ),
        (
            kafka("security = \"sasl_tls\"\nsasl_mechanism = \"OAUTHBEARER\""),
            "1: bus.sources[0].token_file is not set, but OAUTHBEARER needs it; name a file that holds the token",
        ),
        (
            kafka("ca_file = \"/dev/null\""),
            "6: bus.sources[0].ca_file is set, but security does not ask for TLS; write \"tls\" or \"sasl_tls\" there, or leave it out",
        ),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), format!("f.toml:{message}"), "{text}");
    }
}

#[test]
fn brokers_and_topics_that_cannot_be_used_are_refused() {
    let kafka = |line: &str| format!("{KAFKA}{line}");
    let topics = |list: &str| KAFKA.replace("[\"t\", \"u\"]", list);
    let many = (0..17).map(|n| KAFKA.replace("\"k\"", &format!("\"k{n}\""))).collect::<String>();
    let table = [
        (
            KAFKA.replace("h:9092", "h"),
            "4: bus.sources[0].brokers holds \"h\"; write HOST:PORT, such as \"kafka-1.example:9092\" or \"[fd00::2]:9092\"",
        ),
        (
            KAFKA.replace("[\"h:9092\"]", "[]"),
            "4: bus.sources[0].brokers is not set; name some brokers, such as [\"host:9092\"]",
        ),
        (topics("[]"), "5: bus.sources[0].topics is not set; name at least one topic"),
        (
            topics("[\"t\", \"t\"]"),
            "5: bus.sources[0].topics names \"t\" twice; name each topic once",
        ),
        (
            topics("[\"a b\"]"),
            "5: bus.sources[0].topics holds \"a b\"; each has 1 to 249 of A-Z, a-z, 0-9, '.', '_' and '-'",
        ),
        (
            kafka("publish_topic = \"x\""),
            "6: bus.sources[0].publish_topic is \"x\", which `topics` does not hold: Fairlane would not read what it publishes; add it there",
        ),
        (
            kafka("bot = \"subject:1\""),
            "6: bus.sources[0].bot names a token of a subject, but records of Kafka have none; write \"key\" or \"header:NAME\"",
        ),
        (
            kafka("partition_wait = \"2d\""),
            "6: bus.sources[0].partition_wait is 2days; write a duration from 0s to 1d",
        ),
        (many, "1: bus.sources has 17 entries; at most 16 are allowed"),
    ];
    for (text, message) in table {
        assert_eq!(refusal(&text), format!("f.toml:{message}"), "{text}");
    }
}

#[test]
fn a_variable_for_a_source_names_the_list_that_only_a_file_can_hold() {
    let variables = [("FAIRLANE__BUS__SOURCES__0__PASSWORD".to_owned(), "secret".to_owned())];
    let error = Config::load_with(None, variables.into_iter()).unwrap_err().to_string();
    assert_eq!(
        error,
        "environment variable FAIRLANE__BUS__SOURCES__0__PASSWORD: bus.sources is a list of tables, which only a file can hold; unset the variable"
    );
}
