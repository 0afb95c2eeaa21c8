//! The live pages of a process: how many there are, and whose.
//!
//! One token has at most a quarter of them. When all are in use and another token asks for one, the
//! token with the most gives one up: no token, and no number of its pages, keeps others out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Maximum number of live pages per process.
pub(super) const ALL: usize = 64;
/// Maximum number of one token that is not for all bots.
pub(super) const OF_ONE: usize = ALL / 4;

/// The open live pages, oldest first.
#[derive(Debug, Default, Clone)]
pub(super) struct Streams(Arc<Mutex<Vec<Open>>>);

#[derive(Debug)]
struct Open {
    token: Box<str>,
    number: u64,
    given_up: CancellationToken,
}

impl Streams {
    /// Opens one of a token; `max`: how many it may have. `None`: it has as many as that, or as its
    /// share of all.
    pub(super) fn open(&self, token: &str, max: usize) -> Option<Stream> {
        let mut open = self.list();
        let count =
            |open: &[Open], name: &str| open.iter().filter(|one| *one.token == *name).count();
        let own = count(&open, token);
        if own >= max {
            return None;
        }
        if open.len() >= ALL {
            let largest = open.iter().max_by_key(|one| count(&open, &one.token))?.token.clone();
            // Otherwise two tokens would take one from each other for ever.
            if count(&open, &largest) <= own + 1 {
                return None;
            }
            let oldest = open.iter().position(|one| one.token == largest)?;
            open.remove(oldest).given_up.cancel();
        }
        let number = open.last().map_or(0, |last| last.number + 1);
        let given_up = CancellationToken::new();
        open.push(Open { token: token.into(), number, given_up: given_up.clone() });
        drop(open);
        Some(Stream { streams: self.clone(), number, given_up })
    }

    fn list(&self) -> MutexGuard<'_, Vec<Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open live page, until it is dropped.
#[derive(Debug)]
pub(super) struct Stream {
    streams: Streams,
    number: u64,
    /// Cancelled: another token needs the place.
    pub(super) given_up: CancellationToken,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.given_up.is_cancelled() {
            self.streams.list().retain(|one| one.number != self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_a_quarter_and_four_of_them_keep_no_other_out() {
        let streams = Streams::default();
        let many =
            |token: &str, max| std::iter::from_fn(|| streams.open(token, max)).collect::<Vec<_>>();
        let greedy: Vec<_> = ["a", "b", "c", "d"].map(|token| many(token, OF_ONE)).into();
        assert!(greedy.iter().all(|open| open.len() == OF_ONE));
        let quiet = many("quiet", OF_ONE);
        assert!(quiet.len() >= ALL / 5, "{}", quiet.len());
        let given_up = greedy.iter().flatten().filter(|open| open.given_up.is_cancelled());
        assert_eq!(given_up.count(), quiet.len());
        assert!(streams.open("a", OF_ONE).is_none(), "none takes one back from its equals");
        drop((greedy, quiet));
        assert!(streams.list().is_empty());
    }

    #[test]
    fn an_operator_may_have_all_until_another_asks() {
        let streams = Streams::default();
        let all: Vec<_> = std::iter::from_fn(|| streams.open("root", ALL)).collect();
        assert_eq!(all.len(), ALL);
        let _tenant = streams.open("tenant", OF_ONE).expect("it takes one over");
        assert!(all[0].given_up.is_cancelled(), "the oldest");
        assert_eq!(streams.list().len(), ALL);
    }
}
