//! What users choose on the pages: the theme, the time span of the charts, and a first event.

use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use serde_json::json;

use crate::support::browser::{NONE, Page, button, css, field, link};
use crate::support::config::config;
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::proxy::Proxy;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const BROWSER: (&str, &str) = ("accept", "text/html,*/*;q=0.8");

async fn start(server: &RedisServer, settings: &[(&str, &str)]) -> Instance {
    let handler = Log::default().handler(|slice| async move {
        let broken = slice.events.iter().any(|delivery| delivery.event.kind() == "broken");
        if broken { Err(Failure::permanent(0, "it is broken")) } else { Ok(Outcomes::done()) }
    });
    Instance::start(&config(server, "test", settings), handler).await
}

fn text(answer: &Response) -> String {
    String::from_utf8(answer.body.clone()).unwrap()
}

/// The colour behind the page: the red part.
async fn ground(page: &Page) -> u8 {
    let red = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])";
    page.eval(red).await
}

#[tokio::test]
async fn a_theme_is_chosen_without_scripts_and_stays_from_the_first_byte_on() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let page = Page::open(&client.address).await;
    page.scripts(false).await;
    page.goto("/pipelines/test?sort=age").await;
    assert_eq!(ground(&page).await, 255, "the device prefers light");
    page.colours("dark").await;
    assert!(ground(&page).await < 40, "and now dark");
    page.follow(button("Light")).await;
    assert_eq!(page.path().await, "/pipelines/test?sort=age");
    assert_eq!(ground(&page).await, 255);
    page.follow(button("Dark")).await;
    page.colours("light").await;
    page.follow(link("Bots")).await;
    assert!(ground(&page).await < 40, "on every page");
    assert_eq!(page.goto("/nowhere").await, 404);
    assert!(ground(&page).await < 40, "and on those that are not there");
    page.goto("/").await;
    page.follow(button("Auto")).await;
    assert_eq!(ground(&page).await, 255);

    // The server renders it, so that the page never appears in the wrong colours first.
    let dark = [BROWSER, ("cookie", "fairlane-theme=dark")];
    let html = text(&client.send("GET", "/", &dark, b"").await);
    assert!(html.contains("<html lang=\"en\" data-theme=\"dark\">"), "{html}");
    assert!(html.contains("name=\"color-scheme\" content=\"dark\""), "{html}");
    let strange = [BROWSER, ("cookie", "fairlane-theme=\"><script>")];
    let html = text(&client.send("GET", "/", &strange, b"").await);
    assert!(html.contains("<html lang=\"en\">"), "{html}");

    let choose = async |more: &[(&str, &str)], body: &str| {
        client.send("POST", "/theme", &[&[FORM, BROWSER], more].concat(), body.as_bytes()).await
    };
    let answer = choose(&[], "theme=dark&to=%2Fbots").await;
    assert_eq!((answer.code, answer.header("location")), (303, Some("/bots")));
    let cookie = answer.header("set-cookie").unwrap();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Lax"), "{cookie}");
    for elsewhere in ["https%3A%2F%2Fevil.example%2F", "%2F%2Fevil.example", "%2Fv1%2Fbots"] {
        let answer = choose(&[], &format!("theme=dark&to={elsewhere}")).await;
        assert_eq!(answer.header("location"), Some("/"), "{elsewhere}");
    }
    assert_eq!(choose(&[], "theme=pink").await.code, 400);
    assert_eq!(choose(&[("origin", "http://evil.example")], "theme=dark").await.code, 403);
    instance.stop().await;
}

/// Writes minutes with a gap, as the sampler would have done.
async fn remember(server: &RedisServer, ages: impl Iterator<Item = u64>) {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let now = u64::try_from(now).unwrap();
    let mut connection = server.connection().await;
    let mut pipe = redis::pipe();
    for minutes in ages {
        let sample = json!([700, 9_000, 4, 3, 20, 1.5, 35, 250]);
        let point = json!({ "t": now - minutes * 60_000, "p": { "test": sample } });
        pipe.cmd("RPUSH").arg("fl:trend-minutes").arg(point.to_string()).ignore();
    }
    let (): () = pipe.query_async(&mut connection).await.unwrap();
}

