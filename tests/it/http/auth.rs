//! The scopes of tokens: the routes that each of them opens.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fairlane::app::App;
use fairlane::config::Config;
use serde_json::json;
use tempfile::TempDir;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Operation};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const STRUCTURED: &str = "application/cloudevents+json";
const BATCH: &str = "application/cloudevents-batch+json";
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

/// All other routes require a token. Add a route here only if it reveals nothing and changes
/// nothing.
const OPEN: [&str; 5] = [
    "GET /healthz",
    "GET /readyz",
    // The name of a lease is a capability.
    "POST /v1/leases/{lease}/complete",
    "POST /v1/leases/{lease}/extend",
    "POST /v1/leases/{lease}/fail",
];
/// Open pages that are not in the document.
const OPEN_PAGES: [&str; 3] = ["/login", "/docs/", "/openapi.json"];
/// The login page, its forms and its files.
const OF_LOGIN: [&str; 6] = ["/login", "/logout", "/theme", "/style.css", "/live.js", "/icon.svg"];

/// The tokens of the tests: name, scopes, bots. The text of each is its name with a suffix.
const TOKENS: [(&str, &str, &str); 5] = [
    ("shop", r#"["publish"]"#, r#"["shop-*", "exact"]"#),
    ("reader", r#"["read"]"#, r#"["shop-*"]"#),
    ("operator", r#"["operate"]"#, r#"["shop-*"]"#),
    ("overseer", r#"["read", "operate"]"#, r#"["*"]"#),
    ("root", r#"["publish", "read", "operate"]"#, r#"["*"]"#),
];

fn text(name: &str) -> String {
    format!("{name}-0123456789abcdef")
}

/// The setting `auth.tokens`, with the files in `directory`.
fn tokens(directory: &Path) -> String {
    let table = |(name, scopes, bots): &(&str, &str, &str)| {
        let file = directory.join(name);
        std::fs::write(&file, text(name) + "\n").unwrap();
        let file = file.display();
        format!(
            "{{ name = \"{name}\", token_file = \"{file}\", scopes = {scopes}, bots = {bots} }}"
        )
    };
    format!("[{}]", TOKENS.iter().map(table).collect::<Vec<_>>().join(", "))
}

struct Guarded {
    server: RedisServer,
    instance: Instance,
    client: Client,
    _directory: TempDir,
}

impl Guarded {
    async fn start() -> Self {
        let (server, directory) =
            (RedisServer::start(Options::default()), tempfile::tempdir().unwrap());
        let config = config(&server, "test", &[("auth.tokens", &tokens(directory.path()))]);
        let instance = Instance::start(&config, Log::default().content()).await;
        let client = instance.client();
        Self { server, instance, client, _directory: directory }
    }

    fn as_caller(&self, name: &str) -> Client {
        self.client.with_token(&text(name))
    }
}

#[tokio::test]
async fn every_route_but_the_open_ones_asks_for_a_token_with_its_scope() {
    let guarded = Guarded::start().await;
    let operations = Operation::all(&guarded.client).await;
    let open = operations.iter().filter(|operation| operation.scopes.is_none());
    let open: BTreeSet<_> = open.map(Operation::name).collect();
    assert_eq!(open, OPEN.map(str::to_owned).into(), "what the document says");
    for operation in &operations {
        let (name, path) = (operation.name(), operation.path(&[]));
        let ask = async |client: &Client| client.send(&operation.method, &path, &[], b"").await;
        let Some(scopes) = &operation.scopes else {
            assert!(matches!(ask(&guarded.client).await.code, 200 | 404), "{name}");
            continue;
        };
        // The first scope is required. Scopes after it are accepted in its place.
        let scope = scopes.first().unwrap_or_else(|| panic!("{name} asks for nothing"));
        for wrong in [
            guarded.client.clone(),
            guarded.client.with_token("wrong-0123456789abcdef"),
            guarded.client.with_token(""),
            guarded.client.with_token(&text("root")[..20]),
            guarded.client.with_token(&(text("root") + "x")),
        ] {
            let answer = ask(&wrong).await;
            assert_eq!((answer.code, answer.problem().as_str()), (401, "unauthorized"), "{name}");
            assert!(answer.header("www-authenticate").unwrap().starts_with("Bearer"), "{name}");
        }
        for (token, scopes, _) in TOKENS {
            let answer = ask(&guarded.as_caller(token)).await;
            if scopes.contains(scope) {
                assert_ne!(answer.code, 401, "{name} by {token}");
            } else {
                assert_eq!((answer.code, answer.problem().as_str()), (403, "forbidden"), "{name}");
                assert!(answer.json()["detail"].as_str().unwrap().contains(scope), "{answer:?}");
            }
        }
    }
    for page in OPEN_PAGES {
        assert!(guarded.client.get(page).await.code < 400, "{page}");
    }
    // A token is not accepted in any other form.
    let basic = [("authorization", "Basic cm9vdC0wMTIzNDU2Nzg5YWJjZGVm")];
    assert_eq!(guarded.client.send("GET", "/v1/pipelines", &basic, b"").await.code, 401);
    let query = format!("/v1/pipelines?access_token={}", text("root"));
    assert_eq!(guarded.client.get(&query).await.code, 401);
    guarded.instance.stop().await;
}

/// Every web page as its source adds it: method and template. No document lists them.
fn pages() -> Vec<(&'static str, &'static str)> {
    let sources = [
        include_str!("../../../src/http/pages/mod.rs"),
        include_str!("../../../src/http/pages/login.rs"),
    ];
    let routes = sources.into_iter().flat_map(|source| source.split(".route(").skip(1));
    let pages = routes.flat_map(|route| {
        let template = route.split('"').nth(1).expect("a literal path");
        let methods = [("GET", "get("), ("POST", "post(")];
        let served = methods.into_iter().filter(move |(_, call)| route.contains(*call));
        served.map(move |(method, _)| (method, template))
    });
    pages.collect()
}

#[tokio::test]
async fn every_page_but_that_of_the_login_asks_for_a_token_and_every_change_for_its_scope() {
    let guarded = Guarded::start().await;
    let (wrong, reader) =
        (guarded.client.with_token("wrong-0123456789abcdef"), guarded.as_caller("reader"));
    let mut tested = 0;
    for (method, template) in pages() {
        if OF_LOGIN.contains(&template) {
            continue;
        }
        let parts = template.split(['{', '}']).enumerate();
        let path: String =
            parts.map(|(at, part)| if at % 2 == 0 { part } else { "test" }).collect();
        for stranger in [&guarded.client, &wrong] {
            let answer = stranger.send(method, &path, &[], b"").await;
            let to = answer.header("location").unwrap_or_default();
            assert!(answer.code == 303 && to.starts_with("/login"), "{method} {path}: {answer:?}");
        }
        if method == "POST" {
            let answer = reader.post(&path).await;
            let said = String::from_utf8_lossy(&answer.body);
            assert!(answer.code == 403 && said.contains("has no scope"), "{path}: {said}");
        }
        tested += 1;
    }
    assert!(tested > 30, "only {tested} pages were found");
    guarded.instance.stop().await;
}

#[tokio::test]
async fn a_token_publishes_for_its_bots_only_and_all_or_nothing() {
    let guarded = Guarded::start().await;
    let shop = guarded.as_caller("shop");
    let length = async || {
        let mut connection = guarded.server.connection().await;
        let added: redis::RedisResult<u64> =
            redis::cmd("XLEN").arg(STREAM).query_async(&mut connection).await;
        added.unwrap()
    };
    for bot in ["shop-1", "exact", "shop-"] {
        assert_eq!(shop.publish(STRUCTURED, event(bot, "t", 1)).await.code, 202, "{bot}");
    }
    let before = length().await;
    assert_eq!(before, 3);
    let bots = ["shop-1", "other", "exact2", "xshop-1"].map(|bot| event(bot, "t", 1));
    let answer = shop.publish(BATCH, format!("[{}]", bots.join(","))).await;
    assert_eq!((answer.code, answer.problem().as_str()), (403, "forbidden"));
    let errors = answer.json()["errors"].clone();
    let named: Vec<_> =
        errors.as_array().unwrap().iter().map(|error| error["index"].clone()).collect();
    assert_eq!(named, [1, 2, 3], "{errors}");
    assert_eq!(length().await, before);
    guarded.instance.stop().await;
}

#[tokio::test]
async fn a_token_sees_and_changes_its_own_bots_only() {
    let guarded = Guarded::start().await;
    let (reader, operator) = (guarded.as_caller("reader"), guarded.as_caller("operator"));
    let overseer = guarded.as_caller("overseer");
    let path = |bot: &str, rest: &str| format!("/v1/pipelines/test/bots/{bot}{rest}");
    for bot in ["shop-1", "shop-2"] {
        assert_eq!(operator.post(&path(bot, "/pause")).await.code, 204);
    }
    assert_eq!(overseer.post(&path("other", "/pause")).await.code, 204);
    let bots = ["shop-1", "shop-2", "other"];
    add(&guarded.server, STREAM, &bots.map(|bot| event(bot, "t", 1))).await;
    let list = async |client: &Client| {
        let listed = client.get("/v1/pipelines/test/bots").await.json();
        let names = listed["bots"].as_array().unwrap().iter().map(|bot| bot["bot"].to_string());
        names.collect::<BTreeSet<_>>()
    };
    eventually(LONG, "all wait", async || {
        overseer.get("/v1/pipelines/test").await.json()["depth"] == 3
    })
    .await;
    assert_eq!(list(&overseer).await.len(), 3);
    assert_eq!(list(&reader).await, ["\"shop-1\"", "\"shop-2\""].map(str::to_owned).into());
    // Totals are of all bots.
    assert_eq!(reader.get("/v1/pipelines/test").await.json()["paused"], json!(null));
    assert_eq!(overseer.get("/v1/pipelines/test").await.json()["paused"], 3);

    assert_eq!(reader.get(&path("shop-1", "")).await.code, 200);
    assert_eq!(reader.get(&path("other", "")).await.problem(), "forbidden");
    assert_eq!(reader.get("/v1/pipelines/test/dead?bot=other").await.problem(), "forbidden");
    assert_eq!(reader.get("/v1/pipelines/test/dead?bot=shop-1").await.code, 200);
    let weight = (&[("content-type", "application/json")][..], &b"{\"weight\":1}"[..]);
    for (method, rest, (headers, body)) in [
        ("PUT", "", weight),
        ("POST", "/pause", (&[][..], &b""[..])),
        ("POST", "/resume", (&[], b"")),
        ("POST", "/release", (&[], b"")),
        ("DELETE", "/queue", (&[], b"")),
    ] {
        let foreign = operator.send(method, &path("other", rest), headers, body).await;
        assert_eq!(
            (foreign.code, foreign.problem().as_str()),
            (403, "forbidden"),
            "{method} {rest}"
        );
        let own = operator.send(method, &path("shop-2", rest), headers, body).await;
        assert!(matches!(own.code, 200 | 204), "{method} {rest}: {own:?}");
    }
    let shown = overseer.get(&path("other", "")).await.json();
    assert_eq!((&shown["depth"], &shown["weight"]), (&json!(1), &json!(1)), "{shown}");
    for whole in ["/pause", "/resume", "/dead/redrive"] {
        let path = format!("/v1/pipelines/test{whole}");
        assert_eq!(operator.post(&path).await.problem(), "forbidden", "{whole}");
        assert!(matches!(overseer.post(&path).await.code, 200 | 204), "{whole}");
    }
    assert_eq!(operator.post("/v1/pipelines/test/dead/redrive?bot=shop-1").await.code, 200);
    assert_eq!(
        operator.post("/v1/pipelines/test/dead/redrive?bot=other").await.problem(),
        "forbidden"
    );
    guarded.instance.stop().await;
}

#[tokio::test]
async fn without_tokens_only_local_names_are_answered_and_no_page_of_another_site() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("http.hosts", r#"["Fairlane.internal"]"#)]);
    let instance = Instance::start(&config, Log::default().content()).await;
    let client = instance.client();
    let ask = async |path: &str, headers: &[(&str, &str)]| {
        let answer = client.send("GET", path, headers, b"").await;
        (answer.code, if answer.code < 400 { String::new() } else { answer.problem() })
    };
    let good = (200, String::new());
    for host in [
        "localhost",
        "LOCALHOST:80",
        "app.localhost:8080",
        "localhost.",
        "127.0.0.1",
        "10.1.2.3:99",
        "[::1]:8080",
        "[::1]",
        "fairlane.internal",
        "FAIRLANE.internal:8080",
    ] {
        assert_eq!(ask("/v1/pipelines", &[("host", host)]).await, good, "{host}");
    }
    for host in [
        "evil.example",
        "localhost.evil.example",
        "evil.example:8080",
        "xlocalhost",
        "",
        "127.0.0.1.evil.example",
        "fairlane.internal.evil.example",
        "notfairlane.internal",
    ] {
        for path in ["/v1/pipelines", "/openapi.json", "/docs/"] {
            let expected = (421, "unknown-host".to_owned());
            assert_eq!(ask(path, &[("host", host)]).await, expected, "{host} {path}");
        }
        assert_eq!(ask("/healthz", &[("host", host)]).await, good, "{host}");
        assert_eq!(ask("/readyz", &[("host", host)]).await, good, "{host}");
    }
    for (origin, same) in [
        ("http://localhost:8080", true),
        ("https://localhost:8080", true),
        ("http://localhost", false),
        ("http://localhost:8081", false),
        ("http://evil.example", false),
        ("null", false),
        ("localhost:8080", false),
    ] {
        let headers = [("host", "localhost:8080"), ("origin", origin)];
        let expected = if same { good.clone() } else { (403, "cross-site".to_owned()) };
        assert_eq!(ask("/v1/pipelines", &headers).await, expected, "{origin}");
    }
    for (site, allowed) in [("same-origin", true), ("none", true), ("cross-site", false)] {
        let expected = if allowed { good.clone() } else { (403, "cross-site".to_owned()) };
        assert_eq!(ask("/v1/pipelines", &[("sec-fetch-site", site)]).await, expected, "{site}");
    }
    // Nothing from the request of a foreign page is stored.
    let foreign = [("origin", "http://evil.example"), ("content-type", STRUCTURED)];
    let body = event("b", "t", 1);
    assert_eq!(client.send("POST", "/v1/events", &foreign, body.as_bytes()).await.code, 403);
    let mut connection = server.connection().await;
    let length: u64 = redis::cmd("XLEN").arg(STREAM).query_async(&mut connection).await.unwrap();
    assert_eq!(length, 0);
    instance.stop().await;
}

#[tokio::test]
async fn a_visitor_chooses_the_colours_before_the_login() {
    let guarded = Guarded::start().await;
    let body = b"theme=dark&to=%2Flogin%3Fto%3D%252F";
    let answer = guarded.client.send("POST", "/theme", &[FORM], body).await;
    assert_eq!((answer.code, answer.header("location")), (303, Some("/login?to=%2F")));
    assert!(answer.header("set-cookie").unwrap().starts_with("fairlane-theme=dark;"), "{answer:?}");
}

#[tokio::test]
async fn a_session_that_began_over_https_is_sent_over_https_only() {
    let guarded = Guarded::start().await;
    let body = format!("token={}", text("root"));
    for (scheme, is_secure) in [("https", true), ("http", false)] {
        let origin = format!("{scheme}://{}", guarded.client.address);
        let headers = [FORM, ("origin", &*origin)];
        let answer = guarded.client.send("POST", "/login", &headers, body.as_bytes()).await;
        let cookie = answer.header("set-cookie").expect("it is known");
        assert_eq!(cookie.ends_with("; Secure"), is_secure, "{cookie}");
    }
}

#[tokio::test]
async fn no_cache_keeps_what_a_token_shows() {
    let guarded = Guarded::start().await;
    let overseer = guarded.as_caller("overseer");
    for path in ["/v1/pipelines", "/v1/problems", "/v1/pipelines/none", "/v1/none"] {
        let answer = overseer.get(path).await;
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}: {answer:?}");
    }
    // The same for everybody.
    let style = guarded.client.get("/style.css").await;
    assert_eq!(style.header("cache-control"), Some("max-age=300"));
}

#[tokio::test]
async fn with_tokens_any_name_is_answered() {
    let guarded = Guarded::start().await;
    let headers = [("host", "fairlane.example"), ("origin", "https://console.example")];
    let root = guarded.as_caller("root");
    assert_eq!(root.send("GET", "/v1/pipelines", &headers, b"").await.code, 200);
    guarded.instance.stop().await;
}

/// The reason why an instance with these settings does not start.
async fn refused(server: &RedisServer, settings: &[(&str, &str)]) -> String {
    let config = config(server, "test", settings);
    match Config::from_toml(&config, "the test") {
        Err(error) => error.to_string(),
        Ok(config) => {
            let app = App::builder(config).handler("recorder", Log::default().content());
            app.build().await.expect_err("it is refused").to_string()
        }
    }
}

#[tokio::test]
async fn tokens_that_cannot_be_used_are_refused_at_start_without_showing_them() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        std::fs::write(directory.path().join(name), content).unwrap();
        let path = directory.path().join(name);
        let path = path.display();
        format!("{{ name = \"{name}\", token_file = \"{path}\", scopes = [\"read\"] }}")
    };
    let secret = "hidden-0123456789";
    let missing =
        "{ name = \"m\", token_file = \"/nowhere/token\", scopes = [\"read\"] }".to_owned();
    for (tokens, expected) in [
        (vec![missing], "/nowhere/token"),
        (vec![file("short", b"hidden-01234567\n")], "fewer than 16 bytes"),
        (vec![file("empty", b"")], "fewer than 16 bytes"),
        (vec![file("spaced", b"hidden-0123 456789")], "blanks"),
        (vec![file("long", &[b'x'; 5_000])], "more than 4096 bytes"),
        (vec![file("one", secret.as_bytes()), file("two", secret.as_bytes())], "are the same"),
    ] {
        let said = refused(&server, &[("auth.tokens", &format!("[{}]", tokens.join(",")))]).await;
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(!said.contains("hidden"), "{said}");
    }
}

/// Kills the process when it is dropped.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        // Both calls fail harmlessly if the process ended and was waited for before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn actions_of_operators_are_logged_with_the_name_of_their_token_and_never_the_token() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let tokens = tokens(directory.path());
    let settings = [("auth.tokens", &*tokens), ("pipelines.test.handler", "\"log\"")];
    let file = directory.path().join("fairlane.toml");
    std::fs::write(&file, config(&server, "test", &settings)).unwrap();
    let mut serving = Serving(
        Command::new(env!("CARGO_BIN_EXE_fairlane"))
            .arg("serve")
            .arg("--config")
            .arg(&file)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut log = serving.0.stderr.take().unwrap();
    let mut said = Vec::new();
    let address = loop {
        let mut byte = [0];
        assert_eq!(log.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&said));
        said.push(byte[0]);
        let text = String::from_utf8_lossy(&said);
        if text.contains("fairlane is running") && text.ends_with('\n') {
            let after = text.split("http=").nth(1).expect("it says where").to_owned();
            break after.split_whitespace().next().unwrap().to_owned();
        }
    };
    let client = Client::new(&address).with_token(&text("overseer"));
    assert_eq!(client.post("/v1/pipelines/test/bots/shop-7/pause").await.code, 204);
    assert_eq!(client.post("/v1/pipelines/test/pause").await.code, 204);
    assert_eq!(
        client.with_token("wrong-0123456789abcdef").post("/v1/pipelines/test/pause").await.code,
        401
    );
    let stopped = Command::new("kill").arg(serving.0.id().to_string()).status().unwrap();
    assert!(stopped.success());
    log.read_to_end(&mut said).unwrap();
    assert!(serving.0.wait().unwrap().success());
    let said = String::from_utf8_lossy(&said);
    let acts: Vec<_> = said.lines().filter(|line| line.contains("an operator acted")).collect();
    assert_eq!(acts.len(), 2, "{said}");
    for part in ["overseer", "pause", "test", "shop-7"] {
        assert!(acts[0].contains(part), "{part}: {}", acts[0]);
    }
    assert!(!said.contains("0123456789abcdef"), "{said}");
}
