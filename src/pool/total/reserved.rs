//! What claims reserve of the limits over all processes, until their slices used it.

use std::sync::Arc;

use super::super::Shared;
use super::super::board::Ask;
use super::{Asked, Total};

/// What a claim reserved, until its answer. Without limits: nothing.
#[derive(Debug)]
pub(in super::super) struct Reserved(Option<(Arc<Total>, Asked)>);

impl Reserved {
    /// Gives back what these claims do not ask for. Call [`Self::of`] once for each of them.
    pub(in super::super) fn split(shared: &Shared, asked: Option<Asked>, asks: &[Ask]) -> Self {
        let total = shared.total.as_ref();
        let Some((total, asked)) = total.zip(asked) else { return Self(None) };
        let needed = leases_of(asks).min(asked.leases);
        total.answered(Asked { leases: asked.leases - needed, ..asked }, 0);
        Self(Some((Arc::clone(total), Asked { leases: 0, ..asked })))
    }

    /// The part of these claims.
    pub(in super::super) fn of(&self, asks: &[Ask]) -> Self {
        let part = |(total, asked): &(Arc<Total>, Asked)| {
            (Arc::clone(total), Asked { leases: leases_of(asks), ..*asked })
        };
        Self(self.0.as_ref().map(part))
    }

    /// The claims returned this number of leases. Returns what each of them may have, see [`Total::share`].
    pub(in super::super) fn answered(mut self, leases: usize, usual: usize) -> Share {
        let Some((total, asked)) = self.0.take() else { return Share::unlimited(usual) };
        total.answered(asked, leases);
        total.share(asked, leases, usual)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some((total, asked)) = self.0.take() {
            total.answered(asked, 0);
        }
    }
}

fn leases_of(asks: &[Ask]) -> usize {
    asks.iter().map(|ask| ask.max).sum()
}

/// How many events each slice of a claim may have, and the tokens for them.
#[derive(Debug, Clone)]
pub(in super::super) struct Share {
    /// `None`: nothing limits events.
    pub(super) total: Option<Arc<Total>>,
    /// Maximum number of events of a slice.
    pub(in super::super) events: usize,
    /// The stamps of the grants of the reserved token, and of the others.
    pub(super) reserved: u64,
    pub(super) more: u64,
}

impl Share {
    /// Without limits.
    pub(in super::super) fn unlimited(events: usize) -> Self {
        Self { total: None, events, reserved: 0, more: 0 }
    }

    /// Those of one slice.
    pub(in super::super) fn tokens(&self) -> Tokens {
        Tokens { share: self.clone(), used: 0 }
    }
}

/// The tokens of one slice. Those that it does not use go back, also if its read is cancelled.
#[derive(Debug)]
pub(in super::super) struct Tokens {
    share: Share,
    used: usize,
}

impl Tokens {
    /// The slice has this number of events.
    pub(in super::super) fn used(mut self, events: usize) {
        self.used = events;
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        let Share { total: Some(total), events, reserved, more } = &self.share else { return };
        if self.used == 0 {
            total.put_back(1, *reserved);
        }
        total.put_back(events.saturating_sub(self.used.max(1)), *more);
    }
}
