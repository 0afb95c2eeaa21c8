//! Calls to servers of others: the addresses that they must never reach, and the bounds of a call.
//! The log of a listener shows that no connection was made. A call that reaches the listener shows
//! that the listener works.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::id::BotId;
use fairlane::outbound::{
    Addrs, Answer, CheckedUrl, Cut, HeaderMap, Method, Name, Outbound, OutboundError, Policy,
    Request, Resolve, Resolving, Settings, UrlError,
};
use tokio::time::Instant;

use crate::support::process::WorkerProcess;
use crate::support::receiver::{Receiver, Reply};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

/// Answers the lookup of every name with the given answers, one after the other, and repeats the
/// last one.
#[derive(Debug, Default)]
struct Names {
    answers: Vec<Vec<IpAddr>>,
    asked: AtomicUsize,
    heard: Mutex<Vec<String>>,
}

impl Names {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let parse = |addresses: &&[&str]| addresses.iter().map(|a| a.parse().unwrap()).collect();
        Arc::new(Self { answers: answers.iter().map(parse).collect(), ..Self::default() })
    }
}

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        self.heard.lock().unwrap().push(name.as_str().to_owned());
        let asked = self.asked.fetch_add(1, Ordering::SeqCst).min(self.answers.len() - 1);
        let addresses: Vec<SocketAddr> =
            self.answers[asked].iter().map(|address| (*address, 0).into()).collect();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

fn settings(nets: &[&str]) -> Settings {
    let allow_nets = nets.iter().map(|net| net.parse().unwrap()).collect();
    Settings { allow_nets, ..Settings::default() }
}

fn outbound(nets: &[&str]) -> Outbound {
    Outbound::new(&settings(nets)).unwrap()
}

async fn get(outbound: &Outbound, url: &CheckedUrl) -> Result<Answer, OutboundError> {
    within(outbound, url, LONG).await
}

async fn within(
    outbound: &Outbound,
    url: &CheckedUrl,
    timeout: Duration,
) -> Result<Answer, OutboundError> {
    let deadline = Instant::now() + timeout;
    let (method, headers) = (Method::POST, HeaderMap::new());
    let body = b"hello".to_vec();
    outbound
        .call(Request {
            bot: &BotId::parse("bot").unwrap(),
            method,
            url,
            headers,
            body,
            deadline,
            place_by: deadline,
            keep_connection: true,
            tell_deadline: false,
        })
        .await
}

fn tenants(outbound: &Outbound, url: &str) -> Result<CheckedUrl, UrlError> {
    CheckedUrl::parse(url, outbound.tenants())
}

fn operators(url: &str) -> CheckedUrl {
    CheckedUrl::parse(url, &Policy::Operator).unwrap()
}

#[tokio::test]
async fn no_spelling_of_an_internal_address_is_connected_to() {
    let receiver = Receiver::content().await;
    let port = receiver.address.port();
    let closed = outbound(&[]);
    // The URL was accepted under another policy, as if the setting had changed since then.
    let open: Policy = Policy::Tenant(Arc::new(["0.0.0.0/0".parse().unwrap()]));
    let open_v6 = Policy::Tenant(Arc::new(["::/0".parse().unwrap()]));
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "0.0.0.0",
        "127.0.0.1.",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::1]",
        "[::]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
    ] {
        let url = format!("http://{host}:{port}/");
        assert!(matches!(tenants(&closed, &url), Err(UrlError::Address(_))), "{url}");
        let accepted = [&open, &open_v6].iter().find_map(|p| CheckedUrl::parse(&url, p).ok());
        let refused = get(&closed, &accepted.unwrap()).await.unwrap_err();
        assert!(matches!(refused, OutboundError::Refused(_)), "{url}: {refused}");
        assert!(!refused.is_unreached());
    }
    assert_eq!(receiver.connections(), 0);

    // A control: the same address is reached where its network is allowed.
    let allowing = outbound(&["127.0.0.0/8"]);
    for host in ["127.0.0.1", "0x7f.1", "[::ffff:127.0.0.1]"] {
        let url = tenants(&allowing, &format!("http://{host}:{port}/")).unwrap();
        assert_eq!(get(&allowing, &url).await.unwrap().status, 200, "{host}");
    }
    assert_eq!(receiver.called(), 3);
    assert!(receiver.connections() > 0);
}