#[tokio::test]
async fn charts_show_a_day_and_keep_their_time_span_while_the_page_updates_itself() {
    let server = RedisServer::start(Options::default());
    let ages = (60..1_400).rev().filter(|minutes| !(300..400).contains(minutes));
    remember(&server, ages).await;
    let instance = start(&server, &[]).await;
    let page = Page::open(&instance.client().address).await;
    page.goto("/").await;
    page.follow(link("24 h")).await;
    assert_eq!(page.path().await, "/?range=24h");
    let label = "document.querySelector('tr[data-key=test] svg').getAttribute('aria-label')";
    let day = "Events queued in test, last 24 hours: at most 700";
    assert_eq!(page.eval::<String>(label).await, day);
    eventually(LONG, "it is live", async || page.text(css("#live")).await == "live").await;
    assert_eq!(page.eval::<String>(label).await, day);

    page.goto("/pipelines/test?range=24h&sort=age").await;
    let labels = "[...document.querySelectorAll('#charts svg')].map(svg => svg.ariaLabel)";
    let labels: Vec<String> = page.eval(labels).await;
    for (shown, most) in [("Events in", "700"), ("Time of a call", "250 ms"), ("Calls a", "20")] {
        let found = labels.iter().find(|label| label.starts_with(shown));
        let end = format!("last 24 hours: at most {most}");
        assert!(found.is_some_and(|label| label.ends_with(&end)), "{shown}: {labels:?}");
    }
    page.sees("Where the line is interrupted, nothing was measured.").await;
    // Each part of the line starts anew after the gap.
    let path = "document.querySelector('#charts .line0').getAttribute('d')";
    assert!(page.eval::<String>(path).await.matches('M').count() >= 2);
    page.follow(link("Longest queue")).await;
    assert_eq!(page.path().await, "/pipelines/test?sort=depth&range=24h#bots");
    page.follow(link("1 h")).await;
    assert_eq!(page.path().await, "/pipelines/test?range=1h&sort=depth#charts");
    assert_eq!(page.goto("/?range=2y").await, 400);
    instance.stop().await;
}

#[tokio::test]
async fn the_charts_show_failed_calls_and_the_sampler_keeps_minutes() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let page = Page::open(&client.address).await;
    page.goto("/pipelines/test").await;
    let failed = "[...document.querySelectorAll('#charts svg')]
        .find(svg => svg.ariaLabel.startsWith('Calls a second')).querySelector('.line1').getAttribute('d')";
    let mut id = 0;
    eventually(LONG, "failed calls are drawn above the axis", async || {
        id += 1;
        let event = json!({
            "specversion": "1.0", "id": id.to_string(), "source": "test", "type": "broken", "botid": "b",
        });
        let answer = client.publish("application/cloudevents+json", event.to_string()).await;
        assert_eq!(answer.code, 202, "{}", answer.problem());
        let path: String = page.eval(failed).await;
        let points = path.split(['M', 'L']).filter_map(|point| point.split_once(' '));
        let heights: Vec<f64> = points.map(|(_, y)| y.parse().unwrap()).collect();
        heights.iter().any(|y| *y < heights.iter().copied().fold(0.0, f64::max))
    })
    .await;
    let mut connection = server.connection().await;
    let ttl: i64 =
        redis::cmd("TTL").arg("fl:trend-minutes").query_async(&mut connection).await.unwrap();
    assert!((80_000..=86_400).contains(&ttl), "{ttl}");
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn a_first_event_is_published_with_a_form_and_followed() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let page = Page::open(&client.address).await;
    page.goto("/").await;
    page.sees("Publish a first event").await;
    let broken = page.violations().await;
    assert!(broken.is_empty(), "{broken:?}");
    page.fill(field("Type"), "cart.created").await;
    page.fill(field("Bot"), "shop").await;
    page.fill(field("Data, in JSON"), "{ \"total\": ").await;
    assert_eq!(page.follow(button("Publish")).await, 400);
    assert!(page.text(css("#data-problem")).await.starts_with("This is not JSON: "));
    assert_eq!(page.text(field("Bot")).await, "shop", "what was typed stays");
    assert_eq!(page.barriers().await, NONE);
    let broken = page.violations().await;
    assert!(broken.is_empty(), "{broken:?}");
    page.fill(field("Data, in JSON"), "{ \"total\": 7 }").await;
    assert_eq!(page.follow(button("Publish")).await, 200);
    let path = page.path().await;
    assert!(path.starts_with("/events/") && path.ends_with("?bot=shop"), "{path}");
    page.sees("cart.created").await;
    eventually(LONG, "it is done", async || {
        page.follow(link("Look again")).await;
        page.text(css(".panel")).await.contains("done")
    })
    .await;
    page.goto("/").await;
    page.sees_no("Publish a first event").await;
    instance.stop().await;
}

