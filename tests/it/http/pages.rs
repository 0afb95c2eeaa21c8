//! The pages of pipelines, bots, dead letters and counters. They keep themselves up to date and are
//! operated with the mouse.

use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::browser::{NONE, Page, button, css, field, link};
use crate::support::config::config;
use crate::support::counter_fleet::Stores;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

/// Starts with a handler that fails for good on events of the type `broken`.
async fn start(server: &RedisServer, settings: &[(&str, &str)]) -> (Instance, Log) {
    let log = Log::default();
    let handler = log.handler(|slice| async move {
        let broken = slice.events.iter().any(|delivery| delivery.event.kind() == "broken");
        if broken { Err(Failure::permanent(0, "it is broken")) } else { Ok(Outcomes::done()) }
    });
    (Instance::start(&config(server, "test", settings), handler).await, log)
}

async fn publish(client: &Client, bot: &str, kind: &str, ids: std::ops::Range<u32>) {
    let event = |id: u32| {
        let (id, data) = (id.to_string(), json!({ "n": id }));
        json!({ "specversion": "1.0", "id": id, "source": "test", "type": kind, "botid": bot, "data": data })
    };
    let events: Vec<_> = ids.map(event).collect();
    let body = serde_json::to_vec(&events).unwrap();
    let answer = client.publish("application/cloudevents-batch+json", body).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
}

/// Waits until an element shows this text, without a reload of the page.
async fn reads(page: &Page, selector: &str, text: &str) {
    eventually(LONG, &format!("{selector} reads {text:?}"), async || {
        page.count(selector).await == 1 && page.text(css(selector)).await == text
    })
    .await;
}

