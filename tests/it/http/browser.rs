//! The web pages in a real browser, with mouse and keyboard.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use crate::support::automation_rig::{self, Rig as RulesRig};
use crate::support::browser::{NONE, Page, button, css, field, link};
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::notification_rig::{LONG, Rig};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

/// Text that would run as script if a page did not escape it.
const HOSTILE: &str = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">";

/// Accepts a notification that is dead-lettered, because `url` refuses it for good.
async fn dies(client: &Client, bot: &str, kind: &str, url: &str) {
    let before = dead(client).await.len();
    let body = json!({ "delay": 0, "url": url, "bot": bot, "type": kind }).to_string();
    let headers = [("content-type", "application/json")];
    let answer = client.send("POST", "/send_delayed", &headers, body.as_bytes()).await;
    assert!(answer.code < 300, "{answer:?}");
    eventually(LONG, "it is dead", async || dead(client).await.len() > before).await;
}

/// The ids of the dead letters.
async fn dead(client: &Client) -> Vec<String> {
    let all = client.get("/v1/pipelines/notifications/dead").await.json();
    let all = all["dead_letters"].as_array().unwrap();
    all.iter().map(|letter| letter["id"].as_str().unwrap().to_owned()).collect()
}

/// Refuses the first `refused` calls with 410 and accepts the others.
async fn receiver(refused: usize) -> Receiver {
    let answer = move |call: Call| async move {
        if call.number < refused { Reply::new(410, "") } else { Reply::new(200, "") }
    };
    Receiver::start(answer).await
}

/// The setting `auth.tokens` with a token that has every scope, and the text of the token.
fn token(directory: &std::path::Path) -> (String, &'static str) {
    let (file, text) = (directory.join("token"), "operator-0123456789;=\"abcdef");
    std::fs::write(&file, text).unwrap();
    let scopes = r#"["read", "operate", "publish"]"#;
    let file = file.display();
    (format!("[{{ name = \"operator\", token_file = \"{file}\", scopes = {scopes} }}]"), text)
}

#[tokio::test]
async fn one_dead_letter_is_redriven_with_the_mouse_and_all_with_the_keyboard() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let (client, receiver) = (instance.client(), receiver(3).await);
    for bot in ["first", "second", "third"] {
        dies(&client, bot, "none", &receiver.url()).await;
    }
    let page = Page::open(&client.address).await;
    assert_eq!(page.goto("/notifications").await, 200);
    assert_eq!(page.count("#dead tbody tr").await, 3);
    let letters = dead(&client).await;
    let redrive = format!("Redrive {}", letters[0]);
    let row = format!("#dead tr:has(button[aria-label='{redrive}'])");
    assert!(page.text(css(&row)).await.contains("the receiver answered 410"));
    assert_eq!(page.follow(button(&redrive)).await, 200);
    assert_eq!(page.path().await, "/notifications#dead");
    assert_eq!(page.count("#dead tbody tr").await, 2);
    eventually(LONG, "it is sent", async || receiver.called() == 4).await;

    // All of them are redriven only after a question. The keyboard can answer it too.
    for named in ["button \"Redrive all…\"", "button \"Redrive them\""] {
        let mut keys = 0;
        while page.focused().await != named {
            page.press("Tab").await;
            keys += 1;
            assert!(keys < 50, "the Tab key does not reach {named}");
        }
        assert_eq!(page.follow_key("Enter").await, 200);
    }
    assert_eq!(page.path().await, "/notifications#dead");
    assert_eq!(page.count("#dead button").await, 0);
    eventually(LONG, "all are sent", async || receiver.called() == 6).await;
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn a_letter_that_another_person_has_redriven_is_told_of() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let (client, receiver) = (instance.client(), receiver(1).await);
    dies(&client, "shop", "none", &receiver.url()).await;
    let redrive = format!("Redrive {}", dead(&client).await[0]);
    let one = Page::open(&client.address).await;
    let other = one.another().await;
    for page in [&one, &other] {
        page.goto("/notifications").await;
    }
    assert_eq!(one.follow(button(&redrive)).await, 200);
    assert_eq!(other.follow(button(&redrive)).await, 404);
    assert_eq!(other.text(css("h1")).await, "No such dead letter");
    eventually(LONG, "it is sent", async || receiver.called() == 2).await;
    instance.stop().await;
}

#[tokio::test]
async fn text_of_strangers_is_shown_as_text_and_runs_nothing() {
    let rig = RulesRig::start(&[("pipelines.automations.workers.max", "2")]).await;
    let receiver = receiver(usize::MAX).await;
    let url = format!("http://{}/?{HOSTILE}", receiver.address);
    dies(&rig.client, HOSTILE, HOSTILE, &url.replace(' ', "+")).await;
    let rule = json!({
        "name": HOSTILE, "on": [HOSTILE], "filter": "event.type == '<script>alert(2)</script>'",
        "actions": [{ "set_field": { "field": "said", "value": HOSTILE } }], "enabled": true,
    });
    rig.put("shop", "r", &rule).await;
    rig.publish(&[automation_rig::field("shop", "anna", "1", "note", json!(HOSTILE))]).await;
    rig.settles(1).await;

    let page = Page::open(&rig.client.address).await;
    page.goto("/notifications").await;
    let shown = page.text(css("main")).await;
    assert!(shown.matches(HOSTILE).count() >= 3, "bot, type, chart: {shown}");
    page.goto("/bots/shop").await;
    page.sees(HOSTILE).await;
    page.fill(css("#subscriber input"), HOSTILE).await;
    page.follow(css("#subscriber button")).await;
    page.sees(&format!("Nothing is known of {HOSTILE}")).await;
    page.fill(css("#subscriber input"), "anna").await;
    page.follow(css("#subscriber button")).await;
    // The page shows it as JSON.
    page.sees(&json!(HOSTILE).to_string()).await;
    let nothing = "document.querySelectorAll('main script, main img').length";
    assert_eq!(page.eval::<usize>(nothing).await, 0);
    assert_eq!(page.problems(), NONE);
    rig.instance.stop().await;
}

