//! A minimal HTTP client, and readers of metrics and of the OpenAPI document.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Maximum time for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time for a start, which takes some milliseconds, or longer beside other work.
const READY: Duration = Duration::from_secs(30);

/// Waits until the process at `address` has fixed where its pipelines start.
///
/// # Panics
/// If it has not after half a minute. A test of a process that cannot become ready must not call this.
pub async fn until_ready(address: &str) {
    let client = Client::new(address);
    let ready = async {
        while client.get("/readyz").await.code != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(READY, ready).await.is_err() {
        let (code, said) = get(address, "/readyz").await;
        panic!("{address} is not ready within {READY:?}: {code} {said}");
    }
}

/// Requests a path. Returns the code and the body. Code 0 means no answer.
pub async fn get(address: &str, path: &str) -> (u16, String) {
    let answer = Client::new(address).send("GET", path, &[], b"").await;
    (answer.code, String::from_utf8_lossy(&answer.body).into_owned())
}

/// An answer. Code 0 means that none came.
#[derive(Debug, Clone, Default)]
pub struct Response {
    pub code: u16,
    head: String,
    pub body: Vec<u8>,
}

impl Response {
    /// The first answer in `bytes`, and the bytes after it.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let code = head.split(' ').nth(1)?.parse().ok()?;
        let mut answer = Self { code, head, body: Vec::new() };
        let length = answer.header("content-length").and_then(|length| length.parse().ok());
        let (body, rest) = bytes[end + 4..].split_at_checked(length.unwrap_or(0))?;
        answer.body = body.to_vec();
        Some((answer, rest))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The names of its headers, in order.
    pub fn header_names(&self) -> Vec<String> {
        let names = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        names.map(|(name, _)| name.to_ascii_lowercase()).collect()
    }

    /// The body, which must be JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The last part of the type of a problem.
    pub fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], self.code, "{problem}");
        let kind = problem["type"].as_str().unwrap();
        kind.strip_prefix("urn:fairlane:problem:").unwrap_or(kind).to_owned()
    }
}

/// Sends each request over a separate connection.
#[derive(Debug, Clone)]
pub struct Client {
    pub address: String,
    token: Option<String>,
    source: Option<[u8; 4]>,
}

impl Client {
    pub fn new(address: &str) -> Self {
        Self { address: address.to_owned(), token: None, source: None }
    }

    pub fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// The same client, calling from another address of this machine.
    pub fn calling_from(&self, source: [u8; 4]) -> Self {
        Self { source: Some(source), ..self.clone() }
    }

    pub async fn connect(&self) -> io::Result<TcpStream> {
        let Some(source) = self.source else { return TcpStream::connect(&self.address).await };
        let socket = TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(self.address.parse::<SocketAddr>().map_err(io::Error::other)?).await
    }

    pub async fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], b"").await
    }

    pub async fn post(&self, path: &str) -> Response {
        self.send("POST", path, &[], b"").await
    }

    /// Publishes the events in `body`.
    pub async fn publish(&self, kind: &str, body: impl AsRef<[u8]>) -> Response {
        self.send("POST", "/v1/events", &[("content-type", kind)], body.as_ref()).await
    }

    /// The head of a request. `host` is added unless it is among the headers.
    pub fn head(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> String {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        let token = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let own = [("host", Some(&self.address)), ("authorization", token.as_ref())];
        let own = own.iter().filter_map(|(name, value)| Some((*name, value.as_ref()?.as_str())));
        let own = own.filter(|(name, _)| headers.iter().all(|(other, _)| other != name));
        for (name, value) in own.chain(headers.iter().copied()) {
            head.extend([name, ": ", value, "\r\n"]);
        }
        head + "\r\n"
    }

    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        let length = body.len().to_string();
        let mut all = vec![("connection", "close")];
        if !body.is_empty() {
            all.push(("content-length", &length));
        }
        all.extend(headers);
        let head = self.head(method, path, &all);
        let bytes = self.raw(&[head.as_bytes(), body].concat()).await;
        Response::parse(&bytes).map(|(answer, _)| answer).unwrap_or_default()
    }

    /// Sends bytes, and returns everything that arrives until the server closes the connection.
    pub async fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut answer = Vec::new();
        let exchange = async {
            let Ok(mut stream) = self.connect().await else { return };
            // The server may have answered and closed before all bytes were sent.
            let _ = stream.write_all(bytes).await;
            let _ = stream.read_to_end(&mut answer).await;
        };
        let ended = tokio::time::timeout(PATIENCE, exchange).await;
        assert!(ended.is_ok(), "no end of the answer within {PATIENCE:?}: {:?}", Shown(&answer));
        answer
    }
}

struct Shown<'a>(&'a [u8]);

