//! A name server that knows one name, `quiet.example.com`, and is silent about all others.

use std::net::SocketAddr;

use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use crate::error::BenchError;

/// The length of the head of a message.
const HEAD: usize = 12;
/// The types of addresses of version 4.
const A: [u8; 2] = [0, 1];

/// Runs until dropped.
pub(super) struct NameServer {
    pub(super) address: SocketAddr,
    _running: JoinSet<()>,
}

impl NameServer {
    pub(super) async fn start() -> Result<Self, BenchError> {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).await?;
        let address = socket.local_addr()?;
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut message = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut message).await {
                if let Some(answer) = answer(&message[..length]) {
                    let _ = socket.send_to(&answer, from).await;
                }
            }
        });
        Ok(Self { address, _running: running })
    }
}

/// The answer to a question for `quiet.example.com`: 127.0.0.1, and no address of version 6.
fn answer(question: &[u8]) -> Option<Vec<u8>> {
    const NAME: &[u8] = b"\x05quiet\x07example\x03com\x00";
    let asked = question.get(HEAD..)?;
    if !asked.get(..NAME.len())?.eq_ignore_ascii_case(NAME) {
        return None;
    }
    let question = &question[..HEAD + NAME.len() + 4];
    let has_address = question[HEAD + NAME.len()..].starts_with(&A);
    let mut answer = question.to_vec();
    // An answer, recursion available, no error; one question, and at most one address.
    (answer[2], answer[3]) = (0x81, 0x80);
    answer[4..HEAD].copy_from_slice(&[0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
    if has_address {
        // The name of the question, class IN, for a second.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(name: &[u8], kind: u8) -> Vec<u8> {
        let head = [0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
        // With an additional record, as resolvers send them.
        [&head[..], name, &[0, kind, 0, 1], &[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]].concat()
    }

    #[test]
    fn one_name_has_an_address_and_no_other_an_answer() {
        let quiet = b"\x05QUIET\x07example\x03com\x00";
        let found = answer(&question(quiet, 1)).expect("an answer");
        assert_eq!((&found[..2], &found[4..8]), (&[0x12, 0x34][..], &[0, 1, 0, 1][..]));
        assert!(found.ends_with(&[0, 4, 127, 0, 0, 1]), "{found:?}");
        let none = answer(&question(quiet, 28)).expect("an answer");
        assert_eq!(none[4..HEAD], [0, 1, 0, 0, 0, 0, 0, 0], "no address of version 6");
        assert_eq!(answer(&question(b"\x06dead-1\x07example\x03com\x00", 1)), None);
        assert_eq!(answer(b"short"), None);
    }
}
