//! Measures the user's own deployment: sends requests at fixed rates to given routes, each in its
//! class. The server keeps its own configuration.
//!
//! 1. Each route is requested once. The bench stops unless the answer is a success or a refusal
//!    under load (429, 503, 504).
//! 2. Each rate runs for some seconds, open loop: slow answers do not delay later requests.
//! 3. The first rate runs again, to show the recovery.
//!
//! Rates, seconds and connections are bounded.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use fairlane::admission::Class;
use serde::Serialize;
use url::Url;

use super::load::{self, Load, Phase, TENANTS};
use super::outcome::{Outcome, quantile_ms};
use crate::error::BenchError;

/// Maximum number of requests per second.
pub(crate) const RATE_MAX: u32 = 20_000;
/// Maximum duration of a bench, s.
pub(crate) const SECONDS_MAX: u64 = 3_600;
/// A placeholder in a path or a body. A number from 0 to 99 replaces it, so that the requests
/// concern several bots.
const NUMBER: &str = "{n}";
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

/// A route: `p1 GET /v1/bots/shop-{n}/counters?ids=ad-1`, optionally followed by a JSON body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub(crate) struct Route {
    class: usize,
    method: &'static str,
    path: String,
    body: String,
}

impl FromStr for Route {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "write a class, a method and a path, such as 'p1 GET /v1/pipelines', optionally followed by a JSON body";
        let mut parts = text.trim().splitn(4, ' ');
        let (class, method, path) = (parts.next(), parts.next(), parts.next());
        let class =
            class.and_then(|class| ["p0", "p1", "p2", "p3"].iter().position(|p| *p == class));
        let class = class.ok_or_else(|| format!("it has no class p0, p1, p2 or p3; {example}"))?;
        let method = METHODS.iter().find(|known| Some(**known) == method);
        let method = method.ok_or_else(|| format!("it has none of {METHODS:?}; {example}"))?;
        let path =
            path.filter(|path| path.starts_with('/') && path.bytes().all(|b| b.is_ascii_graphic()));
        let path = path.ok_or_else(|| {
            format!("its path does not start with / or is not percent-encoded; {example}")
        })?;
        let body = parts.next().unwrap_or_default().trim();
        if !body.is_empty()
            && let Err(error) = serde_json::from_str::<serde_json::Value>(body)
        {
            return Err(format!("its body is not JSON: {error}; {example}"));
        }
        Ok(Self { class, method, path: path.to_owned(), body: body.to_owned() })
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, method, path, body } = self;
        write!(f, "p{class} {method} {path}")?;
        if body.is_empty() { Ok(()) } else { write!(f, " {body}") }
    }
}

impl From<Route> for String {
    fn from(route: Route) -> Self {
        route.to_string()
    }
}

impl Route {
    /// The serialised request of a bot.
    fn request(&self, target: &Target, tenant: usize) -> Vec<u8> {
        let tenant = tenant.to_string();
        let (path, body) = (self.path.replace(NUMBER, &tenant), self.body.replace(NUMBER, &tenant));
        let Target { host, deadline, token, .. } = target;
        let mut text = format!(
            "{} {path} HTTP/1.1\r\nhost: {host}\r\nx-deadline-ms: {}\r\n",
            self.method,
            deadline.as_millis()
        );
        // A client may lower the class of a route, but not raise it.
        if self.class > 0 {
            text.extend(["x-priority: p", &self.class.to_string(), "\r\n"]);
        }
        if let Some(token) = token {
            text.extend(["authorization: Bearer ", token, "\r\n"]);
        }
        if !body.is_empty() {
            let length = body.len();
            text.push_str("content-type: application/json\r\ncontent-length: ");
            text.extend([&length.to_string(), "\r\n"]);
        }
        text.push_str("\r\n");
        text.push_str(&body);
        text.into_bytes()
    }
}

/// The target, and the load.
pub(crate) struct Options {
    /// `http://HOST:PORT`
    pub(crate) url: Url,
    /// The routes, all with the same share.
    pub(crate) routes: Vec<Route>,
    /// The bearer token.
    pub(crate) token: Option<String>,
    /// Requests per second of all routes together, in this order.
    pub(crate) rates: Vec<u32>,
    /// Duration of each rate.
    pub(crate) seconds: u64,
    /// The deadline of each request.
    pub(crate) deadline: Duration,
    /// Maximum number of connections.
    pub(crate) connections: usize,
}

/// The target with its resolved address.
struct Target {
    address: SocketAddr,
    host: String,
    deadline: Duration,
    token: Option<String>,
}

/// The results.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The target.
    pub(crate) url: String,
    /// The deadline of each request.
    pub(crate) deadline_ms: u64,
    /// Duration of each rate.
    pub(crate) seconds: u64,
    /// The routes.
    pub(crate) routes: Vec<Route>,
    /// In the order of the runs. The last one is the first rate again.
    pub(crate) steps: Vec<Step>,
}

