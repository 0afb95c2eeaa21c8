//! Requests about notifications that are refused, with the reason.

use serde_json::json;

use super::{FORM, JSON, accepted, counted, post};
use crate::support::http::Operation;
use crate::support::instance::Instance;
use crate::support::notification_rig::Rig;
use crate::support::receiver::{Receiver, Reply};
use crate::support::recorder::Log;

#[tokio::test]
async fn a_request_that_only_looks_schedules_and_releases_nothing() {
    let rig = Rig::new(&[("notifications.online_threshold", "\"0s\"")]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::content().await;
    let body = json!({ "url": receiver.url(), "uid": "u", "send_than_online": true });
    accepted(&post(&client, JSON, body.to_string()).await);
    let schedules = format!("/send_delayed?delay=0&url={}", receiver.url());
    for path in ["/user_online?uid=u", schedules.as_str()] {
        let head = client.head("HEAD", path, &[("connection", "close")]);
        let answer = String::from_utf8(client.raw(head.as_bytes()).await).unwrap();
        let is_refused = answer.starts_with("HTTP/1.1 405 ");
        assert!(is_refused && answer.contains("allow: GET, POST\r\n"), "{answer}");
    }
    let row = counted(&client, "", "none").await;
    assert_eq!(row["received"], 1, "{row}");
    assert_eq!(client.get("/user_online?uid=u").await.json(), json!({ "queued": 1 }));
    instance.stop().await;
}

#[tokio::test]
async fn an_unusable_value_is_refused_by_its_parameter_and_nothing_is_accepted() {
    let rig = Rig::new(&[("callbacks.allow_nets", "[]")]);
    let instance = rig.start().await;
    let client = instance.client();
    let (year, long) = ("31622401", "x".repeat(3_000));
    let good = "delay=60&url=http://93.184.216.34/";
    for (parameter, query) in [
        ("delay", "url=http://93.184.216.34/".to_owned()),
        ("delay", "delay=-1&url=http://93.184.216.34/".to_owned()),
        ("delay", "delay=soon&url=http://93.184.216.34/".to_owned()),
        ("delay", "delay=nan&url=http://93.184.216.34/".to_owned()),
        ("delay", format!("delay={year}&url=http://93.184.216.34/")),
        ("delay", format!("delay=1&{good}")),
        ("at", format!("{good}&at=2026-11-20T09:00:00Z")),
        ("at", "at=tomorrow&url=http://93.184.216.34/".to_owned()),
        ("at", "at=2999-01-01T00:00:00Z&url=http://93.184.216.34/".to_owned()),
        ("url", "delay=60".to_owned()),
        ("url", "delay=60&url=".to_owned()),
        ("url", "delay=60&url=nonsense".to_owned()),
        ("url", "delay=60&url=ftp://93.184.216.34/".to_owned()),
        ("url", "delay=60&url=http://user@93.184.216.34/".to_owned()),
        ("url", "delay=60&url=http://93.184.216.34:22/".to_owned()),
        ("url", format!("delay=60&url=http://93.184.216.34/{long}")),
        ("recheck_url", format!("{good}&recheck_url=http://10.0.0.1/")),
        ("uid", format!("{good}&uid={long}")),
        ("uid", format!("{good}&uid=a%0Ab")),
        ("uid", format!("{good}&send_than_online=1")),
        ("type", format!("{good}&type={}", &long[..65])),
        ("send_than_online", format!("{good}&send_than_online=maybe")),
        ("send_than_online", format!("{good}&uid=u&send_than_online=2")),
        ("method", format!("{good}&method=HEAD")),
        ("body", format!("{good}&method=GET&body=x")),
        ("key", format!("{good}&key={}", &long[..256])),
        ("key", format!("{good}&on_duplicate=replace")),
        ("on_duplicate", format!("{good}&key=k&on_duplicate=both")),
        ("expires_in", format!("{good}&expires_in=0")),
        ("expires_in", format!("{good}&expires_in={year}")),
        ("bot", format!("{good}&bot=a%00b")),
        ("recheckurl", format!("{good}&recheckurl=http://93.184.216.34/")),
    ] {
        let answer = client.get(&format!("/send_delayed?{query}")).await;
        assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"), "{query}");
        let problem = answer.json();
        assert_eq!(problem["errors"][0]["field"], parameter, "{query}: {problem}");
        let answer = post(&client, FORM, &query).await;
        assert_eq!(answer.json()["errors"][0]["field"], parameter, "{query}");
    }
    let long_user = format!("/user_online?uid={}", &long[..257]);
    for (parameter, path) in [
        ("uid", &*long_user),
        ("uid", "/user_online"),
        ("uid", "/user_online?uid="),
        ("bot", "/user_online?uid=u&bot=%00"),
        ("id", "/user_online?uid=u&id=1"),
    ] {
        let answer = client.get(path).await;
        assert_eq!(
            (answer.code, &answer.json()["errors"][0]["field"]),
            (400, &parameter.into()),
            "{path}"
        );
    }
    assert_eq!(client.get("/v1/notifications/stats").await.json()["stats"], json!([]));
    instance.stop().await;
}

#[tokio::test]
async fn no_address_inside_is_accepted_however_it_is_written() {
    let rig = Rig::new(&[("callbacks.allow_nets", "[\"127.0.0.1\"]")]);
    let instance = rig.start().await;
    let client = instance.client();
    let inside =
        Receiver::start_at(([127, 0, 0, 2], 0).into(), async |_| Reply::new(200, "")).await;
    let port = inside.address.port();
    for host in [
        "127.0.0.2",
        "0x7f.0.0.2",
        "0x7f000002",
        "2130706434",
        "0177.0.0.2",
        "127.2",
        "127.0.2",
        "[::ffff:127.0.0.2]",
        "[::ffff:7f00:2]",
        "[64:ff9b::7f00:2]",
        "[::1]",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "[fd00::1]",
        "[fe80::1]",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "%31%32%37.0.0.2",
        "127。0。0。2",
    ] {
        for parameter in ["url", "recheck_url"] {
            let mut body = json!({"delay": 0, "url": "http://127.0.0.1/"});
            body[parameter] = format!("http://{host}:{port}/").into();
            let answer = post(&client, JSON, body.to_string()).await;
            assert_eq!(answer.code, 400, "{host}: {answer:?}");
            assert_eq!(answer.json()["errors"][0]["field"], parameter, "{host}: {answer:?}");
        }
    }
    assert_eq!(inside.connections(), 0);
    instance.stop().await;
}

#[tokio::test]
async fn where_notifications_do_not_run_every_route_says_so() {
    let rig = Rig::new(&[("pipelines.notifications.enabled", "false")]);
    let instance = Instance::start(&rig.config, Log::default().content()).await;
    let client = instance.client();
    let mut asked = 0;
    for operation in Operation::all(&client).await {
        let ours = ["/send_delayed", "/user_online", "/v1/notifications"];
        if !ours.iter().any(|path| operation.template.starts_with(path)) {
            continue;
        }
        let (method, template) = (operation.method.as_str(), operation.template.as_str());
        let body = match (method, template) {
            ("PATCH", _) => r#"{"delay":1}"#,
            ("POST", "/send_delayed") => r#"{"delay":1,"url":"http://93.184.216.34/"}"#,
            ("POST", _) => r#"{"uid":"u"}"#,
            _ => "",
        };
        let mut path = operation.path(&[("url", "http://93.184.216.34/")]);
        if (method, template) == ("GET", "/send_delayed") {
            path.push_str("&delay=1");
        }
        let kind = [("content-type", JSON)];
        let answer = client.send(&operation.method, &path, &kind, body.as_bytes()).await;
        assert_eq!((answer.code, answer.problem().as_str()), (404, "no-notifications"), "{path}");
        asked += 1;
    }
    assert_eq!(asked, 8);
    instance.stop().await;
}
