//! Notifications over HTTP: with the parameters that callers know, in every way they send them.

mod refusals;

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::notifications::record::{NotificationId, State};
use serde_json::{Value, json};

use crate::support::http::{Client, Response};
use crate::support::notification_rig::{LONG, Rig, ends, kept};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, Persistence};
use crate::support::served::Served;
use crate::support::wait::eventually;

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

/// The id of an accepted notification.
fn accepted(answer: &Response) -> NotificationId {
    assert_eq!((answer.code, &*answer.body), (200, &b"ok"[..]), "{answer:?}");
    answer.header("x-event-id").expect("there is an id").parse().unwrap()
}

async fn post(client: &Client, kind: &str, body: impl AsRef<[u8]>) -> Response {
    client.send("POST", "/send_delayed", &[("content-type", kind)], body.as_ref()).await
}

/// The counters of a type, as the route reports them.
async fn counted(client: &Client, query: &str, kind: &str) -> Value {
    let answer = client.get(&format!("/v1/notifications/stats{query}")).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    let stats = answer.json()["stats"].clone();
    let row = stats.as_array().unwrap().iter().find(|row| row["type"] == kind);
    row.cloned().unwrap_or_default()
}

#[tokio::test]
async fn the_sequence_of_old_is_kept_received_fetched_processed_sent() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::start(async |_| Reply::new(200, "OK")).await;
    let host = receiver.address;
    let before = SystemClock.now();
    let path = format!(
        "/send_delayed?delay=1&url=http://{host}/hook%3Fa=1&uid=42&type=welcome&recheck_url=http://{host}/recheck&send_than_online=false"
    );
    // The state after the request is accepted.
    let id = accepted(&client.get(&path).await);
    let told = client.get(&format!("/v1/notifications/{id}")).await.json();
    assert_eq!(
        (&told["state"], &told["uid"], &told["type"]),
        (&"scheduled".into(), &"42".into(), &"welcome".into())
    );
    let row = counted(&client, "", "welcome").await;
    assert_eq!((&row["received"], &row["sent"]), (&1.into(), &0.into()), "{row}");
    // When due, the notification is fetched and processed. It is sent once the recheck answers ok.
    ends(&instance, id, State::Sent).await;
    let calls = receiver.calls();
    let lines: Vec<&str> = calls.iter().map(|call| call.line.as_str()).collect();
    assert_eq!(lines, ["GET /recheck HTTP/1.1", "GET /hook?a=1 HTTP/1.1"]);
    assert!(calls.iter().all(|call| call.at >= before + Duration::from_secs(1)), "never early");
    for by in ["?by=day", "?by=hour&last=2", ""] {
        let row = counted(&client, by, "welcome").await;
        let counts = ["received", "sent", "throttled", "dead"].map(|name| row[name].as_u64());
        assert_eq!(counts, [Some(1), Some(1), Some(0), Some(0)], "{row}");
        assert!(row["late_p99_ms"].as_u64().unwrap() < 60_000, "{row}");
    }
    // The first send set the time of the user, so the next one is throttled.
    let again = accepted(&client.get(&path.replace("delay=1", "delay=0")).await);
    let ended = ends(&instance, again, State::Throttled).await;
    assert!(ended.reason.contains("1800 s"), "{ended:?}");
    assert_eq!(counted(&client, "", "welcome").await["throttled"], 1);
    assert_eq!(receiver.called(), 2);
    instance.stop().await;
}