/// One rate.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    /// Requests per second.
    pub(crate) rate: u32,
    /// Whether this is the first rate again, after all others.
    pub(crate) again: bool,
    /// The 99th percentile of the generator's delay, ms. Above 5 the figures are not valid.
    pub(crate) lag_p99_ms: f64,
    /// The classes of the routes.
    pub(crate) classes: Vec<OfClass>,
}

/// The results of the requests of one class.
#[derive(Debug, Serialize)]
pub(crate) struct OfClass {
    pub(crate) class: &'static str,
    pub(crate) offered: u64,
    /// Answered with success before the deadline.
    pub(crate) in_time: u64,
    /// The share of the requests that were answered in time.
    pub(crate) success: f64,
    pub(crate) in_time_per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    /// Refused: 429, 503, 504.
    pub(crate) shed: u64,
    /// No answer before the deadline.
    pub(crate) late: u64,
    /// No free connection, a broken connection, or another status.
    pub(crate) failed: u64,
}

/// Whether all addresses of a URL belong to this machine.
///
/// # Errors
/// If the name cannot be resolved.
pub(crate) async fn is_loopback(url: &Url) -> Result<bool, BenchError> {
    Ok(addresses(url).await?.iter().map(SocketAddr::ip).all(|ip| match ip {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback(),
    }))
}

async fn addresses(url: &Url) -> Result<Vec<SocketAddr>, BenchError> {
    let unreachable = |why: String| BenchError::Unreachable { url: url.to_string(), why };
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = tokio::net::lookup_host((host, url.port_or_known_default().unwrap_or(80))).await;
    let found: Vec<_> = found.map_err(|error| unreachable(error.to_string()))?.collect();
    if found.is_empty() {
        Err(unreachable("its name has no address".to_owned()))
    } else {
        Ok(found)
    }
}

/// Runs the bench.
///
/// # Errors
/// If the target does not answer, or answers a route with an unexpected status.
pub(crate) async fn run(
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let Options { url, routes, token, rates, seconds, deadline, connections } = options;
    let address = addresses(&url).await?[0];
    let host = match (url.host_str().unwrap_or_default(), url.port()) {
        (host, Some(port)) => format!("{host}:{port}"),
        (host, None) => host.to_owned(),
    };
    let target = Target { address, host, deadline, token };
    for route in &routes {
        watch("asking each route once", 0);
        try_once(&url, &target, route).await?;
    }
    let all = rates.iter().map(|rate| (*rate, false));
    let again = rates.first().map(|rate| (*rate, true)).filter(|_| rates.len() > 1);
    let mut steps = Vec::new();
    for (number, (rate, again)) in all.chain(again).enumerate() {
        watch("requests per second", rate.into());
        let phase = Phase { lasts: Duration::from_secs(seconds), rates: shares(&routes, rate) };
        let load = Load {
            address,
            phases: vec![phase],
            requests: requests(&routes, &target),
            deadline,
            retries: 0,
            heavy: 1.0,
            connections: places(&routes, connections),
            seed: number as u64 + 1,
        };
        let outcome = load::send_unpinned(load).await?;
        steps.push(step(&routes, &outcome, rate, again));
    }
    let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
    Ok(Report { url: url.to_string(), deadline_ms, seconds, routes, steps })
}

/// Checks each route before the measurement.
async fn try_once(url: &Url, target: &Target, route: &Route) -> Result<(), BenchError> {
    // A longer timeout than the deadline, so that a cold server is not an error.
    let patience = target.deadline.max(Duration::from_secs(10));
    let request = route.request(&Target { deadline: patience, ..target.same() }, 0);
    let asked = tokio::time::timeout(patience, load::answer_once(target.address, &request)).await;
    let unreachable = |why: String| BenchError::Unreachable { url: url.to_string(), why };
    let answer = asked.map_err(|_| unreachable(format!("no answer within {patience:?}")))?;
    let head = answer.map_err(|error| unreachable(error.to_string()))?;
    let refused = |why: String| BenchError::Route { route: route.to_string(), why };
    if head.to_ascii_lowercase().contains("\r\ntransfer-encoding: chunked") {
        return Err(refused("is answered in chunks, whose end this bench does not see".to_owned()));
    }
    match head.get(9..12).and_then(|status| status.parse::<u16>().ok()) {
        Some(200..=299 | 429 | 503 | 504) => Ok(()),
        Some(status) => Err(refused(format!("is answered {status}; correct it, or the token"))),
        None => Err(unreachable("it does not speak HTTP/1.1".to_owned())),
    }
}

impl Target {
    fn same(&self) -> Self {
        let Self { address, host, deadline, token } = self;
        Self { address: *address, host: host.clone(), deadline: *deadline, token: token.clone() }
    }
}

