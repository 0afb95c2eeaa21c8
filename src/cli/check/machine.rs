//! This machine: can the listeners be opened, and are there enough file descriptors?

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::Finding;
use crate::app::{Roles, export, files};
use crate::cli::output::{count, number};
use crate::config::Config;
use crate::http::{Access, Proxies};
use crate::outbound::headers::HeaderSets;

/// Timeout for the program on a port to identify itself.
const WHO_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of bytes read of its answer.
const WHO_BYTES: u64 = 4_096;

pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let proxies = Proxies::new(&config.http.trusted_proxies, config.http.proxy_protocol);
    let none = Proxies::default();
    let (http, metrics) = tokio::join!(
        check_port("http.listen", config.http.listen, &proxies),
        check_port("metrics.listen", config.metrics.listen, &none),
    );
    [http, metrics, check_access(config)]
        .into_iter()
        .chain(check_headers(config))
        .chain(check_tracing(config))
        .chain([check_files(config)])
        .collect()
}

/// Checks access control of the HTTP interface.
fn check_access(config: &Config) -> Finding {
    let check = "auth";
    if let Err(error) = Access::open(config) {
        let why = "`fairlane serve` does not start with it";
        return Finding::fail(check, error.to_string(), why, "correct that setting");
    }
    let tokens = config.auth.tokens.len() as u64;
    if tokens > 0 {
        return Finding::ok(check, format!("{} can be read", count(tokens, "token")));
    }
    let listen = config.http.listen;
    if listen.ip().is_loopback() {
        return Finding::ok(check, "no tokens: open to every program of this machine");
    }
    Finding::warn(
        check,
        format!("no tokens, and http.listen is {listen}"),
        "every client that can connect may publish, read and change data",
        "add auth.tokens, or put an authenticating proxy in front of it",
    )
}

/// The header sets that notifications may name. `None` if there are none.
fn check_headers(config: &Config) -> Option<Finding> {
    let (check, sets) = ("callbacks.headers", &config.callbacks.headers);
    if let Err(error) = HeaderSets::open(sets) {
        let why = "`fairlane serve` does not start with it";
        return Some(Finding::fail(check, error.to_string(), why, "correct that setting"));
    }
    let many = sets.len() as u64;
    (many > 0).then(|| Finding::ok(check, format!("{} can be read", count(many, "set"))))
}

/// The headers for the collector of spans. `None` if no file has them.
fn check_tracing(config: &Config) -> Option<Finding> {
    let check = "tracing.headers_file";
    config.tracing.headers_file.as_ref()?;
    Some(match export::headers(&config.tracing) {
        Ok(headers) => {
            Finding::ok(check, format!("{} can be read", count(headers.len() as u64, "header")))
        }
        Err(error) => {
            let why = "`fairlane serve` does not start with it";
            Finding::fail(check, error.to_string(), why, "correct that file or setting")
        }
    })
}

async fn check_port(key: &str, address: SocketAddr, proxies: &Proxies) -> Finding {
    let error = match TcpListener::bind(address).await {
        Ok(_) if address.port() == 0 => {
            return Finding::ok(key, format!("{address}: any free port"));
        }
        Ok(_) => return Finding::ok(key, format!("{address} is free")),
        Err(error) => error,
    };
    if error.kind() == io::ErrorKind::AddrInUse && is_fairlane(address, proxies).await {
        let found = format!(
            "{address}: Fairlane is running there; another one on this machine needs another {key}"
        );
        return Finding::ok(key, found);
    }
    let remedy = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("set {key} to a free port, or stop the program that uses this one")
        }
        io::ErrorKind::PermissionDenied => format!("set {key} to a port from 1024 on"),
        _ => format!("set {key} to an address of this machine"),
    };
    let why = "`fairlane serve` cannot listen there, and does not start";
    Finding::fail(key, format!("{address}: {error}"), why, remedy)
}