#[tokio::test]
async fn a_form_json_and_the_query_are_the_same_and_json_may_have_a_body_of_its_own() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::content().await;
    let (url, encoded) = (receiver.url(), receiver.url().replace(':', "%3A").replace('/', "%2F"));
    let ids = [
        client.get(&format!("/send_delayed?delay=0&bot=shop&url={encoded}")).await,
        client.post(&format!("/send_delayed?delay=0&bot=shop&url={encoded}")).await,
        post(&client, FORM, format!("delay=0.01&bot=shop&url={encoded}&body=a+b&method=put")).await,
        post(
            &client,
            JSON,
            json!({"delay": 0, "bot": "shop", "url": url, "body": {"a": [1]}}).to_string(),
        )
        .await,
    ];
    let mut calls = Vec::new();
    for answer in &ids {
        let id = accepted(answer);
        assert_eq!(ends(&instance, id, State::Sent).await.bot.as_str(), "shop");
        let is_its = |call: &Call| call.headers["webhook-id"] == id.message().as_str();
        let call = receiver.calls().into_iter().find(is_its).expect("it arrived");
        let method = call.line.split(' ').next().unwrap().to_owned();
        calls.push((method, String::from_utf8(call.body).unwrap()));
    }
    let expected = [("GET", ""), ("GET", ""), ("PUT", "a b"), ("POST", r#"{"a":[1]}"#)];
    assert_eq!(calls, expected.map(|(method, body)| (method.to_owned(), body.to_owned())));
    instance.stop().await;
}

#[tokio::test]
async fn a_notification_is_looked_up_moved_and_cancelled_by_its_id() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::content().await;
    let change = async |id: NotificationId, body: Value| {
        let kind = [("content-type", JSON)];
        client
            .send("PATCH", &format!("/v1/notifications/{id}"), &kind, body.to_string().as_bytes())
            .await
    };
    let cancel = async |id: NotificationId| {
        client.send("DELETE", &format!("/v1/notifications/{id}"), &[], b"").await
    };
    let send = async |more: &str| {
        accepted(
            &client.get(&format!("/send_delayed?delay=3600&url={}{more}", receiver.url())).await,
        )
    };
    let (moved, cancelled) = (send("").await, send("&key=k").await);
    let told = change(moved, json!({"at": "2999-01-01T00:00:00Z"})).await;
    assert_eq!((told.code, &told.json()["errors"][0]["field"]), (400, &"at".into()));
    for (field, body) in [
        ("delay", json!({})),
        ("at", json!({"at": "x"})),
        ("delay", json!({"delay": -1})),
        ("at", json!({"delay": 1, "at": "2026-11-20T09:00:00Z"})),
        ("when", json!({"when": 1})),
    ] {
        let told = change(moved, body.clone()).await;
        assert_eq!((told.code, &told.json()["errors"][0]["field"]), (400, &field.into()), "{body}");
    }
    let due = change(moved, json!({"delay": 1_800})).await.json()["due"].clone();
    let told = client.get(&format!("/v1/notifications/{moved}")).await.json();
    assert_eq!((&told["due"], &told["next"]), (&due, &due));
    assert_eq!(change(moved, json!({"delay": 0.1})).await.code, 200);
    ends(&instance, moved, State::Sent).await;
    for answer in [cancel(moved).await, change(moved, json!({"delay": 1})).await] {
        assert_eq!((answer.code, answer.problem().as_str()), (409, "notification-over"));
    }
    // The key is taken: the answer has the id of its holder.
    assert_eq!(send("&key=k").await, cancelled);
    assert_eq!((cancel(cancelled).await.code, cancel(cancelled).await.code), (204, 204));
    assert_eq!(kept(&instance, cancelled).await.state, State::Cancelled);
    let (first, second) = (send("&key=k").await, send("&key=k&on_duplicate=replace").await);
    assert!(first != cancelled && second != first, "an ended one has no key");
    assert_eq!(kept(&instance, first).await.reason, format!("replaced by {second}"));
    let unknown = "0.0192f1b0c1d27c3e8f00112233445566".parse().unwrap();
    for answer in [
        cancel(unknown).await,
        change(unknown, json!({"delay": 1})).await,
        client.get(&format!("/v1/notifications/{unknown}")).await,
    ] {
        assert_eq!((answer.code, answer.problem().as_str()), (404, "no-notification"));
    }
    assert_eq!(client.get("/v1/notifications/x").await.code, 400);
    assert_eq!(receiver.called(), 1);
    instance.stop().await;
}

