//! `[callbacks]`, its sets of headers, and the URLs of pipelines.

use super::{VALID, pipeline_of, refusal, with_environment};
use crate::config::Config;

#[test]
fn callbacks_and_urls_are_read_and_their_secrets_never_shown() {
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let push = "[pipelines.p]\nhandler = \"push\"\nevents = [\"*\"]\n";
    let callbacks = format!(
        "[callbacks]\nallow_nets = [\"10.0.0.0/8\", \"::1\"]\nsecrets = [\"{SECRET}\"]\nname_servers = [\"10.0.0.2\", \"[fd00::2]:5353\"]"
    );
    let url = "url = \"http://127.0.0.1:9000/hook?token=hidden\"";
    let config = Config::from_toml(&format!("{push}{url}\n{callbacks}"), "f").unwrap();
    let nets: Vec<String> = config.callbacks.allow_nets.iter().map(ToString::to_string).collect();
    assert_eq!(nets, ["10.0.0.0/8", "::1/128"]);
    assert_eq!(config.callbacks.secrets.len(), 1);
    let servers = ["10.0.0.2:53", "[fd00::2]:5353"].map(|server| server.parse().unwrap());
    assert_eq!(config.callbacks.name_servers, servers);
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
            "[callbacks]\nname_servers = [\"10.0.0.2\", \"dns.example\"]".to_owned(),
            r#"f.toml:2: callbacks.name_servers holds "dns.example"; write ADDRESS or ADDRESS:PORT, such as "10.0.0.2" or "[fd00::2]:53""#,
        ),
        (
            format!("[callbacks]\nname_servers = {:?}", ["10.0.0.2"; 9]),
            "f.toml:2: callbacks.name_servers has 9 entries; at most 8 are allowed",
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

#[test]
fn sets_of_headers_are_read_and_a_bad_one_is_refused_with_its_line_and_key() {
    let set = r#"name = "crm", headers_file = "f", hosts = ["crm.example.com"]"#;
    let text = format!("callbacks.headers = [{{ {set} }}]");
    let sets = Config::from_toml(&text, "f").unwrap().callbacks.headers;
    let [crm] = sets.as_slice() else { panic!("{sets:?}") };
    assert_eq!((&*crm.name, crm.headers_file.to_str()), ("crm", Some("f")));
    assert_eq!(
        (&*crm.bots, &*crm.hosts),
        (&["*".to_owned()][..], &["crm.example.com".to_owned()][..])
    );
    let long = set.replace("crm\"", &format!("{}\"", "x".repeat(65)));
    for (sets, problem) in [
        (
            set.replace("\"crm.example.com\"", ""),
            "callbacks.headers[0].hosts is empty; name the hosts that get these headers, such as [\"crm.example.com\"]",
        ),
        (
            format!("{set}, bots = []"),
            "callbacks.headers[0].bots is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]",
        ),
        (set.replace("\"f\"", "\"\""), "callbacks.headers[0].headers_file is not set; name a file"),
        (
            format!("{set} }}, {{ {set}"),
            "callbacks.headers[1].name is \"crm\" once more; give each its own",
        ),
        (long, "callbacks.headers[0].name has 65 bytes; at most 64 are allowed"),
        (
            format!("{set}, value = \"hidden\""),
            "unknown key \"callbacks.headers[0].value\"; `fairlane config` prints every key",
        ),
    ] {
        let message = refusal(&format!("callbacks.headers = [{{ {sets} }}]"));
        assert_eq!(message, format!("f.toml:1: {problem}"), "{sets}");
    }
}
