//! Bounds of the bodies that arrive slowly: their number and their bytes, in all and of each sender.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use hyper::body::Bytes;
use rustc_hash::FxHashMap;
use tokio::time::{Duration, timeout};

use super::super::auth::{Caller, Identity};
use super::super::extract;

/// Maximum of all slow bodies.
const ALL: Held = Held { bodies: 512, bytes: 128 << 20 };
/// Maximum of those from one address, and of those of one token.
pub(super) const OF_ONE: Held = Held { bodies: 64, bytes: 16 << 20 };
/// Maximum number of bytes of a stranger's body that are read and dropped.
const DROPPED_MAX: usize = 16 << 10;
/// Maximum time for that.
const DROPPED_TIME: Duration = Duration::from_millis(50);

/// What slow bodies take.
#[derive(Debug, Default)]
pub(super) struct SlowBodies(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    all: Held,
    /// Only senders with a slow body.
    of: FxHashMap<Sender, Held>,
}

/// A number of bodies, and the bytes they may have.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) bodies: usize,
    pub(super) bytes: usize,
}

/// Who sends a body.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Sender {
    Address(IpAddr),
    Token(Box<str>),
}

impl Held {
    /// With one more body, if that is within `max`.
    fn with(self, bytes: usize, max: Self) -> Option<Self> {
        let more = Self { bodies: self.bodies + 1, bytes: self.bytes.saturating_add(bytes) };
        (more.bodies <= max.bodies && more.bytes <= max.bytes).then_some(more)
    }

    fn without(self, bytes: usize) -> Self {
        Self { bodies: self.bodies - 1, bytes: self.bytes - bytes }
    }
}

/// The senders that a body counts for. The bodies of a token for all bots count for none: only
/// operators have it, and their programs often share one address.
pub(super) fn senders(identity: &Identity, address: Option<IpAddr>) -> Vec<Sender> {
    let caller = identity.caller().filter(|caller| caller.has_token());
    if caller.is_some_and(Caller::covers_all) {
        return Vec::new();
    }
    let token = caller.filter(|caller| !caller.is_public());
    let token = token.map(|caller| Sender::Token(caller.name().into()));
    address.map(Sender::Address).into_iter().chain(token).collect()
}

impl SlowBodies {
    /// Reserves what a body of up to `bytes` takes. `None`: there are too many, or too many of one
    /// of its senders.
    pub(super) fn take(&self, senders: Vec<Sender>, bytes: usize) -> Option<SlowBody<'_>> {
        let mut state = self.state();
        let all = state.all.with(bytes, ALL)?;
        let of =
            |sender: &Sender| state.of.get(sender).copied().unwrap_or_default().with(bytes, OF_ONE);
        let held: Vec<Held> = senders.iter().map(of).collect::<Option<_>>()?;
        state.all = all;
        state.of.extend(senders.iter().cloned().zip(held));
        drop(state);
        Some(SlowBody { bodies: self, senders, bytes })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slow body, until it is dropped.
#[derive(Debug)]
pub(super) struct SlowBody<'a> {
    bodies: &'a SlowBodies,
    senders: Vec<Sender>,
    bytes: usize,
}

impl Drop for SlowBody<'_> {
    fn drop(&mut self) {
        let mut state = self.bodies.state();
        state.all = state.all.without(self.bytes);
        for sender in &self.senders {
            let Some(held) = state.of.get_mut(sender) else { continue };
            *held = held.without(self.bytes);
            if held.bodies == 0 {
                state.of.remove(sender);
            }
        }
    }
}

/// Drops the body of a stranger. A small one is read, because a client that still sends would lose
/// the answer when the connection closes.
pub(super) async fn discard(headers: &HeaderMap, mut body: Body) {
    let announced = extract::announced(headers).unwrap_or_default();
    if headers.contains_key(header::EXPECT) || announced > DROPPED_MAX as u64 {
        return;
    }
    let read = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > DROPPED_MAX {
                return;
            }
        }
    };
    let _ = timeout(DROPPED_TIME, read).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(name: &str) -> Vec<Sender> {
        vec![Sender::Token(name.into())]
    }

    #[test]
    fn one_sender_leaves_room_for_others_by_number_and_by_bytes() {
        let bodies = SlowBodies::default();
        let mut held = Vec::new();
        while let Some(body) = bodies.take(sender("many"), 100) {
            held.push(body);
        }
        assert_eq!(held.len(), OF_ONE.bodies);
        while let Some(body) = bodies.take(sender("large"), 1 << 20) {
            held.push(body);
        }
        assert_eq!(held.len(), OF_ONE.bodies + (OF_ONE.bytes >> 20));
        let both = [sender("quiet"), sender("large")].concat();
        assert!(bodies.take(both, 1 << 20).is_none(), "each of its senders counts");
        assert!(bodies.take(sender("quiet"), 1 << 20).is_some());
        held.clear();
        let state = bodies.state();
        assert!(state.of.is_empty() && state.all == Held::default(), "{state:?}");
    }

    #[test]
    fn all_together_have_a_bound() {
        let bodies = SlowBodies::default();
        let all: Vec<_> = (0..1_000).filter_map(|_| bodies.take(Vec::new(), 1 << 20)).collect();
        assert_eq!(all.len(), ALL.bytes >> 20);
    }
}