#[tokio::test]
async fn a_waiting_notification_is_sent_when_its_user_is_online_however_that_is_told() {
    let rig = Rig::new(&[("notifications.online_threshold", "\"0s\"")]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::content().await;
    let body = json!({"url": receiver.url(), "uid": "ü 1", "send_than_online": true}).to_string();
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(accepted(&post(&client, JSON, &body).await));
    }
    assert_eq!(client.get("/user_online?uid=other").await.json(), json!({"queued": 0}));
    assert_eq!(client.get("/user_online?uid=%C3%BC+1&bot=shop").await.json(), json!({"queued": 0}));
    assert_eq!(receiver.called(), 0);
    assert_eq!(client.get("/user_online?uid=%C3%BC+1").await.json(), json!({"queued": 1}));
    let form = [("content-type", FORM)];
    let told = client.send("POST", "/user_online", &form, "uid=ü 1".as_bytes()).await;
    assert_eq!(told.json(), json!({"queued": 1}));
    let told = client.send(
        "POST",
        "/user_online",
        &[("content-type", JSON)],
        r#"{"uid":"ü 1"}"#.as_bytes(),
    );
    assert_eq!(told.await.json(), json!({"queued": 1}));
    assert_eq!(client.get("/user_online?uid=%C3%BC+1").await.json(), json!({"queued": 0}));
    for id in ids {
        ends(&instance, id, State::Sent).await;
    }
    instance.stop().await;
}

#[tokio::test]
async fn a_flag_that_clients_of_old_send_without_a_value_has_the_notification_wait() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let url = "http://127.0.0.1:8/";
    for (flag, waits) in [
        ("&send_than_online", true),
        ("&send_than_online=", true),
        ("&send_than_online=True", true),
        ("&send_than_online=YES", true),
        ("&send_than_online=on", true),
        ("&send_than_online=No", false),
        ("&send_than_online=off", false),
        ("", false),
    ] {
        let query = format!("delay=60&uid=u&url={url}{flag}");
        let by_query = client.get(&format!("/send_delayed?{query}")).await;
        let by_form = post(&client, FORM, &query).await;
        for answer in [by_query, by_form] {
            let id = accepted(&answer);
            assert_eq!(kept(&instance, id).await.waits, waits, "{flag}");
        }
    }
    for (value, waits) in [
        (json!(true), true),
        (json!(false), false),
        (json!(null), false),
        (json!(""), true),
        (json!(1), true),
        (json!("no"), false),
    ] {
        let body = json!({"delay": 60, "uid": "u", "url": url, "send_than_online": value});
        let id = accepted(&post(&client, JSON, body.to_string()).await);
        assert_eq!(kept(&instance, id).await.waits, waits, "{body}");
    }
    let schema = client.get("/openapi.json").await.json();
    let flags = &schema["components"]["schemas"]["SendDelayed"]["properties"]["send_than_online"];
    let kinds = flags["oneOf"].as_array().unwrap().iter();
    let words = kinds.filter_map(|one| one["enum"].as_array());
    let words: Vec<&Value> = words.flatten().filter(|word| word.is_string()).collect();
    assert_eq!(words.len(), 9, "{flags}");
    for word in words {
        let path = format!(
            "/send_delayed?delay=60&uid=u&url={url}&send_than_online={}",
            word.as_str().unwrap()
        );
        accepted(&client.get(&path).await);
    }
    instance.stop().await;
}

#[tokio::test]
async fn named_headers_reach_their_hosts_for_their_bots_and_are_shown_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("crm.headers");
    std::fs::write(&file, "# the CRM\nAuthorization: Bearer s3cret-of-the-crm\nX-Tenant: 7\n")
        .unwrap();
    let say_ok = async |_| Reply::new(200, "ok");
    let (receiver, elsewhere) = (Receiver::start(say_ok).await, Receiver::start(say_ok).await);
    let sets = format!(
        "[{{ name = \"crm\", headers_file = {file:?}, bots = [\"shop\"], hosts = [\"127.0.0.1:{}\"] }}]",
        receiver.address.port()
    );
    let rig = Rig::new(&[("callbacks.headers", &sets)]);
    let process = Served::start(&rig.config).await;
    let client = Client::new(&process.http());
    let (url, other) = (receiver.url(), elsewhere.url());
    for refused in [
        format!("bot=other&headers_from=crm&url={url}"),
        format!("bot=shop&headers_from=erp&url={url}"),
        format!("bot=shop&headers_from=crm&url={other}"),
        format!("bot=shop&headers_from={}&url={url}", "x".repeat(65)),
    ] {
        let answer = client.get(&format!("/send_delayed?delay=0&{refused}")).await;
        assert_eq!(answer.code, 400, "{refused}");
        assert_eq!(answer.json()["errors"][0]["field"], "headers_from", "{refused}");
    }
    let mut told = String::new();
    for recheck in [&url, &other] {
        let path = format!(
            "/send_delayed?delay=0&bot=shop&headers_from=crm&url={url}&recheck_url={recheck}"
        );
        let id = accepted(&client.get(&path).await);
        let look = format!("/v1/notifications/{id}");
        eventually(LONG, "it is sent", async || client.get(&look).await.json()["state"] == "sent")
            .await;
        told += &String::from_utf8(client.get(&look).await.body).unwrap();
        let mut redis = rig.redis.connection().await;
        let mut keys = redis::cmd("KEYS");
        keys.arg(format!("*n:{id}"));
        let keys: Vec<String> = keys.query_async(&mut redis).await.unwrap();
        let mut all = redis::cmd("HGETALL");
        all.arg(&keys[0]);
        let record: Vec<String> = all.query_async(&mut redis).await.unwrap();
        assert!(record.windows(2).any(|pair| pair == ["headers", "crm"]), "{record:?}");
        told += &record.join(" ");
    }
    let calls = receiver.calls();
    assert_eq!(calls.len(), 3, "a recheck and a call, and a call");
    for call in &calls {
        assert_eq!(call.headers["authorization"], "Bearer s3cret-of-the-crm", "{call:?}");
        assert_eq!(call.headers["x-tenant"], "7");
    }
    let asked = &elsewhere.calls()[0];
    assert!(!asked.headers.contains_key("authorization"), "another host gets none: {asked:?}");
    told += &String::from_utf8(client.get("/notifications").await.body).unwrap();
    told += &process.log();
    assert!(!told.contains("s3cret"), "{told}");
}

