//! A DNS server on the loopback that records what it is asked.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::task::JoinSet;

/// How it answers by the last label of a name.
///
/// | name | answer |
/// |---|---|
/// | `….quick` | 127.0.0.1 |
/// | `….many` | 127.0.0.1 16 times, and then 10.0.0.1 eight times |
/// | `….slow` | there is no such name, after a second |
/// | `….gone` | there is no such name |
/// | any other | none |
#[derive(Debug)]
pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    _running: JoinSet<()>,
}

const HEADER: usize = 12;
/// A pointer to the name in the question.
const SAME_NAME: [u8; 2] = [0xc0, 0x0c];
const TYPE_A: [u8; 2] = [0, 1];

impl NameServer {
    pub(crate) async fn start() -> Self {
        let socket = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        let address = socket.local_addr().unwrap();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let mut running = JoinSet::new();
        let heard = Arc::clone(&asked);
        running.spawn(async move {
            let (mut answers, mut buffer) = (JoinSet::new(), [0; 512]);
            loop {
                // An error is that of an answer to a client that is gone.
                let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
                let query = buffer[..length].to_vec();
                let name = name(&query);
                heard.lock().unwrap().push(name.clone());
                let this = Ipv4Addr::LOCALHOST;
                let (addresses, pause) = match name.rsplit('.').next() {
                    Some("quick") => (vec![this], Duration::ZERO),
                    Some("many") => {
                        let others = [Ipv4Addr::new(10, 0, 0, 1); 8];
                        ([&[this; 16][..], &others].concat(), Duration::ZERO)
                    }
                    Some("gone") => (Vec::new(), Duration::ZERO),
                    Some("slow") => (Vec::new(), Duration::from_secs(1)),
                    _ => continue,
                };
                let socket = Arc::clone(&socket);
                answers.spawn(async move {
                    // Slowness is what this shows.
                    tokio::time::sleep(pause).await;
                    let _ = socket.send_to(&answer(&query, &addresses), client).await;
                });
                while answers.try_join_next().is_some() {}
            }
        });
        Self { address, asked, _running: running }
    }

    /// The setting that makes processes ask it.
    pub(crate) fn setting(&self) -> String {
        format!("[\"{}\"]", self.address)
    }

    /// The names that it was asked for, each as often as it was.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn name(query: &[u8]) -> String {
    let mut labels = Vec::new();
    let mut rest = &query[HEADER..];
    while let Some((&length, after)) = rest.split_first()
        && length > 0
    {
        let (label, after) = after.split_at(usize::from(length));
        labels.push(String::from_utf8_lossy(label).to_lowercase());
        rest = after;
    }
    labels.join(".")
}

/// With the question of `query`: the addresses, or none if another type is asked for. Without addresses, there
/// is no such name.
fn answer(query: &[u8], addresses: &[Ipv4Addr]) -> Vec<u8> {
    let question = HEADER + query[HEADER..].iter().position(|&byte| byte == 0).unwrap() + 1;
    let told = if query[question..question + 2] == TYPE_A { addresses } else { &[] };
    let mut answer = query[..question + 4].to_vec();
    // A response with recursion; NXDOMAIN or none.
    answer[2..4].copy_from_slice(&[0x81, if addresses.is_empty() { 0x83 } else { 0x80 }]);
    // One question, no additional records.
    let number = u8::try_from(told.len()).unwrap();
    answer[4..HEADER].copy_from_slice(&[0, 1, 0, number, 0, 0, 0, 0]);
    for address in told {
        answer.extend(SAME_NAME);
        // Type A, class IN, a minute, four bytes.
        answer.extend([0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(address.octets());
    }
    answer
}