#[tokio::test]
async fn a_long_event_is_published_with_the_form() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let page = text(&client.send("GET", "/publish", &[BROWSER], b"").await);
    let (_, field) = page.split_once("<textarea").unwrap();
    let (_, most) = field.split_once("maxlength=\"").unwrap();
    let most: usize = most.split('"').next().unwrap().parse().unwrap();
    for data in [
        // 150,000 characters of JSON. A quote or a comma takes three bytes.
        format!("[{}7]", "%22a%22%2C".repeat(37_500)),
        // As many characters as the form takes, with nine bytes for each.
        format!("%22{}%22", "%E6%BC%A2".repeat(most - 2)),
    ] {
        let body = format!("type=a.b&bot=shop&data={data}");
        let answer = client.send("POST", "/publish", &[FORM, BROWSER], body.as_bytes()).await;
        assert_eq!(answer.code, 303, "{}", text(&answer));
    }
    instance.stop().await;
}

#[tokio::test]
async fn what_was_typed_stays_if_the_event_cannot_be_published() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let body = b"type=typed.by.hand&bot=shop&data=%7B%22half%22%3A1%7D";
    // From now on there is a connection.
    let answer = client.send("POST", "/publish", &[FORM, BROWSER], body).await;
    assert_eq!(answer.code, 303, "{}", text(&answer));
    server.sigstop();
    let answer = client.send("POST", "/publish", &[FORM, BROWSER], body).await;
    server.sigcont();
    assert_eq!((answer.code, answer.header("retry-after")), (503, Some("1")), "{answer:?}");
    let page = text(&answer);
    for kept in ["value=\"typed.by.hand\"", "value=\"shop\"", "{&quot;half&quot;:1}"] {
        assert!(page.contains(kept), "{kept} is missing in {page}");
    }
    assert!(page.contains("id=\"publish-problem\"") && page.contains("Id of the event"), "{page}");
    instance.stop().await;
}

