//! The page of the notifications: only for browsers with a token in a cookie.

use std::time::Duration;

use fairlane::notifications::record::{NewNotification, State, When};
use futures_util::future::join_all;
use serde_json::json;

use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::notification_rig::{Rig, accept, bot, ends, to};
use crate::support::proxy::distance::Distance;
use crate::support::receiver::{Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::Options;
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(30);
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

fn page(answer: &Response) -> String {
    assert_eq!(
        (answer.code, answer.header("content-type")),
        (200, Some("text/html; charset=utf-8")),
        "{answer:?}"
    );
    let policy = answer.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'self'"), "{policy}");
    String::from_utf8(answer.body.clone()).unwrap()
}

async fn send(
    client: &Client,
    body: serde_json::Value,
) -> fairlane::notifications::record::NotificationId {
    let kind = [("content-type", "application/json")];
    let answer = client.send("POST", "/send_delayed", &kind, body.to_string().as_bytes()).await;
    answer.header("x-event-id").expect("it is accepted").parse().unwrap()
}

#[tokio::test]
async fn the_page_shows_sent_and_dead_notifications_and_paused_hosts_and_redrives() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::start(async |call| match call.line.as_str() {
        line if line.contains("/gone") && call.number < 3 => Reply::new(410, "<b>gone</b>"),
        _ => Reply::new(200, ""),
    })
    .await;
    let empty = page(&client.get("/notifications").await);
    assert!(empty.contains("No notifications in this period."), "{empty}");

    let hostile = "<img src=x onerror=alert(1)>";
    let url = receiver.url();
    let sent = send(&client, json!({"delay": 0, "url": url, "type": hostile})).await;
    ends(&instance, sent, State::Sent).await;
    let gone = format!("http://{}/gone?<script>", receiver.address);
    let dead = send(&client, json!({"delay": 0, "url": gone, "bot": "a&b"})).await;
    ends(&instance, dead, State::Dead).await;
    // No server listens on this port.
    let away = format!("http://127.0.0.1:{}/", crate::support::redis::free_port());
    for _ in 0..8 {
        send(&client, json!({"delay": 0, "url": away})).await;
    }
    let host = away.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let mut shown = String::new();
    eventually(LONG, "the breaker is shown", async || {
        shown = page(&client.get("/notifications?by=hour").await);
        shown.contains(&format!("<th scope=\"row\">{host}</th>"))
    })
    .await;
    assert!(
        !shown.contains("<img") && !shown.contains("<script") && !shown.contains("<b>gone"),
        "{shown}"
    );
    assert!(shown.contains("&lt;img src=x onerror=alert(1)&gt;"), "{shown}");
    assert!(shown.contains("a&amp;b") && shown.contains("the receiver answered 410"), "{shown}");

    let letters = client.get("/v1/pipelines/notifications/dead").await.json();
    let letter = letters["dead_letters"][0]["id"].as_str().unwrap().to_owned();
    let redrive = format!("/notifications/dead/{letter}/redrive");
    assert!(shown.contains(&format!("action=\"{redrive}\"")), "{shown}");
    // Sent by the page of another site.
    let foreign = [("origin", "http://evil.example"), FORM];
    assert_eq!(client.send("POST", &redrive, &foreign, b"").await.code, 403);
    assert_eq!(client.get("/notifications").await.header("referrer-policy"), Some("same-origin"));
    // Sent as a browser sends a form of our own page.
    let own = format!("http://{}", client.address);
    let own = [("origin", &*own), ("sec-fetch-site", "same-origin"), FORM];
    let answer = client.send("POST", &redrive, &own, b"").await;
    assert_eq!((answer.code, answer.header("location")), (303, Some("/notifications#dead")));
    // The notification is dead-lettered once more. It is sent when all are redriven.
    eventually(LONG, "it is dead again", async || {
        !client.get("/v1/pipelines/notifications/dead").await.json()["dead_letters"]
            .as_array()
            .unwrap()
            .is_empty()
    })
    .await;
    let again = client.send("POST", &redrive, &[FORM], b"").await;
    assert_eq!(again.code, 404, "that one is gone");
    assert!(String::from_utf8(again.body).unwrap().contains("No such dead letter"));
    // Without the `until` of the question, the server asks first.
    let asked = client.send("POST", "/notifications/dead/redrive", &[FORM], b"").await;
    let question = "/notifications/dead/redrive";
    assert_eq!((asked.code, asked.header("location")), (303, Some(question)));
    let question = page(&client.get(question).await);
    assert!(question.contains("Redrive 1 dead letter of all bots"), "{question}");
    let until = question.split("name=\"until\" value=\"").nth(1).unwrap();
    let until = format!("until={}", until.split('"').next().unwrap());
    let done = client.send("POST", "/notifications/dead/redrive", &[FORM], until.as_bytes()).await;
    assert_eq!((done.code, done.header("location")), (303, Some("/notifications#dead")));
    ends(&instance, dead, State::Sent).await;
    let refused = client.get("/notifications?by=week").await;
    assert_eq!(refused.code, 400);
    assert_eq!(refused.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(client.get("/style.css").await.header("content-type"), Some("text/css"));
    instance.stop().await;
}

#[tokio::test]
async fn a_page_of_scheduled_notifications_needs_few_round_trips() {
    let rig = Rig::on(Options { tcp: true, ..Options::default() }, &[]);
    let far = Distance::start(rig.redis.tcp_addr()).await;
    let config = rig.config.replace(&rig.redis.url(), &far.url());
    let instance = Instance::start(&config, Log::default().content()).await;
    let later = |of: &str, seconds: u64| {
        let when = When::After(Duration::from_secs(3_600 + 10 * seconds));
        NewNotification { bot: bot(of), when, ..to("https://example.com/") }
    };
    let news: Vec<NewNotification> =
        (0..60).flat_map(|seconds| [later("shop", seconds), later("other", seconds)]).collect();
    let ids = join_all(news.iter().map(|new| accept(&instance, new))).await;
    far.set(Duration::from_millis(125));
    let (client, watch) = (instance.client(), Stopwatch::start());
    let first = page(&client.get("/bots/shop/scheduled").await);
    watch.within(Duration::from_secs(3), "the page, with 250 ms to Redis");
    let next = first.split("href=\"?cursor=").nth(1).expect("there is a next page");
    let next = next.split('"').next().unwrap();
    let second = page(&client.get(&format!("/bots/shop/scheduled?cursor={next}")).await);
    let shown = |page: &str| {
        let rows = page.split("data-key=\"").skip(1).map(|row| row.split('"').next().unwrap());
        rows.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!((shown(&first).len(), shown(&second).len()), (50, 10));
    let of_bot: Vec<String> = ids.iter().step_by(2).map(ToString::to_string).collect();
    assert_eq!([shown(&first), shown(&second)].concat(), of_bot, "in the order of their times");
    assert!(!second.contains("?cursor="), "it is the last page");
}

#[tokio::test]
async fn without_a_token_the_page_asks_for_one_and_keeps_it_where_no_other_site_reaches_it() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789;=\"abcdef\n")).unwrap();
        format!("{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = [\"*\"] }}")
    };
    let tokens = [
        token("reader", r#"["read"]"#),
        token("operator", r#"["read", "operate"]"#),
        token("publisher", r#"["publish"]"#),
    ];
    let rig = Rig::new(&[("auth.tokens", &format!("[{}]", tokens.join(", ")))]);
    let instance: Instance = rig.start().await;
    let client = instance.client();
    let answer = client.get("/notifications?by=hour").await;
    let form = answer.header("location").unwrap().to_owned();
    assert_eq!((answer.code, &*form), (303, "/login?to=%2Fnotifications%3Fby%3Dhour"));
    assert!(page(&client.get(&form).await).contains("value=\"/notifications?by=hour\""));

    let enter = async |name: &str, headers: &[(&str, &str)]| {
        let token = format!("{name}-0123456789%3B%3D%22abcdef");
        let body = format!("token={token}&to=%2Fnotifications%3Fby%3Dhour");
        client.send("POST", "/login", &[&[FORM], headers].concat(), body.as_bytes()).await
    };
    assert_eq!(enter("nobody", &[]).await.code, 401);
    assert_eq!(enter("reader", &[("origin", "http://evil.example")]).await.code, 403);
    assert_eq!(enter("reader", &[("sec-fetch-site", "same-site")]).await.code, 403);
    let mut cookies = Vec::new();
    for name in ["reader", "operator", "publisher"] {
        let answer = enter(name, &[("sec-fetch-site", "same-origin")]).await;
        assert_eq!((answer.code, answer.header("location")), (303, Some("/notifications?by=hour")));
        let cookie = answer.header("set-cookie").unwrap();
        assert!(cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"), "{cookie}");
        cookies.push(cookie.split(';').next().unwrap().to_owned());
    }
    let [reader, operator, publisher] = cookies.try_into().unwrap();
    let with = async |method: &str, path: &str, cookie: &str, more: &[(&str, &str)]| {
        client.send(method, path, &[&[("cookie", cookie), FORM], more].concat(), b"").await
    };
    let shown = page(&with("GET", "/notifications", &reader, &[]).await);
    assert!(shown.contains("Log out") && !shown.contains("Redrive all"), "{shown}");
    let refused = with("GET", "/notifications", &publisher, &[]).await;
    assert_eq!(
        (refused.code, refused.header("content-type")),
        (403, Some("text/html; charset=utf-8"))
    );
    let redrive = "/notifications/dead/redrive";
    assert_eq!(with("POST", redrive, &reader, &[]).await.code, 403);
    assert_eq!(with("POST", redrive, &operator, &[]).await.code, 303);
    for path in ["/send_delayed?delay=0&url=http://127.0.0.1/", "/user_online?uid=u"] {
        assert_eq!(with("GET", path, &publisher, &[]).await.code, 401, "a link is enough for that");
    }
    assert_eq!(with("POST", "/v1/pipelines/notifications/pause", &operator, &[]).await.code, 401);
    // The routes accept the cookie for reads too, but not where the page of another site may have
    // sent it.
    assert_eq!(with("GET", "/v1/pipelines", &reader, &[]).await.code, 200);
    for foreign in [
        ("origin", "http://evil.example"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
        ("origin", "null"),
    ] {
        assert_eq!(with("POST", redrive, &operator, &[foreign]).await.code, 403, "{foreign:?}");
        assert_eq!(
            with("GET", "/v1/pipelines", &reader, &[foreign]).await.code,
            403,
            "{foreign:?}"
        );
    }
    for wrong in ["fairlane-token=", "fairlane-token=!!", "fairlane-token=eA", "other=x"] {
        assert_eq!(with("GET", "/notifications", wrong, &[]).await.code, 303, "{wrong}");
    }
    let expired = with("POST", redrive, "fairlane-token=eA", &[]).await;
    assert_eq!((expired.code, expired.header("location")), (303, Some("/login")));
    let left = with("POST", "/logout", &reader, &[]).await;
    assert!(
        left.header("set-cookie").unwrap().starts_with("fairlane-token=; Max-Age=0"),
        "{left:?}"
    );
    assert_eq!(client.send("POST", "/login?token=x", &[FORM], b"").await.code, 401, "not in a URL");
    instance.stop().await;
}
