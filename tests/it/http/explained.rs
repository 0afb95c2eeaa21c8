//! Problems as people see them: a browser gets a page where a program gets a document.

use crate::support::config::config;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};

const BROWSER: (&str, &str) = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
const FORM: &str = "application/x-www-form-urlencoded";
const TEXT: &str = "text/plain";

async fn start(server: &RedisServer, settings: &[(&str, &str)]) -> Instance {
    Instance::start(&config(server, "test", settings), Log::default().content()).await
}

/// Sends a request as a browser and as a program. Both learn the same, each in its form.
async fn explains(
    client: &Client,
    (method, path): (&str, &str),
    (headers, body): (&[(&str, &str)], &[u8]),
    (code, said): (u16, &str),
) {
    let about = format!("{method} {path}");
    let page = client.send(method, path, &[&[BROWSER], headers].concat(), body).await;
    let text = String::from_utf8_lossy(&page.body);
    assert_eq!(page.code, code, "{about}: {text}");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"), "{about}: {text}");
    assert!(page.header("content-security-policy").is_some(), "{about}: {page:?}");
    assert!(text.contains("<h1>") && text.contains(said), "{about}: {text}");
    let document = client.send(method, path, headers, body).await;
    assert_eq!(document.code, code, "{about}: {document:?}");
    assert!(!document.problem().is_empty(), "{about}");
    for name in ["allow", "x-shed-reason"] {
        assert_eq!(page.header(name), document.header(name), "{about}: {name}");
    }
    let says_when = [&page, &document].map(|answer| answer.header("retry-after").is_some());
    assert_eq!(says_when, [code == 503; 2], "{about}");
}

#[tokio::test]
async fn a_refused_browser_gets_a_page_and_a_program_a_document() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[("admission.p1", "\"refuse\"")]).await;
    let client = instance.client();
    for path in ["/", "/bots/shop"] {
        let said = "an operator switched off requests of this class";
        explains(&client, ("GET", path), (&[], b""), (503, said)).await;
    }
    // The API answers programs only.
    let of_api = client.send("GET", "/v1/pipelines", &[BROWSER], b"").await;
    assert_eq!((of_api.code, of_api.problem().as_str()), (503, "overloaded"));
    instance.stop().await;
}

#[tokio::test]
async fn every_problem_of_a_page_is_a_page_for_a_browser() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[]).await;
    let client = instance.client();
    let long = "x".repeat(17_000);
    let get = async |path: &str, code, said| {
        explains(&client, ("GET", path), (&[], b""), (code, said)).await;
    };
    let post = async |path: &str, sent: (&str, &[u8]), code, said| {
        let kind = ("content-type", sent.0);
        explains(&client, ("POST", path), (&[kind], sent.1), (code, said)).await;
    };
    get("/theme", 405, "Method not allowed").await;
    get("/bots/%FF", 400, "bot: it is not UTF-8").await;
    get("/nowhere", 404, "nothing at <code>/nowhere").await;
    post("/pipelines/test/pause", (TEXT, b"why"), 415, "content-type is text/plain").await;
    post("/theme", (FORM, long.as_bytes()), 413, "16384 bytes").await;

    let late = async |ms, path: &str, said| {
        let headers = [("x-deadline-ms", ms)];
        explains(&client, ("GET", path), (&headers, b""), (504, said)).await;
    };
    let soon = ("x-deadline-ms", "soon");
    let said = "x-deadline-ms: write whole milliseconds";
    explains(&client, ("GET", "/"), (&[soon], b""), (400, said)).await;
    late("0", "/", "nothing was done").await;
    server.sigstop();
    late("300", "/pipelines/test", "the deadline passed while the request ran").await;
    server.sigcont();
    instance.stop().await;
}
