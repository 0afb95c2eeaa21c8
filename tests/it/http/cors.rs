//! Pages of other sites count views and read totals with a public key, and can do nothing else.

use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, Operation, Response};
use crate::support::redis::Persistence;
use crate::support::served::Served;

const SITE: (&str, &str) = ("origin", "https://shop.example");
const VIEWS: &str = "/v1/bots/shop-7/counters/ad-1/views";
const JSON: (&str, &str) = ("content-type", "application/json");
const ORIGINS: (&str, &str) =
    ("http.cors_origins", "[\"https://shop.example\", \"https://other.example\"]");

fn text(token: &str) -> String {
    format!("{token}-0123456789abcdef")
}

fn tokens(directory: &Path, more: &str) -> String {
    let file = |name: &str| {
        let file = directory.join(name);
        std::fs::write(&file, text(name)).unwrap();
        file.display().to_string()
    };
    format!(
        "[{{ name = \"page\", token_file = {:?}, scopes = [\"count\"], bots = [\"shop-*\"], origins = [\"https://shop.example\"]{more} }}, {{ name = \"root\", token_file = {:?}, scopes = [\"publish\", \"read\", \"operate\"] }}]",
        file("page"),
        file("root"),
    )
}

struct Shop {
    process: Served,
    _stores: Stores,
    _directory: TempDir,
}

impl Shop {
    /// Starts with these settings for the public key, or without any tokens.
    async fn start(token: Option<&str>) -> Self {
        let stores = Stores::start(Persistence::None);
        let directory = tempfile::tempdir().unwrap();
        let tokens = token.map(|more| tokens(directory.path(), more));
        let mut settings = vec![ORIGINS];
        settings.extend(tokens.as_ref().map(|tokens| ("auth.tokens", tokens.as_str())));
        let process = Served::start(&stores.direct(&settings)).await;
        Self { process, _stores: stores, _directory: directory }
    }

    fn by(&self, token: &str) -> Client {
        Client::new(&self.process.http()).with_token(&text(token))
    }
}

fn allowed(answer: &Response) -> Option<&str> {
    assert_eq!(answer.header("vary"), Some("origin"), "{answer:?}");
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    answer.header("access-control-allow-origin")
}

#[tokio::test]
async fn a_preflight_request_is_answered_with_the_calls_that_the_site_may_make() {
    let shop = Shop::start(Some("")).await;
    let client = Client::new(&shop.process.http());
    let ask = async |path: &str, origin: &str, method: &str| {
        let headers = [("origin", origin), ("access-control-request-method", method)];
        client.send("OPTIONS", path, &headers, b"").await
    };
    for (path, method) in [
        (VIEWS, "POST"),
        ("/v1/bots/shop-7/counters?ids=a", "GET"),
        ("/v1/bots/shop-7/counters/query", "POST"),
        ("/v1/bots/shop-7/counters/ad-1/daily", "GET"),
    ] {
        let yes = ask(path, SITE.1, method).await;
        assert_eq!((yes.code, allowed(&yes)), (204, Some(SITE.1)), "{path}");
        assert_eq!(yes.header("access-control-allow-methods"), Some(method), "{path}");
        let headers = yes.header("access-control-allow-headers").unwrap();
        assert!(headers.contains("authorization") && headers.contains("content-type"));
        let no = ask(path, "https://evil.example", method).await;
        assert_eq!((no.code, allowed(&no)), (403, None), "{path}");
        assert_eq!(no.problem(), "cross-site");
    }
    for path in ["/v1/events", "/v1/pipelines", "/v1/bots/shop-7/counters/export", "/"] {
        let other = ask(path, SITE.1, "POST").await;
        assert_eq!(other.header("access-control-allow-origin"), None, "{path}");
        assert_ne!(other.code, 204, "{path}");
    }
}