impl std::fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.0))
    }
}

/// One operation of the OpenAPI document.
#[derive(Debug, Clone)]
pub struct Operation {
    pub method: String,
    /// The path with parameters in braces.
    pub template: String,
    /// The documented codes.
    pub codes: BTreeSet<u16>,
    /// The scopes that it requires. `None` means that it is open.
    pub scopes: Option<Vec<String>>,
    /// The content types of its body.
    pub takes: Vec<String>,
    /// Whether the body is required.
    pub needs_body: bool,
    /// The required query parameters.
    query: Vec<String>,
}

impl Operation {
    /// Every operation that the server of `client` describes.
    pub async fn all(client: &Client) -> Vec<Self> {
        let document = client.get("/openapi.json").await.json();
        let mut all = Vec::new();
        for (template, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                all.push(Self::read(template, method, operation));
            }
        }
        assert!(all.len() > 15, "the document has {} operations", all.len());
        all
    }

    fn read(template: &str, method: &str, operation: &Value) -> Self {
        let keys = |value: &Value| -> Vec<String> {
            value.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default()
        };
        let security = operation["security"].as_array().map_or(&[][..], Vec::as_slice);
        let open = security.is_empty() || security.iter().any(|way| way == &serde_json::json!({}));
        let scopes = security.iter().filter_map(|way| way["token"].as_array()).flatten();
        let scopes = scopes.map(|scope| scope.as_str().unwrap().to_owned()).collect();
        let parameters = operation["parameters"].as_array().map_or(&[][..], Vec::as_slice);
        let needed =
            |parameter: &&Value| parameter["in"] == "query" && parameter["required"] == true;
        let query = parameters.iter().filter(needed);
        let query = query.map(|parameter| parameter["name"].as_str().unwrap().to_owned());
        Self {
            method: method.to_uppercase(),
            template: template.to_owned(),
            codes: keys(&operation["responses"]).iter().map(|code| code.parse().unwrap()).collect(),
            scopes: (!open).then_some(scopes),
            takes: keys(&operation["requestBody"]["content"]),
            needs_body: operation["requestBody"]["required"] == true,
            query: query.collect(),
        }
    }

    /// The path for these values of its parameters. Other parameters get valid default values.
    pub fn path(&self, values: &[(&str, &str)]) -> String {
        let defaults = [
            ("pipeline", "test"),
            ("bot", "bot-1"),
            ("id", "0.1700000000000-0"),
            ("event", "event-1"),
            ("lease", "nobody-has-this"),
            ("ad", "ad-1"),
            ("ids", "ad-1,ad-2"),
            ("day", "2026-11-01"),
            ("notification", "0.0192f1b0c1d27c3e8f00112233445566"),
            ("url", "http://192.0.2.1/"),
            ("uid", "user-1"),
            ("rule", "rule-1"),
            ("subscriber", "user-1"),
        ];
        let mut path = self.template.clone();
        for (at, name) in self.query.iter().enumerate() {
            let mark = if at == 0 { "?" } else { "&" };
            path.extend([mark, name.as_str(), "={", name.as_str(), "}"]);
        }
        for (name, value) in values.iter().chain(&defaults) {
            path = path.replace(&format!("{{{name}}}"), value);
        }
        assert!(!path.contains('{'), "{path}: give this parameter a value here");
        path
    }

    pub fn name(&self) -> String {
        format!("{} {}", self.method, self.template)
    }
}

/// The value of the series that has this name and all of these labels, and possibly others.
pub fn metric(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    text.lines().find_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, rest) = series.split_once('{').unwrap_or((series, ""));
        let has = |(label, value): &(&str, &str)| rest.contains(&format!("{label}=\"{value}\""));
        (found == name && labels.iter().all(has)).then(|| value.parse().unwrap())
    })
}

#[test]
fn a_metric_is_found_by_its_labels() {
    let text = "# HELP a b\na 1\na_total{x=\"1\",y=\"2\"} 7\na_total{x=\"2\",y=\"2\"} 8.5\n";
    assert_eq!(metric(text, "a", &[]), Some(1.0));
    assert_eq!(metric(text, "a_total", &[("y", "2"), ("x", "2")]), Some(8.5));
    assert_eq!(metric(text, "a_total", &[("x", "3")]), None);
}

#[test]
fn answers_are_told_apart_on_one_connection() {
    let two =
        b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 204 No Content\r\n\r\n";
    let (first, rest) = Response::parse(two).unwrap();
    assert_eq!((first.code, first.body.as_slice()), (202, &b"{}"[..]));
    let (second, rest) = Response::parse(rest).unwrap();
    assert_eq!((second.code, rest.len()), (204, 0));
    assert!(Response::parse(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort").is_none());
}