#[tokio::test]
async fn a_name_with_any_internal_address_is_not_connected_to() {
    let receiver = Receiver::content().await;
    for addresses in [
        &["127.0.0.1"][..],
        &["::ffff:127.0.0.1"],
        &["::1"],
        &["93.184.216.34", "127.0.0.1"],
        &["127.0.0.1", "93.184.216.34"],
        &["2606:4700::1111", "fd00::1"],
    ] {
        let names = Names::new(&[addresses]);
        let names: Arc<dyn Resolve> = names;
        let outbound = Outbound::with_resolver(&settings(&[]), &names).unwrap();
        let url = format!("http://hook.example:{}/", receiver.address.port());
        let refused = get(&outbound, &tenants(&outbound, &url).unwrap()).await.unwrap_err();
        assert!(matches!(refused, OutboundError::Refused(_)), "{addresses:?}: {refused}");
    }
    // The name of this machine is refused immediately.
    let outbound = outbound(&[]);
    let url = format!("http://localhost:{}/", receiver.address.port());
    let refused = tenants(&outbound, &url).unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("localhost has an address that is not public"), "{said}");
    assert!(
        !said.contains("127.0.0.1") && !said.contains("::1"),
        "names tell tenants no address: {said}"
    );
    assert_eq!(receiver.connections(), 0);
    // A control: the operator's own URL reaches the listener by that name.
    assert_eq!(get(&outbound, &operators(&url)).await.unwrap().status, 200);
    assert_eq!(receiver.connections(), 1);
}

/// The name is public when the URL is accepted and first called, and internal at the next call.
#[tokio::test]
async fn a_name_that_is_rebound_to_an_internal_address_is_not_connected_to() {
    let receiver = Receiver::content().await;
    // 127.0.0.2 plays the public address, because it is the allowed one.
    let names = Names::new(&[&["127.0.0.2"], &["127.0.0.1"]]);
    let resolver = Arc::clone(&names) as Arc<dyn Resolve>;
    let outbound = Outbound::with_resolver(&settings(&["127.0.0.2/32"]), &resolver).unwrap();
    let url = format!("http://hook.example:{}/", receiver.address.port());
    let url = tenants(&outbound, &url).unwrap();
    let first = get(&outbound, &url).await.unwrap_err();
    assert!(first.is_unreached(), "nobody listens there: {first}");
    let second = get(&outbound, &url).await.unwrap_err();
    assert!(matches!(second, OutboundError::Refused(_)), "{second}");
    assert_eq!(names.asked.load(Ordering::SeqCst), 2, "each connection asks once, and uses that");
    assert_eq!(*names.heard.lock().unwrap(), ["hook.example", "hook.example"]);
    assert_eq!(receiver.connections(), 0);
}

#[tokio::test]
async fn redirects_are_answers_and_are_not_followed() {
    let secret = Receiver::content().await;
    let target = secret.url();
    let receiver = Receiver::start(move |call| {
        let status = [301, 302, 303, 307, 308][call.number];
        let reply = Reply::new(status, "elsewhere").with("location", &target);
        async move { reply }
    })
    .await;
    let outbound = outbound(&[]);
    for status in [301, 302, 303, 307, 308] {
        let answer = get(&outbound, &operators(&receiver.url())).await.unwrap();
        assert_eq!((answer.status.as_u16(), &*answer.body), (status, &b"elsewhere"[..]));
    }
    assert_eq!((secret.connections(), receiver.called()), (0, 5));
    assert!(receiver.calls().iter().all(|call| !call.headers.contains_key("referer")));
}

