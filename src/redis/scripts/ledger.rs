//! The ledger arguments of `enqueue` and `complete`, and the script `recount`.

use std::fmt::Write as _;

use redis::{Cmd, Value};
use rustc_hash::FxHashMap;

use super::{Call, Index, Limits, evalsha};
use crate::id::{BotId, Offset};
use crate::ledger::{Account, Leaving, Posting};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// `lua/recount.lua`. Returns whether the dead letter existed.
#[derive(Debug)]
pub struct Recount<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// The limits of the queue.
    pub limits: Limits,
    /// Maximum number of accounts of a bot whose totals one generation caches.
    pub cached_accounts: u64,
    /// The dead letter.
    pub id: Offset,
    /// The bot of the dead letter.
    pub bot: &'a BotId,
    /// The ledger entry of its event; `None`: no entry.
    pub posting: Option<&'a Posting>,
    /// Its event, serialised.
    pub event: &'a [u8],
}

impl Call for Recount<'_> {
    type Reply = bool;
    const NAME: &'static str = "recount";

    fn command(&self) -> Cmd {
        let Self { keys, limits, bot, .. } = self;
        let mut cmd = evalsha(Index::recount, 14);
        cmd.arg(&keys.base).arg(keys.queue(bot)).arg(&keys.ledger(bot)).arg(&keys.dlq);
        cmd.arg(self.id.to_string()).arg(self.cached_accounts).arg(limits.slice_us);
        cmd.arg(limits.linger_ms);
        match self.posting {
            Some(Posting { account, amount }) => cmd.arg(account.as_str()).arg(*amount),
            None => cmd.arg("").arg(0),
        };
        cmd.arg(bot.as_str()).arg("").arg(1).arg(self.event);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// The ledger entries of the events in an enqueue.
#[derive(Debug, Default)]
pub struct Postings<'a> {
    /// Maximum number of accounts of a bot whose totals one generation caches.
    pub cached_accounts: u64,
    /// Per bot of the call the entry of each event, in the same order.
    pub bots: Vec<Vec<Option<&'a Posting>>>,
}

impl Postings<'_> {
    /// Adds the number of the arguments and the arguments.
    pub(super) fn add_to(&self, cmd: &mut Cmd) {
        let bots: Vec<(Vec<&Account>, String)> = self.bots.iter().map(|all| of_bot(all)).collect();
        let length = 1 + bots.iter().map(|(accounts, _)| 2 + accounts.len()).sum::<usize>();
        cmd.arg(length).arg(self.cached_accounts);
        for (accounts, entries) in bots {
            cmd.arg(accounts.len());
            for account in accounts {
                cmd.arg(account.as_str());
            }
            cmd.arg(entries);
        }
    }
}

/// The accounts of a bot's events, and of each event the place of its account from 1 and its amount.
fn of_bot<'a>(postings: &[Option<&'a Posting>]) -> (Vec<&'a Account>, String) {
    let (mut accounts, mut entries) = (Vec::new(), String::with_capacity(4 * postings.len()));
    let mut places: FxHashMap<&Account, usize> = FxHashMap::default();
    for posting in postings {
        let (place, amount) = posting.map_or((0, 0), |Posting { account, amount }| {
            let place = *places.entry(account).or_insert_with(|| {
                accounts.push(account);
                accounts.len()
            });
            (place, *amount)
        });
        let _ = write!(entries, "{place}:{amount} ");
    }
    (accounts, entries)
}

/// The ledger entries of leaving events, as arguments of a completion.
pub(super) fn add_leaving(cmd: &mut Cmd, leaving: Option<&Leaving>) {
    let Some(leaving) = leaving else {
        cmd.arg("").arg(0);
        return;
    };
    cmd.arg(leaving.last.get()).arg(leaving.accounts.len());
    for (account, (amount, replacements)) in &leaving.accounts {
        cmd.arg(account.as_str()).arg(*amount).arg(*replacements);
    }
}
