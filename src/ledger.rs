//! A ledger that is kept with the queues of a pipeline: per account of a bot, how much of what its
//! queued events post is not in the durable store yet. With it a total can be told before the events
//! are handled, and the script that removes an event takes back what it posted.
//!
//! The scripts keep it (`lua/ledger.lua`), the fan-out posts to it, and a completion takes from it
//! what leaves the queue ([`LedgerEntry`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::event::Event;
use crate::id::Sequence;

/// What amounts are posted to. Any text; the pipeline gives it a meaning.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Account(Arc<str>);

impl Account {
    /// The text of it.
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

/// An amount that an event posts when it enters its queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Posting {
    /// To which account.
    pub account: Account,
    /// How much.
    pub amount: u64,
}

/// What the ledger has of an event while it is queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It adds so much.
    Add(u64),
    /// It replaces what the account had.
    Replace,
}

/// What a handler says of an event that it settled: taken out of the ledger with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Its place in the slice, from 0.
    pub index: usize,
    /// Which account.
    pub account: Account,
    /// What the event does to it.
    pub change: Change,
}

/// How the events of a pipeline are posted.
pub trait Ledger: fmt::Debug + Send + Sync + 'static {
    /// The event as it is queued, and what it posts; `None`: nothing.
    fn enter(&self, event: &Event) -> (Event, Option<Posting>);

    /// What the ledger has of a queued event; `None`: nothing. Asked for events that leave the queue
    /// without an entry of the handler.
    fn entry(&self, event: &Event) -> Option<(Account, Change)>;

    /// Maximum number of accounts of a bot whose totals one generation caches.
    fn cached_accounts(&self) -> u64;

    /// Called when so much was posted by events of the bus.
    fn posted(&self, amount: u64) {
        let _ = amount;
    }
}

/// What some events take out of the ledger that leave their queue together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leaving {
    /// The sequence of the last of them.
    pub last: Sequence,
    /// Per account: the amount, and how many replacements.
    pub accounts: BTreeMap<Account, (u64, u64)>,
}

impl Leaving {
    /// Adds an event.
    pub fn add(&mut self, sequence: Sequence, account: Account, change: Change) {
        self.last = sequence;
        let (amount, replacements) = self.accounts.entry(account).or_default();
        match change {
            Change::Add(more) => *amount += more,
            Change::Replace => *replacements += 1,
        }
    }
}