/// Whether the program on this port answers like Fairlane.
async fn is_fairlane(address: SocketAddr, proxies: &Proxies) -> bool {
    let reachable = match address {
        SocketAddr::V4(at) if at.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, at.port()).into(),
        SocketAddr::V6(at) if at.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, at.port()).into(),
        address => address,
    };
    let asking = async {
        let mut stream = TcpStream::connect(reachable).await?;
        let request = "GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        let greeting = proxies.greeting(stream.local_addr()?.ip());
        stream.write_all(&[greeting, request.as_bytes()].concat()).await?;
        let mut answer = Vec::new();
        stream.take(WHO_BYTES).read_to_end(&mut answer).await?;
        io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(WHO_TIMEOUT, asking).await;
    let answer = answer.ok().and_then(Result::ok).unwrap_or_default();
    let text = String::from_utf8_lossy(&answer);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let known = |status| body.contains(&format!("\"status\":\"{status}\""));
    body.contains("\"redis\":")
        && ["ready", "degraded", "starting", "stopping", "unavailable"].into_iter().any(known)
}

fn check_files(config: &Config) -> Finding {
    judge_files(files::allowed(), files::needed(config, Roles::ALL))
}

/// Compares with the hard limit, because the start raises the soft limit up to it.
fn judge_files(limit: Option<u64>, needed: u64) -> Finding {
    let check = "open files";
    let Some(limit) = limit else {
        return Finding::ok(check, "no limit");
    };
    let found = format!("at most {}; {} may be needed", number(limit), number(needed));
    if limit >= needed {
        return Finding::ok(check, found);
    }
    Finding::fail(
        check,
        found,
        "it would not start: under load, connections to Redis, targets and clients would fail",
        "raise it: LimitNOFILE= of the service, `ulimit -Hn`; or lower http.max_connections",
    )
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn with_too_few_files_it_would_not_start() {
        assert_eq!(judge_files(None, 64).state, State::Ok);
        assert_eq!(judge_files(Some(64), 64).state, State::Ok);
        assert_eq!(judge_files(Some(63), 64).state, State::Fail);
    }

    async fn check_http(address: SocketAddr) -> Finding {
        check_port("http.listen", address, &Proxies::default()).await
    }

    #[tokio::test]
    async fn fairlane_on_its_own_port_is_recognised_in_every_state() {
        let ours = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = ours.local_addr().unwrap();
        for status in ["ready", "degraded", "starting", "stopping", "unavailable"] {
            let body = format!("{{\"status\":\"{status}\",\"redis\":\"up\"}}");
            let (finding, ()) = tokio::join!(check_http(address), async {
                let (mut stream, _) = ours.accept().await.unwrap();
                let mut asked = Vec::new();
                while !asked.ends_with(b"\r\n\r\n") {
                    stream.read_buf(&mut asked).await.unwrap();
                }
                let answer = format!("HTTP/1.1 200 OK\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            });
            assert_eq!(finding.state, State::Ok, "{status}: {finding:?}");
        }
    }

    #[tokio::test]
    async fn a_port_that_another_program_holds_is_found_out() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = other.local_addr().unwrap();
        let (finding, _) = tokio::join!(check_http(address), async {
            let (mut stream, _) = other.accept().await.unwrap();
            stream.write_all(b"HTTP/1.1 404 Not Found\r\n\r\n{\"status\":\"ready\"}").await
        });
        assert_eq!(finding.state, State::Fail, "{finding:?}");
        assert!(finding.remedy.unwrap().contains("http.listen"));
        drop(other);
        // Other tests take ports too, so one that was just given up may be taken again.
        let mut free = check_http(address).await;
        for _ in 0..20 {
            if free.state == State::Ok {
                break;
            }
            let given_up = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let address = given_up.local_addr().unwrap();
            drop(given_up);
            free = check_http(address).await;
        }
        assert_eq!(free.state, State::Ok, "{free:?}");
        let any = check_http((Ipv4Addr::LOCALHOST, 0).into()).await;
        assert_eq!(any.found, "127.0.0.1:0: any free port");
        let foreign = check_http(([192, 0, 2, 1], 1).into()).await;
        assert_eq!(foreign.state, State::Fail, "{foreign:?}");
    }
}