#[tokio::test]
async fn the_page_of_a_bot_is_found_whatever_it_is_called() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let client = instance.client();
    let bot = format!("a/b ?#% {HOSTILE}");
    assert_eq!(client.post("/v1/pipelines/test/pause").await.code, 204);
    add(&server, STREAM, &[event(&bot, HOSTILE, 1), event(&bot, HOSTILE, 2)]).await;
    eventually(LONG, "both wait", async || {
        client.get("/v1/pipelines/test").await.json()["depth"] == 2
    })
    .await;
    let page = Page::open(&client.address).await;
    page.goto("/bots").await;
    assert_eq!(page.text(css("tbody th")).await, bot, "those with most events are named");
    page.fill(field("Bot"), &bot).await;
    assert_eq!(page.follow(button("Show")).await, 200);
    assert_eq!(page.text(css("h1")).await, format!("Bot {bot}"));
    assert_eq!(page.text(css(".panel h3")).await, "test");
    page.sees("The pipeline is paused; 2 events wait").await;
    // The form leads back to the bot.
    assert_eq!(page.text(field("Bot")).await, bot);
    assert_eq!(page.follow(button("Show")).await, 200);
    assert_eq!(page.text(css("h1")).await, format!("Bot {bot}"));
    assert_eq!(client.post("/v1/pipelines/test/resume").await.code, 204);
    page.sees("Last attempts").await;
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn a_login_leads_to_the_page_that_was_asked_for_and_a_logout_ends_it() {
    let directory = tempfile::tempdir().unwrap();
    let (tokens, text) = token(directory.path());
    let rig = Rig::new(&[("auth.tokens", &tokens)]);
    let instance = rig.start().await;
    let page = Page::open(&instance.client().address).await;
    assert_eq!(page.goto("/notifications?by=hour").await, 200);
    assert_eq!(page.path().await, "/login?to=%2Fnotifications%3Fby%3Dhour");
    assert_eq!(page.focused().await, "textbox \"Token\"");
    page.fill(field("Token"), "wrong-0123456789abcdef").await;
    assert_eq!(page.follow(button("Log in")).await, 401);
    assert_eq!(page.text(css("[role=alert]")).await, "Fairlane does not know this token.");
    assert_eq!(page.barriers().await, NONE);
    page.fill(field("Token"), text).await;
    assert_eq!(page.follow_key("Enter").await, 200);
    assert_eq!(page.path().await, "/notifications?by=hour");
    assert_eq!(page.eval::<String>("document.cookie").await, "", "no script reads it");
    assert_eq!(page.follow(link("Bots")).await, 200);
    assert_eq!(page.path().await, "/bots");

    let other = page.another().await;
    other.goto("/bots").await;
    assert_eq!(other.path().await, "/login?to=%2Fbots", "a cookie is one browser's");
    page.follow(button("Log out")).await;
    assert_eq!(page.path().await, "/login");
    page.goto("/notifications").await;
    assert_eq!(page.path().await, "/login?to=%2Fnotifications");
    let [refused] = page.problems().try_into().unwrap();
    assert!(refused.contains("401"), "{refused}");
    assert_eq!(other.problems(), NONE);
    instance.stop().await;
}

/// A proxy in front of an instance. The first stream of a live page ends soon, the second one is
/// refused, and the third one goes on.
async fn proxy(client: Client) -> Receiver {
    let streams = AtomicUsize::new(0);
    Receiver::start(move |call: Call| {
        let kinds = call.headers.get("accept");
        let is_stream = kinds.is_some_and(|kinds| kinds == "text/event-stream");
        let number = is_stream.then(|| streams.fetch_add(1, Ordering::Relaxed));
        let client = client.clone();
        async move {
            let kind = ("content-type", "text/event-stream");
            match number {
                Some(0) => {
                    Reply::new(200, "retry: 10\ndata: <h1>First</h1>\n\n").with(kind.0, kind.1)
                }
                Some(1) => Reply::new(502, "Bad Gateway"),
                Some(_) => {
                    let head = format!("HTTP/1.1 200 OK\r\n{}: {}\r\n\r\n", kind.0, kind.1);
                    let first = format!("{head}data: <h1>Third</h1>\n\n");
                    Reply::Drip(first.into_bytes(), b":\n\n".to_vec())
                }
                None => {
                    let path = call.line.split(' ').nth(1).unwrap_or_default();
                    let answer = client.get(path).await;
                    let kind = answer.header("content-type").unwrap_or_default().to_owned();
                    Reply::new(answer.code, answer.body).with("content-type", &kind)
                }
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_live_page_that_is_refused_says_so_and_tries_again() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let proxy = proxy(instance.client()).await;
    let page = Page::open(&proxy.address.to_string()).await;
    assert_eq!(page.goto("/").await, 200);
    page.has(css("#live[data-state=off] a")).await;
    assert_eq!(page.text(css("#live")).await, "not up to date. Refresh");
    assert_eq!(page.text(css("h1")).await, "First");
    // After 15 to 30 s.
    eventually(LONG, "it is live again", async || page.text(css("#live")).await == "live").await;
    assert_eq!(page.text(css("h1")).await, "Third");
    instance.stop().await;
}

#[tokio::test]
async fn the_page_of_the_document_works_within_its_policy() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let page = Page::open(&instance.client().address).await;
    assert_eq!(page.goto("/docs/").await, 200);
    page.sees("Publish events").await;
    page.sees("/v1/bots/{bot}/counters").await;
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}
