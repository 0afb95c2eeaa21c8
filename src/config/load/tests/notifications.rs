//! `[notifications]` and the built-in pipeline of that name.

use std::time::Duration;

use super::refusal;
use crate::config::{Cap, Config, OnThrottle};

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
            r#"f.toml:1: notifications.caps holds "0/day"; write a number from 1 to 1000 before the slash"#,
        ),
        (
            "notifications.bot_caps = [\"10/day\"]",
            r#"f.toml:1: notifications.bot_caps holds "10/day"; write NAME = NUMBER/TIME, such as "shop-7 = 10/day" or "shop-7 = none""#,
        ),
        (
            "notifications.type_caps = [\"promo = 1/500d\"]",
            r#"f.toml:1: notifications.type_caps holds "promo = 1/500d"; write a time from 1s to 366d after the slash, such as "promo = 10/day" or "promo = none""#,
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