/// Per class, the request of each bot: the routes of the class in turn.
fn requests(routes: &[Route], target: &Target) -> [Vec<Vec<u8>>; 4] {
    std::array::from_fn(|class| {
        let of: Vec<_> = routes.iter().filter(|route| route.class == class).collect();
        let request = |tenant: usize| match of.get(tenant % of.len().max(1)) {
            Some(route) => route.request(target, tenant),
            None => Vec::new(),
        };
        (0..TENANTS).map(request).collect()
    })
}

/// The rate of each class: every route has the same share.
fn shares(routes: &[Route], rate: u32) -> [f64; 4] {
    #[expect(clippy::cast_precision_loss, reason = "a few routes")]
    let share = |class| {
        let of = routes.iter().filter(|route| route.class == class).count();
        f64::from(rate) * of as f64 / routes.len().max(1) as f64
    };
    std::array::from_fn(share)
}

/// The number of connections of each class. It is the same for all, so that a slow class takes no
/// connection from another.
fn places(routes: &[Route], connections: usize) -> [usize; 4] {
    let is_asked = |class| routes.iter().any(|route| route.class == class);
    let classes = (0..4).filter(|class| is_asked(*class)).count().max(1);
    std::array::from_fn(|class| if is_asked(class) { (connections / classes).max(1) } else { 0 })
}

fn step(routes: &[Route], outcome: &Outcome, rate: u32, again: bool) -> Step {
    let classes = Class::ALL.into_iter().enumerate();
    let asked = classes.filter(|(class, _)| routes.iter().any(|route| route.class == *class));
    let classes = asked.map(|(number, class)| {
        let tally = &outcome.classes[number];
        #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
        let in_time_per_second = tally.good as f64 / outcome.seconds;
        OfClass {
            class: class.as_str(),
            offered: tally.offered,
            in_time: tally.good,
            success: outcome.success(number),
            in_time_per_second,
            p50_ms: quantile_ms(&tally.latency, 0.5),
            p99_ms: quantile_ms(&tally.latency, 0.99),
            shed: tally.shed,
            late: tally.late,
            failed: tally.failed,
        }
    });
    Step { rate, again, lag_p99_ms: outcome.lag_p99_ms, classes: classes.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(token: Option<&str>) -> Target {
        Target {
            address: SocketAddr::from(([127, 0, 0, 1], 1)),
            host: "here:1".to_owned(),
            deadline: Duration::from_millis(250),
            token: token.map(str::to_owned),
        }
    }

    #[test]
    fn a_route_is_read_and_written_and_what_is_wrong_is_said() {
        for text in ["p0 GET /healthz", "p2 POST /v1/x {\"n\": 1}"] {
            assert_eq!(text.parse::<Route>().unwrap().to_string(), text);
        }
        for (wrong, said) in [
            ("", "no class"),
            ("GET /x", "no class"),
            ("p4 GET /x", "no class"),
            ("p1 get /x", "none of"),
            ("p1 GET", "path"),
            ("p1 GET x", "path"),
            ("p1 GET /ü", "path"),
            ("p1 POST /x {", "not JSON"),
        ] {
            let refused = wrong.parse::<Route>().unwrap_err();
            assert!(refused.contains(said) && refused.contains("p1 GET /v1"), "{wrong}: {refused}");
        }
    }

    #[test]
    fn a_request_carries_the_class_the_deadline_and_the_token() {
        let route: Route = "p2 POST /v1/bots/b-{n}/x {\"n\":{\"a\":1}}".parse().unwrap();
        let sent = String::from_utf8(route.request(&target(Some("t")), 7)).unwrap();
        assert_eq!(
            sent,
            "POST /v1/bots/b-7/x HTTP/1.1\r\nhost: here:1\r\nx-deadline-ms: 250\r\nx-priority: p2\r\nauthorization: Bearer t\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"n\":{\"a\":1}}"
        );
        let route: Route = "p0 GET /healthz".parse().unwrap();
        let sent = String::from_utf8(route.request(&target(None), 7)).unwrap();
        assert_eq!(sent, "GET /healthz HTTP/1.1\r\nhost: here:1\r\nx-deadline-ms: 250\r\n\r\n");
    }

    #[test]
    fn each_route_has_the_same_share_and_each_class_its_connections() {
        let routes = ["p1 GET /a", "p1 GET /b", "p3 GET /c"].map(|text| text.parse().unwrap());
        let [p0, p1, p2, p3] = shares(&routes, 300);
        assert!((p1 - 200.0).abs() < 1e-9 && (p3 - 100.0).abs() < 1e-9 && p0 + p2 == 0.0);
        assert_eq!(places(&routes, 100), [0, 50, 0, 50]);
        let requests = requests(&routes, &target(None));
        assert!(requests[1][0].starts_with(b"GET /a ") && requests[1][1].starts_with(b"GET /b "));
    }
}
