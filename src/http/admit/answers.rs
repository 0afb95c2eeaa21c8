//! Bounds of the answers that are under way: written, and not read by their clients yet. Their
//! bytes are bounded in all and for each reader.
//!
//! A client may read as slowly as it likes, and its answer stays in the memory of the process until
//! the operating system has taken it.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::Method;
use rustc_hash::FxHashMap;

use super::super::auth::Identity;
use crate::admission::Reason;

/// Answers of up to this many bytes are not counted. The operating system takes most of them
/// immediately, and the number of connections bounds the others.
pub(super) const SMALL: usize = 16 << 10;
/// Maximum of all answers under way.
const ALL: usize = 256 << 20;
/// Maximum of those of one reader.
const OF_ONE: usize = 64 << 20;
/// The size of a large answer. A read starts only if there is room for one.
const LARGE: usize = 4 << 20;

/// What the answers under way take.
#[derive(Debug, Default)]
pub(super) struct UnreadAnswers {
    state: Mutex<State>,
    /// [`State::all`], readable without the lock.
    all: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    all: usize,
    /// Only readers with an answer under way.
    of: FxHashMap<Reader, usize>,
}

/// Who reads an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Reader {
    Address(IpAddr),
    Token(Box<str>),
    /// All senders without a valid token together.
    Strangers,
}

/// The readers that an answer counts for. A public token is known to everybody, so its answers also
/// count for the address.
pub(super) fn readers(identity: &Identity, address: Option<IpAddr>) -> Vec<Reader> {
    let Some(caller) = identity.caller() else { return vec![Reader::Strangers] };
    let token = caller.has_token().then(|| Reader::Token(caller.name().into()));
    let address = address.filter(|_| caller.is_public() || !caller.has_token());
    token.into_iter().chain(address.map(Reader::Address)).collect()
}

impl UnreadAnswers {
    /// Why a request must not start: its reader, or all together, have too much under way.
    pub(super) fn refuses(
        &self,
        method: &Method,
        readers: impl FnOnce() -> Vec<Reader>,
    ) -> Option<Reason> {
        if self.all.load(Ordering::Relaxed) < OF_ONE - LARGE {
            return None; // No reader has more than all together.
        }
        let (state, readers) = (self.state(), readers());
        if is_read(method) {
            return state.room(&readers, LARGE).err();
        }
        // Other requests have small answers, and it is important that they get through.
        state.own(&readers).is_some_and(|own| own >= OF_ONE).then_some(Reason::Unread)
    }

    /// Counts an answer until it is read. An error if there is no room for it.
    ///
    /// The answer to a request that changed something is counted, and never refused.
    pub(super) fn take(
        self: &Arc<Self>,
        method: &Method,
        readers: Vec<Reader>,
        bytes: usize,
    ) -> Result<Unread, Reason> {
        let mut state = self.state();
        if is_read(method) {
            state.room(&readers, bytes)?;
        }
        state.all += bytes;
        self.all.store(state.all, Ordering::Relaxed);
        for reader in &readers {
            *state.of.entry(reader.clone()).or_default() += bytes;
        }
        drop(state);
        Ok(Unread { answers: Arc::clone(self), readers, bytes })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

impl State {
    /// Whether so many bytes more may be under way. A reader with some gets more only while it has
    /// less than is free. So a reader without any finds room, however much some others leave unread.
    fn room(&self, readers: &[Reader], bytes: usize) -> Result<(), Reason> {
        let free = ALL.saturating_sub(self.all);
        let own = self.own(readers);
        if own.is_some_and(|own| own.saturating_add(bytes) > OF_ONE || own >= free) {
            return Err(Reason::Unread);
        }
        if bytes > free { Err(Reason::Capacity) } else { Ok(()) }
    }

    /// The most that one of these readers has.
    fn own(&self, readers: &[Reader]) -> Option<usize> {
        readers.iter().filter_map(|reader| self.of.get(reader)).max().copied()
    }
}

/// An answer under way, until it is dropped.
#[derive(Debug)]
pub(in super::super) struct Unread {
    answers: Arc<UnreadAnswers>,
    readers: Vec<Reader>,
    bytes: usize,
}

impl Drop for Unread {
    fn drop(&mut self) {
        let mut state = self.answers.state();
        state.all -= self.bytes;
        self.answers.all.store(state.all, Ordering::Relaxed);
        for reader in &self.readers {
            let Some(held) = state.of.get_mut(reader) else { continue };
            *held -= self.bytes;
            if *held == 0 {
                state.of.remove(reader);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::auth::Caller;
    use super::*;

    const MIB: usize = 1 << 20;

    fn token(name: &str) -> Vec<Reader> {
        vec![Reader::Token(name.into())]
    }

    /// As many answers of 1 MiB as there is room for.
    fn fill(answers: &Arc<UnreadAnswers>, name: &str) -> Vec<Unread> {
        let take = || answers.take(&Method::GET, token(name), MIB).ok();
        std::iter::from_fn(take).collect()
    }

    #[test]
    fn one_reader_has_a_bound_and_what_is_read_makes_room() {
        let answers = Arc::<UnreadAnswers>::default();
        let mut held = fill(&answers, "slow");
        assert_eq!(held.len(), OF_ONE / MIB);
        let refuses = |method: Method, name: &str| answers.refuses(&method, || token(name));
        assert_eq!(refuses(Method::GET, "slow"), Some(Reason::Unread));
        assert_eq!(refuses(Method::POST, "slow"), Some(Reason::Unread));
        assert_eq!(refuses(Method::GET, "quiet"), None);
        held.truncate(held.len() - 3);
        assert_eq!(refuses(Method::GET, "slow"), Some(Reason::Unread), "no large answer fits");
        assert_eq!(refuses(Method::POST, "slow"), None);
        held.pop();
        assert_eq!(refuses(Method::GET, "slow"), None);
        held.clear();
        let state = answers.state();
        assert!(state.all == 0 && state.of.is_empty(), "{state:?}");
    }

    #[test]
    fn few_readers_cannot_take_all_and_all_together_have_a_bound() {
        let answers = Arc::<UnreadAnswers>::default();
        let taken: Vec<_> = (0..6).map(|n| fill(&answers, &n.to_string())).collect();
        let sizes: Vec<usize> = taken.iter().map(Vec::len).collect();
        assert_eq!(sizes, [64, 64, 64, 32, 16, 8]);
        assert_eq!(answers.take(&Method::GET, token("quiet"), 4 * MIB).map(drop), Ok(()));
        let large = answers.take(&Method::GET, token("quiet"), 9 * MIB);
        assert_eq!(large.map(drop), Err(Reason::Capacity));
        // What was done is answered.
        assert!(answers.take(&Method::POST, token("0"), MIB).is_ok());
    }

    #[test]
    fn answers_count_for_the_token_or_the_address_and_those_of_strangers_together() {
        let address: IpAddr = "192.0.2.7".parse().unwrap();
        let of = |identity: &Identity| readers(identity, Some(address));
        let caller = Caller::new("shop", Vec::new(), &[]);
        assert_eq!(of(&Identity::Caller(caller)), token("shop"));
        assert_eq!(of(&Identity::Caller(Caller::anonymous())), [Reader::Address(address)]);
        assert_eq!(of(&Identity::Receiver), [Reader::Strangers]);
    }
}