#[tokio::test]
async fn the_overview_shows_by_itself_how_the_depth_rises_and_falls() {
    let server = RedisServer::start(Options::default());
    let (instance, log) = start(&server, &[]).await;
    let client = instance.client();
    let page = Page::open(&client.address).await;
    assert_eq!(page.goto("/").await, 200);
    reads(&page, "#live", "live").await;
    let depth = "tr[data-key=test] td:nth-of-type(2)";
    assert_eq!(page.text(css(depth)).await, "0");

    page.follow(link("test")).await;
    assert_eq!(page.path().await, "/pipelines/test");
    page.sees("handler recorder; takes *").await;
    page.follow(button("Pause the pipeline")).await;
    page.sees("paused").await;
    assert_eq!(client.get("/v1/pipelines/test").await.json()["stopped"], true);
    page.follow(link("Overview")).await;
    publish(&client, "shop", "a", 0..30).await;
    reads(&page, depth, "30").await;
    page.sees("paused").await;
    // The sum is known immediately, and the chart after the next look of the sampler.
    eventually(LONG, "the chart shows it", async || {
        let about = "document.querySelector('tr[data-key=test] svg').getAttribute('aria-label')";
        page.eval::<String>(about).await == "Events queued in test, last 15 minutes: at most 30"
    })
    .await;
    reads(&page, "tr[data-key='test/shop'] td:nth-of-type(2)", "30").await;

    page.follow(link("shop")).await;
    assert_eq!(page.path().await, "/bots/shop");
    page.sees("The pipeline is paused; 30 events wait").await;
    assert_eq!(client.post("/v1/pipelines/test/resume").await.code, 204);
    page.sees("Last attempts").await;
    assert_eq!(log.len(), 30);
    page.follow(link("Overview")).await;
    assert_eq!(page.text(css(depth)).await, "0");
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn a_bot_is_paused_looked_into_purged_and_resumed_with_the_mouse() {
    let server = RedisServer::start(Options::default());
    let (instance, log) = start(&server, &[]).await;
    let client = instance.client();
    assert_eq!(client.post("/v1/pipelines/test/bots/shop/pause").await.code, 204);
    publish(&client, "shop", "a", 0..7).await;
    let page = Page::open(&client.address).await;
    page.goto("/bots/shop").await;
    page.sees("paused").await;
    reads(&page, ".panel tbody tr:first-of-type td:nth-of-type(2)", "a").await;
    assert_eq!(page.count(".panel tbody tr").await, 5, "its next events");
    // A permanent deletion needs a confirmation.
    page.click(css("summary")).await;
    page.sees("Its 7 queued events are deleted for good.").await;
    // The confirmation stays open while the page is kept up to date, and the focus stays too.
    publish(&client, "shop", "a", 7..8).await;
    page.sees("Its 8 queued events are deleted for good.").await;
    assert_eq!(page.count("details[open]").await, 1);
    page.follow(button("Delete the queued events of shop")).await;
    assert_eq!(page.path().await, "/bots/shop");
    eventually(LONG, "they are gone", async || {
        client.get("/v1/pipelines/test/bots/shop").await.json()["depth"] == 0
    })
    .await;
    publish(&client, "shop", "a", 8..9).await;
    page.follow(button("Resume in test")).await;
    page.sees("Last attempts").await;
    assert_eq!(log.ids("test"), ["8"]);
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn dead_letters_are_found_looked_into_put_back_and_dropped_with_the_mouse() {
    let server = RedisServer::start(Options::default());
    let (instance, _) = start(&server, &[]).await;
    let client = instance.client();
    publish(&client, "one", "broken", 0..3).await;
    publish(&client, "other", "broken", 0..1).await;
    let letters = async || {
        let all = client.get("/v1/pipelines/test/dead").await.json();
        all["dead_letters"].as_array().unwrap().len()
    };
    eventually(LONG, "all are dead", async || letters().await == 4).await;
    let page = Page::open(&client.address).await;
    page.goto("/").await;
    eventually(LONG, "the overview counts them", async || {
        page.text(css("tr[data-key=test] td:last-of-type")).await == "4"
    })
    .await;
    page.follow(css("tr[data-key=test] td:last-of-type a")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead");
    assert_eq!(page.count(".letters tbody tr").await, 4);
    page.fill(field("Only of bot"), "one").await;
    page.follow(button("Show")).await;
    assert_eq!(page.count(".letters tbody tr").await, 3);
    // Shows the newest dead letter and drops it.
    page.follow(css(".letters tbody tr:first-of-type td:nth-of-type(3) a")).await;
    page.sees("it is broken").await;
    assert!(page.text(css("pre")).await.contains("\"type\": \"broken\""));
    page.click(css("summary")).await;
    page.follow(button("Drop this dead letter")).await;
    let kept = "/pipelines/test/dead?bot=one&done=drop&n=1";
    assert_eq!(page.path().await, kept, "still those of the bot");
    page.sees("Dropped 1 dead letter.").await;
    assert_eq!(letters().await, 3);
    assert_eq!(page.count(".letters tbody tr").await, 2);
    // After a redrive the handler gives the event up once more, as a new dead letter.
    let first = ".letters tbody tr:last-of-type";
    let before =
        page.eval::<String>(&format!("document.querySelector('{first}').dataset.key")).await;
    page.follow(css(&format!("{first} button"))).await;
    eventually(LONG, "it was tried again", async || {
        let found = format!("document.querySelector('tr[data-key=\"{before}\"]') === null");
        letters().await == 3 && page.eval::<bool>(&found).await
    })
    .await;
    assert_eq!(page.path().await, "/pipelines/test/dead?bot=one&done=redrive&n=1");
    page.fill(field("Only of bot"), "other").await;
    page.follow(button("Show")).await;
    let of_other =
        page.eval::<String>("document.querySelector('.letters tbody tr').dataset.key").await;
    page.follow(button("Redrive all of other…")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead/redrive?bot=other");
    page.sees("Redrive 1 dead letter of bot other in pipeline test?").await;
    page.follow(link("Cancel")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead?bot=other");
    let found = format!("document.querySelector('tr[data-key=\"{of_other}\"]') !== null");
    assert!(page.eval::<bool>(&found).await, "nothing was done");
    page.follow(button("Redrive all of other…")).await;
    page.follow(button("Redrive them")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead?bot=other&done=redrive&n=1");
    page.sees("Redrove 1 dead letter.").await;
    eventually(LONG, "that of the other bot was tried again", async || {
        letters().await == 3 && !page.eval::<bool>(&found).await
    })
    .await;
    // All of them are redriven only after a question that says so.
    page.goto("/pipelines/test/dead").await;
    page.follow(button("Redrive all…")).await;
    page.sees("Redrive 3 dead letters of all bots in pipeline test?").await;
    page.follow(button("Redrive them")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead?done=redrive&n=3");
    page.sees("Redrove 3 dead letters.").await;
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn typed_text_and_the_focus_stay_while_a_page_is_kept_up_to_date() {
    let server = RedisServer::start(Options::default());
    let (instance, _) = start(&server, &[]).await;
    let client = instance.client();
    let page = Page::open(&client.address).await;
    page.goto("/pipelines/test/dead").await;
    reads(&page, "#live", "live").await;
    page.fill(field("Only of bot"), "half of a na").await;
    publish(&client, "shop", "broken", 0..1).await;
    page.sees("it is broken").await;
    assert_eq!(page.text(field("Only of bot")).await, "half of a na");
    assert!(page.focused().await.contains("Only of bot"), "{}", page.focused().await);
    // The page reports that its server is unavailable.
    instance.stop().await;
    page.sees("not up to date").await;
}

#[tokio::test]
async fn views_of_an_ad_are_looked_up_with_their_days() {
    let stores = Stores::start(Persistence::Always);
    let instance = Instance::start(&stores.direct(&[]), Log::default().content()).await;
    let client = instance.client();
    for (ad, n) in [("a", 3), ("b & c", 4)] {
        let path =
            format!("/v1/bots/shop/counters/{}/views", ad.replace(' ', "%20").replace('&', "%26"));
        let body = json!({ "n": n }).to_string();
        let headers = [("content-type", "application/json")];
        let answer = client.send("POST", &path, &headers, body.as_bytes()).await;
        assert_eq!(answer.code, 200, "{answer:?}");
    }
    let page = Page::open(&client.address).await;
    page.goto("/counters").await;
    page.fill(field("Bot"), "shop").await;
    page.fill(field("Ads"), "a, b & c, never").await;
    assert_eq!(page.follow(button("Show")).await, 200);
    let totals: Vec<String> =
        page.eval("[...document.querySelectorAll('tbody td')].map(cell => cell.textContent)").await;
    assert_eq!(totals, ["3", "4", "0"]);
    eventually(LONG, "MongoDB has the views of today", async || {
        page.goto("/counters?bot=shop&ads=b+%26+c").await;
        page.count(".bars tbody tr").await == 30
            && page.text(css(".bars tbody tr:first-of-type td:first-of-type")).await == "4"
    })
    .await;
    assert_eq!(page.barriers().await, NONE);
    instance.stop().await;
}

#[tokio::test]
async fn pages_obey_the_scopes_of_the_token_and_refuse_requests_of_other_sites() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str, bots: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef")).unwrap();
        format!("{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = {bots} }}")
    };
    let tokens = [
        token("reader", r#"["read"]"#, r#"["shop-*"]"#),
        token("operator", r#"["read", "operate", "publish"]"#, r#"["shop-*"]"#),
        token("root", r#"["read", "operate", "publish"]"#, r#"["*"]"#),
    ];
    let server = RedisServer::start(Options::default());
    let tokens = format!("[{}]", tokens.join(", "));
    let (instance, _) = start(&server, &[("auth.tokens", &tokens)]).await;
    let client = instance.client();
    let root = client.with_token("root-0123456789abcdef");
    assert_eq!(root.post("/v1/pipelines/test/pause").await.code, 204);
    for bot in ["shop-1", "other"] {
        publish(&root, bot, "a", 0..2).await;
    }
    eventually(LONG, "they wait", async || {
        root.get("/v1/pipelines/test").await.json()["depth"] == 4
    })
    .await;
    let cookie = async |name: &str| {
        let body = format!("token={name}-0123456789abcdef");
        let answer = client.send("POST", "/login", &[FORM], body.as_bytes()).await;
        assert_eq!((answer.code, answer.header("location")), (303, Some("/")));
        answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned()
    };
    let with = async |method: &str, path: &str, cookie: &str, more: &[(&str, &str)]| {
        client.send(method, path, &[&[("cookie", cookie), FORM], more].concat(), b"").await
    };
    let text = |answer: &crate::support::http::Response| {
        assert_eq!(answer.code, 200, "{answer:?}");
        String::from_utf8(answer.body.clone()).unwrap()
    };
    let (reader, operator, root_cookie) =
        (cookie("reader").await, cookie("operator").await, cookie("root").await);

    assert_eq!(client.get("/").await.header("location"), Some("/login?to=%2F"));
    for path in ["/", "/pipelines/test"] {
        let page = text(&with("GET", path, &reader, &[]).await);
        assert!(page.contains("shop-1") && !page.contains("other"), "{page}");
        assert!(!page.contains("<form method=\"post\" action=\"/pipelines"), "{page}");
        assert!(text(&with("GET", path, &root_cookie, &[]).await).contains("other"));
    }
    assert_eq!(with("GET", "/bots/other", &reader, &[]).await.code, 403);
    assert_eq!(with("GET", "/pipelines/test/dead?bot=other", &reader, &[]).await.code, 403);
    assert_eq!(with("GET", "/counters?bot=other&ads=a", &reader, &[]).await.code, 403);
    let page = text(&with("GET", "/bots/shop-1", &reader, &[]).await);
    assert!(!page.contains("/bots/shop-1/test/"), "a reader has no buttons: {page}");
    let page = text(&with("GET", "/bots/shop-1", &operator, &[]).await);
    assert!(page.contains("/bots/shop-1/test/purge"), "{page}");

    for path in ["/bots/shop-1/test/pause", "/bots/shop-1/test/purge", "/pipelines/test/resume"] {
        assert_eq!(with("POST", path, &reader, &[]).await.code, 403, "{path}");
        for foreign in [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")] {
            assert_eq!(with("POST", path, &root_cookie, &[foreign]).await.code, 403, "{path}");
        }
        assert_eq!(with("GET", path, &root_cookie, &[]).await.code, 405, "{path}");
    }
    for path in ["/pipelines/test/resume", "/pipelines/test/dead/redrive", "/bots/other/test/pause"]
    {
        assert_eq!(with("POST", path, &operator, &[]).await.code, 403, "{path}");
    }
    // A rate is set by a token for all bots only.
    assert!(!text(&with("GET", "/bots/shop-1", &operator, &[]).await).contains("/test/set"));
    assert!(text(&with("GET", "/bots/shop-1", &root_cookie, &[]).await).contains("/test/set"));
    assert_a_form_of_all_bots_sets_rates(&root, [&reader, &operator, &root_cookie]).await;
    assert_eq!(with("POST", "/bots/shop-1/test/purge", &operator, &[]).await.code, 303);
    let depth = root.get("/v1/pipelines/test").await.json()["depth"].clone();
    assert_eq!(depth, 2, "those of the other bot");
    assert_eq!(with("POST", "/pipelines/test/resume", &root_cookie, &[]).await.code, 303);
    instance.stop().await;
}

/// Sends the form for weight, rate and burst with the cookies of three tokens.
async fn assert_a_form_of_all_bots_sets_rates(
    root: &Client,
    [reader, operator, root_cookie]: [&str; 3],
) {
    let anonymous = Client::new(&root.address);
    let set = async |cookie: &str, body: &str, more: &[(&str, &str)]| {
        let headers = [&[("cookie", cookie), FORM], more].concat();
        anonymous.send("POST", "/bots/shop-1/test/set", &headers, body.as_bytes()).await
    };
    let body = "weight=0.5&rate=10%2Fs&burst=20";
    assert_eq!(set(reader, body, &[]).await.code, 403);
    assert_eq!(set(operator, body, &[]).await.code, 403);
    assert_eq!(set(root_cookie, body, &[("origin", "http://evil.example")]).await.code, 403);
    let own = async || {
        let bot = root.get("/v1/pipelines/test/bots/shop-1").await.json();
        json!(["rate", "burst", "weight"].map(|field| bot[field].clone()))
    };
    assert_eq!(own().await, json!([null, null, 1]));
    let answer = set(root_cookie, body, &[]).await;
    assert_eq!((answer.code, answer.header("location")), (303, Some("/bots/shop-1")));
    assert_eq!(own().await, json!(["10/s", 20, 0.5]));
    for (wrong, field, remedy) in [
        ("weight=0&rate=", "weight", "a number from 0.01"),
        ("weight=1&rate=fast", "rate", "events per second, minute or hour"),
        ("weight=1&burst=0", "burst", "a whole number from 1"),
        ("weight=1&speed=2", "speed", ""),
    ] {
        let answer = set(root_cookie, wrong, &[]).await;
        let page = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.code, 400, "{wrong}: {page}");
        assert!(page.contains(field) && page.contains(remedy), "{wrong}: {page}");
    }
    assert_eq!(own().await, json!(["10/s", 20, 0.5]));
    assert_eq!(set(root_cookie, "weight=&rate=&burst=", &[]).await.code, 303);
    assert_eq!(own().await, json!([null, null, 1]));
}

/// Sends a request. Returns the connection and the start of the answer.
async fn begin(client: &Client, head: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(&client.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut begun = vec![0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut begun).await.unwrap();
    (stream, String::from_utf8(begun).unwrap())
}

#[tokio::test]
async fn a_live_page_asks_proxies_to_pass_on_each_event_immediately() {
    let server = RedisServer::start(Options::default());
    let (instance, _) = start(&server, &[]).await;
    let client = instance.client();
    let head = client.head("GET", "/", &[("accept", "text/event-stream")]);
    let (mut stream, mut headers) = begin(&client, &head).await;
    while !headers.contains("\r\n\r\n") {
        headers.push(char::from(stream.read_u8().await.unwrap()));
    }
    assert!(headers.to_lowercase().contains("\r\nx-accel-buffering: no\r\n"), "{headers}");
    drop(stream);
    instance.stop().await;
}

#[tokio::test]
async fn pages_kept_up_to_date_are_bounded_and_take_no_place_of_others() {
    let server = RedisServer::start(Options::default());
    let settings = [("http.max_connections_per_address", "200")];
    let (instance, _) = start(&server, &settings).await;
    let client = instance.client();
    let head = client.head("GET", "/", &[("accept", "text/event-stream")]);
    let mut streams = Vec::new();
    for _ in 0..64 {
        let (stream, begun) = begin(&client, &head).await;
        assert_eq!(begun, "HTTP/1.1 200");
        streams.push(stream);
    }
    let refused = client.send("GET", "/", &[("accept", "text/event-stream")], b"").await;
    assert_eq!(refused.code, 503, "{refused:?}");
    let admission = client.get("/v1/admission").await.json();
    assert!(admission["in_flight"].as_u64().is_some_and(|now| now <= 1), "{admission}");
    assert_eq!(client.get("/").await.code, 200);
    drop(streams);
    eventually(LONG, "there is room again", async || {
        begin(&client, &head).await.1 == "HTTP/1.1 200"
    })
    .await;
    instance.stop().await;
}