/// Tenants' calls never reuse a connection that a call to the operator's URL opened.
#[tokio::test]
async fn a_tenant_gets_no_connection_of_the_operators() {
    let receiver = Receiver::content().await;
    let names = Names::new(&[&["127.0.0.1"]]);
    let names: Arc<dyn Resolve> = names;
    let outbound = Outbound::with_resolver(&settings(&[]), &names).unwrap();
    let url = format!("http://hook.example:{}/", receiver.address.port());
    assert_eq!(get(&outbound, &operators(&url)).await.unwrap().status, 200);
    let tenant = tenants(&outbound, &url).unwrap();
    assert!(matches!(get(&outbound, &tenant).await, Err(OutboundError::Refused(_))));
    assert_eq!((receiver.connections(), receiver.called()), (1, 1));
}

/// A process reads the variables once, so this test needs a separate process.
#[tokio::test]
async fn proxies_of_the_environment_are_ignored() {
    let (proxy, receiver) = (Receiver::content().await, Receiver::content().await);
    let through = format!("http://{}", proxy.address);
    let mut env = vec![("FAIRLANE_TEST_URL", receiver.url())];
    for name in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]
    {
        env.push((name, through.clone()));
    }
    let caller = WorkerProcess::spawn("caller", &env);
    eventually(LONG, "the call is answered", async || {
        caller.lines().iter().any(|line| line == "answered 200")
    })
    .await;
    assert_eq!((receiver.called(), proxy.connections()), (1, 0));
}

#[tokio::test]
async fn connections_are_kept_and_used_again() {
    let receiver = Receiver::content().await;
    let outbound = outbound(&[]);
    let url = operators(&receiver.url());
    for _ in 0..20 {
        assert_eq!(get(&outbound, &url).await.unwrap().status, 200);
    }
    assert_eq!((receiver.called(), receiver.connections()), (20, 1));
    let call = &receiver.calls()[7];
    assert_eq!(call.line, "POST /hook HTTP/1.1");
    assert_eq!(call.headers["user-agent"], concat!("fairlane/", env!("CARGO_PKG_VERSION")));
    assert_eq!(call.body, b"hello");
}

#[tokio::test]
async fn an_oversized_answer_is_cut_and_its_connection_closed() {
    let receiver = Receiver::start(|call| async move {
        match call.number {
            0 => Reply::new(500, vec![b'x'; 64 * 1024]),
            1 => Reply::new(500, vec![b'x'; 4 << 20]),
            // A chunked body without an end.
            _ => Reply::Drip(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
                [&b"4000\r\n"[..], &[b'y'; 0x4000], b"\r\n"].concat(),
            ),
        }
    })
    .await;
    let outbound = outbound(&[]);
    let url = operators(&receiver.url());
    let whole = get(&outbound, &url).await.unwrap();
    assert_eq!(whole.whole().map(<[u8]>::len), Ok(64 * 1024));
    for _ in 0..2 {
        let cut = get(&outbound, &url).await.unwrap();
        assert_eq!((cut.whole(), cut.body.len()), (Err(&Cut::TooBig), 64 * 1024));
    }
    assert_eq!(receiver.connections(), 2, "the first is used twice, the second was cut");
}