#[tokio::test]
async fn a_public_key_counts_views_and_reads_totals_of_its_bots_from_its_sites_and_nothing_else() {
    let shop = Shop::start(Some("")).await;
    let page = shop.by("page");
    let viewed = page.send("POST", VIEWS, &[SITE], b"").await;
    assert_eq!((viewed.code, allowed(&viewed)), (200, Some(SITE.1)));
    assert_eq!(viewed.json(), json!({ "total": 1 }));
    let exposed = viewed.header("access-control-expose-headers").unwrap();
    assert!(exposed.contains("retry-after"), "{exposed}");
    let one = page.send("POST", VIEWS, &[SITE, JSON], b"{\"n\":1}").await;
    assert_eq!(one.json(), json!({ "total": 2 }));
    let totals = page.send("GET", "/v1/bots/shop-7/counters?ids=ad-1", &[SITE], b"").await;
    assert_eq!(totals.json()["totals"], json!({ "ad-1": 2 }));
    let query = ("/v1/bots/shop-7/counters/query", b"{\"ids\":[\"ad-1\"]}");
    let totals = page.send("POST", query.0, &[SITE, JSON], query.1).await;
    assert_eq!(totals.json()["totals"], json!({ "ad-1": 2 }));
    let days = page.send("GET", "/v1/bots/shop-7/counters/ad-1/daily", &[SITE], b"").await;
    assert_eq!(days.code, 200, "{days:?}");

    let many = page.send("POST", VIEWS, &[SITE, JSON], b"{\"n\":2}").await;
    assert_eq!((many.code, many.json()["errors"][0]["field"].clone()), (400, json!("n")));
    let foreign = page.send("POST", "/v1/bots/bank-1/counters/ad-1/views", &[SITE], b"").await;
    assert_eq!((foreign.code, foreign.problem().as_str()), (403, "forbidden"));
    for origin in [&[][..], &[("origin", "https://other.example")], &[("origin", "null")]] {
        let elsewhere = page.send("POST", VIEWS, origin, b"").await;
        assert_eq!((elsewhere.code, elsewhere.problem().as_str()), (403, "cross-site"));
    }
    let mut refused = 0;
    for operation in Operation::all(&page).await {
        let Some(scopes) = &operation.scopes else { continue };
        if scopes.iter().any(|scope| scope == "count") {
            continue;
        }
        let path = operation.path(&[("bot", "shop-7")]);
        let answer = page.send(&operation.method, &path, &[SITE], b"").await;
        let name = operation.name();
        assert_eq!((answer.code, answer.problem().as_str()), (403, "forbidden"), "{name}");
        refused += 1;
    }
    assert!(refused > 15, "{refused}");
    let page_in_browser = page.send("GET", "/counters", &[SITE], b"").await;
    assert_eq!(page_in_browser.code, 403);

    // The page can read why it was refused.
    let unknown = Client::new(&shop.process.http()).send("POST", VIEWS, &[SITE], b"").await;
    assert_eq!((unknown.code, allowed(&unknown)), (401, Some(SITE.1)));
    let own = shop.by("root").send("POST", VIEWS, &[JSON], b"{\"n\":5}").await;
    assert_eq!(own.json(), json!({ "total": 7 }), "a token of its own is no page");
}

#[tokio::test]
async fn a_public_key_has_a_rate_and_each_address_its_own() {
    let shop = Shop::start(Some(", rate = 6, address_rate = 2")).await;
    let client = shop.by("page");
    let view = async |from: [u8; 4]| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let mut stream = socket.connect(client.address.parse().unwrap()).await.unwrap();
        let head = client.head("POST", VIEWS, &[SITE, ("connection", "close")]);
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        Response::parse(&answer).unwrap().0
    };
    let mut served = 0;
    let mut refused = None;
    // The quota cannot grow to a hundred requests within a few seconds.
    for _ in 0..100 {
        let answer = view([127, 0, 0, 1]).await;
        match answer.code {
            200 => served += 1,
            _ => refused = Some(answer),
        }
        if refused.is_some() {
            break;
        }
    }
    let refused = refused.expect("it is over its rate at last");
    assert_eq!((refused.code, refused.header("x-shed-reason")), (429, Some("quota")));
    assert!(refused.header("retry-after").is_some() && allowed(&refused).is_some());
    assert!(served >= 2, "{served}");
    assert_eq!(view([127, 0, 0, 2]).await.code, 200, "another address");
    let mut codes = Vec::new();
    for n in 3..40 {
        codes.push(view([127, 0, 0, n]).await.code);
    }
    assert!(codes.contains(&429), "the key as a whole has a rate: {codes:?}");
    let seen = shop.by("root").get("/v1/admission").await.json();
    assert_eq!(seen["top_tokens"][0]["token"], "page", "{seen}");
    assert_eq!(seen["top_tokens"][0]["reasons"][0]["reason"], "quota", "{seen}");
}

#[tokio::test]
async fn without_tokens_pages_of_the_named_sites_may_call_these_routes_alone() {
    let shop = Shop::start(None).await;
    let client = Client::new(&shop.process.http());
    let viewed = client.send("POST", VIEWS, &[SITE, ("sec-fetch-site", "cross-site")], b"").await;
    assert_eq!((viewed.code, allowed(&viewed)), (200, Some(SITE.1)));
    let evil = client.send("POST", VIEWS, &[("origin", "https://evil.example")], b"").await;
    assert_eq!((evil.code, evil.problem().as_str()), (403, "cross-site"));
    assert_eq!(allowed(&evil), None);
    let rebound = client.send("POST", VIEWS, &[SITE, ("host", "evil.example")], b"").await;
    assert_eq!(rebound.code, 421);
    for (method, path) in [
        ("POST", "/v1/bots/shop-7/counters/ad-1/reset"),
        ("GET", "/v1/bots/shop-7/counters/export?day=2026-11-01"),
        ("POST", "/v1/pipelines/counters/pause"),
    ] {
        let other = client.send(method, path, &[SITE], b"").await;
        assert_eq!((other.code, other.problem().as_str()), (403, "cross-site"), "{path}");
        assert_eq!(other.header("access-control-allow-origin"), None, "{path}");
    }
    let own = client.post(VIEWS).await;
    assert_eq!(own.json(), json!({ "total": 2 }));
}