#[tokio::test]
async fn a_token_sends_sees_and_cancels_for_its_own_bots_only() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str, bots: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef\n")).unwrap();
        format!("{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = {bots} }}")
    };
    let tokens = [
        token("shop", r#"["publish"]"#, r#"["shop"]"#),
        token("reader", r#"["read"]"#, r#"["shop"]"#),
        token("other", r#"["publish", "read"]"#, r#"["other"]"#),
    ];
    let rig = Rig::new(&[("auth.tokens", &format!("[{}]", tokens.join(", ")))]);
    let instance = rig.start().await;
    let client = |name: &str| instance.client().with_token(&format!("{name}-0123456789abcdef"));
    let (shop, reader, other) = (client("shop"), client("reader"), client("other"));
    let path = "/send_delayed?delay=600&url=http://127.0.0.1/&bot=";
    let id = accepted(&shop.get(&format!("{path}shop")).await);
    let one = format!("/v1/notifications/{id}");
    let codes = [
        shop.get(&format!("{path}other")).await.code,
        // This path names no bot, so it is for the bot `default`.
        shop.get(&path[..path.len() - 5]).await.code,
        reader.get(&format!("{path}shop")).await.code,
        shop.get(&one).await.code,
        other.get(&one).await.code,
        other.send("DELETE", &one, &[], b"").await.code,
        other.get("/user_online?uid=u&bot=shop").await.code,
        reader.get("/user_online?uid=u&bot=shop").await.code,
        instance.client().get(&one).await.code,
    ];
    // For another token the notification does not exist.
    assert_eq!(codes, [403, 403, 403, 403, 404, 404, 403, 403, 401]);
    assert_eq!(reader.get(&one).await.json()["state"], "scheduled");
    assert_eq!(reader.get("/v1/notifications/stats").await.code, 403, "types are everybody's");
    assert_eq!(shop.get("/user_online?uid=u&bot=shop").await.code, 200);
    assert_eq!(shop.send("DELETE", &one, &[], b"").await.code, 204);
    assert_eq!(reader.get(&one).await.json()["state"], "cancelled");
    instance.stop().await;
}

#[tokio::test]
async fn an_unavailable_redis_is_told_and_no_answer_claims_acceptance() {
    let mut rig = Rig::on(Options { persistence: Persistence::Always, ..Options::default() }, &[]);
    let instance = rig.start().await;
    let client = instance.client();
    let path = "/send_delayed?delay=60&url=http://127.0.0.1/";
    let kept = accepted(&client.get(path).await);
    rig.redis.kill9();
    eventually(LONG, "it is refused", async || client.get(path).await.code == 503).await;
    rig.redis.restart();
    eventually(LONG, "it is accepted again", async || client.get(path).await.code == 200).await;
    assert_eq!(client.get(&format!("/v1/notifications/{kept}")).await.json()["state"], "scheduled");
    instance.stop().await;
}