#[tokio::test]
async fn a_deadline_ends_silence_and_dripping_alike() {
    let receiver = Receiver::start(|call| async move {
        match call.number {
            0 => std::future::pending().await,
            _ => Reply::Drip(b"HTTP/1.1 200 OK\r\n".to_vec(), b"x-more: x\r\n".to_vec()),
        }
    })
    .await;
    let outbound = outbound(&[]);
    for _ in 0..2 {
        let started = Instant::now();
        let late = within(&outbound, &operators(&receiver.url()), Duration::from_millis(200)).await;
        let late = late.unwrap_err();
        assert!(matches!(late, OutboundError::TimedOut) && !late.is_unreached(), "{late}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
    assert_eq!(receiver.called(), 2);
}

#[tokio::test]
async fn an_answer_whose_body_drips_or_breaks_has_its_status() {
    let receiver = Receiver::start(|call| async move {
        let head = b"HTTP/1.1 202 OK\r\ncontent-length: 60000\r\n\r\nx".to_vec();
        match call.number {
            0 => Reply::Drip(head, b"x".to_vec()),
            // The chunk has no length.
            _ => Reply::Drip(
                b"HTTP/1.1 202 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
                b"?".to_vec(),
            ),
        }
    })
    .await;
    let outbound = outbound(&[]);
    let url = operators(&receiver.url());
    let late = within(&outbound, &url, Duration::from_millis(300)).await.unwrap();
    assert_eq!((late.status.as_u16(), late.whole()), (202, Err(&Cut::TimedOut)));
    let broken = get(&outbound, &url).await.unwrap();
    assert_eq!(broken.status, 202);
    assert!(matches!(broken.whole(), Err(Cut::Broken(_))), "{broken:?}");
}

#[tokio::test]
async fn an_unsent_request_is_told_from_one_that_broke() {
    let receiver = Receiver::start(|call| async move {
        match call.number {
            0 => Reply::Nothing,
            1 => Reply::Drip(b"HTTP/9.9 what\r\n\r\n".to_vec(), b"x".to_vec()),
            _ => Reply::new(200, ""),
        }
    })
    .await;
    let outbound = Outbound::new(&Settings {
        connect_timeout: Duration::from_millis(300),
        ..Settings::default()
    })
    .unwrap();
    for _ in 0..2 {
        let broken = get(&outbound, &operators(&receiver.url())).await.unwrap_err();
        assert!(matches!(broken, OutboundError::Broken(_)), "{broken}");
    }
    let port = receiver.address.port();
    // A name that does not exist, a port without a listener, and TLS against a server without TLS.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for url in [
        "http://nobody.invalid/x?token=secret".to_owned(),
        format!("http://{free}/x?token=secret"),
        format!("https://127.0.0.1:{port}/x?token=secret"),
    ] {
        let error = get(&outbound, &operators(&url)).await.unwrap_err();
        assert!(error.is_unreached(), "{url}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    }
    assert_eq!(receiver.called(), 2);
}

/// The server accepts connections and never answers the TLS handshake.
#[tokio::test]
async fn a_connection_that_is_not_made_in_time_was_not_reached() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let outbound = Outbound::new(&Settings {
        connect_timeout: Duration::from_millis(100),
        ..Settings::default()
    })
    .unwrap();
    let error = get(&outbound, &operators(&format!("https://{address}/"))).await.unwrap_err();
    assert!(error.is_unreached(), "{error:?}");
}

#[tokio::test]
async fn each_host_has_its_own_limit_of_concurrent_requests() {
    let receiver = Receiver::start(|_| std::future::pending()).await;
    let other = Receiver::content().await;
    let outbound = Outbound::new(&Settings { max_per_host: 3, ..Settings::default() }).unwrap();
    let url = operators(&receiver.url());
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (outbound, url) = (outbound.clone(), url.clone());
        calls.spawn(async move { get(&outbound, &url).await.map(|answer| answer.status) });
    }
    eventually(LONG, "three are under way", async || receiver.now() == 3).await;
    let busy = within(&outbound, &url, Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(busy, OutboundError::Busy { max: 3, .. }) && busy.is_unreached(), "{busy}");
    assert_eq!(get(&outbound, &operators(&other.url())).await.unwrap().status, 200);
    assert_eq!((receiver.called(), receiver.max_concurrent()), (3, 3));
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    // The places of the aborted calls are free again.
    let late = within(&outbound, &url, Duration::from_millis(200)).await.unwrap_err();
    assert!(matches!(late, OutboundError::TimedOut), "{late}");
    assert_eq!(receiver.called(), 4);
}

/// A process that was suspended gets its place after the deadline.
#[tokio::test]
async fn a_request_whose_deadline_has_passed_is_not_sent() {
    let receiver = Receiver::content().await;
    let outbound = outbound(&[]);
    let url = operators(&receiver.url());
    let late = within(&outbound, &url, Duration::ZERO).await.unwrap_err();
    assert!(matches!(late, OutboundError::TimedOut), "{late}");
    // A connection of the late request would be older than that of this one.
    assert_eq!(get(&outbound, &url).await.unwrap().status, 200);
    assert_eq!((receiver.connections(), receiver.called()), (1, 1));
}
