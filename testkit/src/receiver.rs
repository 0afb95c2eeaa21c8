//! An HTTP server that records its requests and gives the answers of the test.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// One request.
#[derive(Debug, Clone)]
pub struct Call {
    /// The number of earlier requests.
    pub number: usize,
    pub line: String,
    /// By lower-case name.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
    /// The time since 1970.
    pub at: Duration,
}

impl Call {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// How long after another request this one came.
    pub fn after(&self, other: &Self) -> Duration {
        self.at.saturating_sub(other.at)
    }

    pub fn text(&self, field: &str) -> String {
        self.json()[field].as_str().unwrap().to_owned()
    }

    /// The ids of its events.
    pub fn ids(&self) -> Vec<String> {
        let body = self.json();
        let events = body["events"].as_array().unwrap();
        events.iter().map(|event| event["id"].as_str().unwrap().to_owned()).collect()
    }
}

/// The answer to a request.
#[derive(Debug, Clone)]
pub enum Reply {
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
        body: Vec<u8>,
    },
    /// The connection is closed without an answer.
    Nothing,
    /// The first bytes, and then the second ones every few milliseconds, forever.
    Drip(Vec<u8>, Vec<u8>),
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self::Answer { status, headers: Vec::new(), body: body.into() }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        if let Self::Answer { headers, .. } = &mut self {
            headers.push((name.to_owned(), value.to_owned()));
        }
        self
    }
}

#[derive(Debug, Default)]
struct ReceiverState {
    calls: Mutex<Vec<Call>>,
    connections: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
}

/// Runs until it is dropped.
#[derive(Debug)]
pub struct Receiver {
    pub address: SocketAddr,
    state: Arc<ReceiverState>,
    _running: JoinSet<()>,
}

impl Receiver {
    pub async fn start<F, R>(answer: F) -> Self
    where
        F: Fn(Call) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send,
    {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), answer).await
    }

    /// Starts at an address that the test chooses.
    pub async fn start_at<F, R>(address: SocketAddr, answer: F) -> Self
    where
        F: Fn(Call) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(ReceiverState::default());
        let (shared, answer) = (Arc::clone(&state), Arc::new(answer));
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                shared.connections.fetch_add(1, Ordering::SeqCst);
                let (shared, answer) = (Arc::clone(&shared), Arc::clone(&answer));
                open.spawn(async move {
                    // The client may disconnect at any time.
                    let _ = serve(stream, &shared, &*answer).await;
                });
                while open.try_join_next().is_some() {}
            }
        });
        Self { address, state, _running: running }
    }

    /// Answers every request with 200 and an empty body.
    pub async fn content() -> Self {
        Self::start(|_| async { Reply::new(200, "") }).await
    }

    pub fn url(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    pub fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().unwrap().clone()
    }

    /// The number of calls so far.
    pub fn called(&self) -> usize {
        self.state.calls.lock().unwrap().len()
    }

    /// The number of connections so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// The maximum number of calls that were answered concurrently.
    pub fn max_concurrent(&self) -> usize {
        self.state.most.load(Ordering::SeqCst)
    }

    /// The number of calls that are being answered.
    pub fn now(&self) -> usize {
        self.state.now.load(Ordering::SeqCst)
    }
}

/// Serves one connection.
async fn serve<F, R>(stream: TcpStream, state: &ReceiverState, answer: &F) -> std::io::Result<()>
where
    F: Fn(Call) -> R,
    R: Future<Output = Reply>,
{
    let mut stream = BufReader::new(stream);
    while let Some((line, headers, body)) = read(&mut stream).await? {
        let call = {
            let mut calls = state.calls.lock().unwrap();
            let call = Call { number: calls.len(), line, headers, body, at: since_1970() };
            calls.push(call.clone());
            call
        };
        let answering = Answering::begin(state);
        let reply = answer(call).await;
        drop(answering);
        match reply {
            Reply::Nothing => return Ok(()),
            Reply::Answer { status, headers, body } => {
                let mut head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n", body.len());
                for (name, value) in headers {
                    head.extend([&name, ": ", &value, "\r\n"]);
                }
                head.push_str("\r\n");
                stream.write_all(&[head.as_bytes(), &body].concat()).await?;
            }
            Reply::Drip(first, more) => {
                stream.write_all(&first).await?;
                loop {
                    // The sleep is the purpose: it makes the answer slow.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    stream.write_all(&more).await?;
                }
            }
        }
    }
    Ok(())
}

fn since_1970() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

struct Answering<'a>(&'a ReceiverState);

impl<'a> Answering<'a> {
    fn begin(state: &'a ReceiverState) -> Self {
        let now = state.now.fetch_add(1, Ordering::SeqCst) + 1;
        state.most.fetch_max(now, Ordering::SeqCst);
        Self(state)
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

type Parts = (String, BTreeMap<String, String>, Vec<u8>);

async fn read(stream: &mut BufReader<TcpStream>) -> std::io::Result<Option<Parts>> {
    let mut first = String::new();
    if stream.read_line(&mut first).await? == 0 {
        return Ok(None);
    }
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(Some((first.trim_end().to_owned(), headers, body)))
}
