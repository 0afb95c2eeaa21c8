//! The ledger of a pipeline. For each account of a bot it holds the amounts of queued events that
//! are not yet in the durable store. With it, Fairlane can return a total before the events are
//! handled. The script that removes an event also removes its amount.
//!
//! The scripts store it (`lua/ledger.lua`), the fan-out adds to it, and a completion removes the
//! amounts of the settled events ([`LedgerEntry`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::event::Event;
use crate::id::Sequence;

/// An account: any text that is meaningful to the pipeline.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Account(Arc<str>);

impl Account {
    /// The account as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Arc<str>> for Account {
    fn from(text: Arc<str>) -> Self {
        Self(text)
    }
}

impl From<&str> for Account {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// An amount that an event adds to the ledger when it is queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Posting {
    /// The account.
    pub account: Account,
    /// The amount.
    pub amount: u64,
}

/// The effect of a queued event on its account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It adds this amount.
    Add(u64),
    /// It replaces the total of the account.
    Replace,
}

/// The ledger entry of a settled event, which leaves the ledger with the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// The index of the event in the slice, from 0.
    pub index: usize,
    /// The account.
    pub account: Account,
    /// The effect of the event.
    pub change: Change,
}

/// How the events of a pipeline use the ledger.
///
/// A call that panics ends only itself, and is logged: all pipelines share the tasks that call. A panic takes
/// far longer than a call: one for each event slows the bus for all pipelines.
pub trait Ledger: fmt::Debug + Send + Sync + 'static {
    /// The event to queue and its ledger entry (`None`: no entry). After a panic, the event is queued as it
    /// is, with the amount that [`Self::entry`] names for it, because this amount leaves the ledger later.
    fn enter(&self, event: &Event) -> (Event, Option<Posting>);

    /// As [`Self::enter`], for a dead letter that is queued again. What an earlier call of
    /// [`Self::enter`] decided for good may be kept: only Fairlane writes dead letters.
    fn enter_again(&self, event: &Event) -> (Event, Option<Posting>) {
        self.enter(event)
    }

    /// The ledger entry of a queued event (`None`: no entry). Called for events that leave the
    /// queue without an entry from the handler. After a panic, nothing is removed from the ledger: the
    /// amount of the event counts until the queue of its bot is empty.
    fn entry(&self, event: &Event) -> Option<(Account, Change)>;

    /// Maximum number of accounts of a bot whose totals one generation caches. After a panic, no further
    /// one is cached.
    fn cached_accounts(&self) -> u64;

    /// Called with the amount that events of the bus added.
    fn posted(&self, amount: u64) {
        let _ = amount;
    }
}

/// The sum of the ledger entries of events that leave their queue together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leaving {
    /// The sequence of the last event.
    pub last: Sequence,
    /// Per account: the amount, and the number of replacements.
    pub accounts: BTreeMap<Account, (u64, u64)>,
}

impl Leaving {
    /// Adds the entry of an event.
    pub fn add(&mut self, sequence: Sequence, account: Account, change: Change) {
        self.last = sequence;
        let (amount, replacements) = self.accounts.entry(account).or_default();
        match change {
            Change::Add(more) => *amount += more,
            Change::Replace => *replacements += 1,
        }
    }
}