#[tokio::test]
async fn an_event_that_may_be_stored_keeps_its_id_if_its_form_is_sent_again() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let config = config(&server, "test", &[("bus.dedup", "\"1h\"")]);
    let log = Log::default();
    let config = config.replace(&server.url(), &proxy.url());
    let instance = Instance::start(&config, log.content()).await;
    let client = instance.client();
    let publish = async |data: u32, hidden: &str| {
        let body = format!("type=a.b&bot=shop&data={data}{hidden}");
        client.send("POST", "/publish", &[FORM, BROWSER], body.as_bytes()).await
    };
    // The event is on the bus, and its publisher does not learn it.
    proxy.swallow("\r\nEXEC\r\n", 1);
    let answer = publish(1, "").await;
    assert_eq!(answer.code, 503, "{answer:?}");
    let page = text(&answer);
    let value = |name: &str| {
        let field = page.split_once(&format!("name=\"{name}\" value=\""));
        field.unwrap_or_else(|| panic!("{name}: {page}")).1.split('"').next().unwrap()
    };
    let (id, hidden) = (value("id"), format!("&id={}&of={}", value("id"), value("of")));
    assert!(page.contains(&format!("Id of the event: {id}.")), "{page}");
    let answer = publish(1, &hidden).await;
    assert_eq!(answer.header("location"), Some(&*format!("/events/{id}?bot=shop")), "{answer:?}");
    // Other data is another event.
    let answer = publish(2, &hidden).await;
    assert!(answer.header("location").is_some_and(|to| !to.contains(id)), "{answer:?}");
    eventually(LONG, "the other one is handled", async || log.len() >= 2).await;
    let ids = log.ids("test");
    assert!(ids.len() == 2 && ids[0] == id && ids[1] != id, "{id}: {ids:?}");
    instance.stop().await;
}

#[tokio::test]
async fn only_tokens_that_may_publish_have_the_form_and_only_for_their_bots() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef")).unwrap();
        let bots = r#"["shop-*"]"#;
        format!("{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = {bots} }}")
    };
    let tokens = [
        token("reader", r#"["read"]"#),
        token("writer", r#"["read", "publish"]"#),
        token("sender", r#"["publish"]"#),
    ];
    let server = RedisServer::start(Options::default());
    let tokens = format!("[{}]", tokens.join(", "));
    let instance = start(&server, &[("auth.tokens", &tokens)]).await;
    let client = Client::new(&instance.client().address);
    let cookie = async |name: &str| {
        let body = format!("token={name}-0123456789abcdef");
        let answer = client.send("POST", "/login", &[FORM], body.as_bytes()).await;
        answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned()
    };
    let (reader, writer, sender) =
        (cookie("reader").await, cookie("writer").await, cookie("sender").await);
    let publish = async |cookie: &str, body: &str, more: &[(&str, &str)]| {
        let headers = [&[("cookie", cookie), FORM, BROWSER], more].concat();
        client.send("POST", "/publish", &headers, body.as_bytes()).await
    };
    let good = "type=a.b&bot=shop-1&data=";
    assert_eq!(publish(&reader, good, &[]).await.code, 403);
    let read = async |cookie: &str, path: &str| {
        client.send("GET", path, &[("cookie", cookie), BROWSER], b"").await
    };
    assert_eq!(read(&reader, "/publish").await.code, 403);
    assert!(!text(&read(&reader, "/events").await).contains("/publish"));
    assert!(text(&read(&writer, "/events").await).contains("/publish"));
    for foreign in [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")] {
        assert_eq!(publish(&writer, good, &[foreign]).await.code, 403, "{foreign:?}");
    }
    let answer = publish(&writer, "type=a.b&bot=other&data=1", &[]).await;
    assert_eq!(answer.code, 400);
    assert!(text(&answer).contains("This token is not for this bot."), "{}", text(&answer));
    let answer = publish(&writer, good, &[]).await;
    assert_eq!(answer.code, 303, "{answer:?}");
    let to = answer.header("location").unwrap();
    assert!(to.starts_with("/events/") && to.ends_with("?bot=shop-1"), "{to}");
    assert_eq!(read(&writer, to).await.code, 200);
    // A token that cannot read is told the id.
    let answer = publish(&sender, good, &[]).await;
    assert_eq!(answer.code, 200);
    assert!(text(&answer).contains("Published as event"), "{}", text(&answer));
    // Nothing of what was refused is on the bus.
    let mut connection = server.connection().await;
    let length: u64 =
        redis::cmd("XLEN").arg("fairlane:events").query_async(&mut connection).await.unwrap();
    assert_eq!(length, 2);
    instance.stop().await;
}
