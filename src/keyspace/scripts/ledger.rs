//! The ledger of a queue: what `enqueue` and `complete` are told of it, and `recount`.

use std::collections::BTreeMap;

use redis::{Cmd, Value};

use super::{Call, Index, Limits, evalsha};
use crate::id::{BotId, Offset};
use crate::keyspace::keys::ShardKeys;
use crate::keyspace::reply::{Reply, ReplyError};
use crate::ledger::{Account, Leaving, Posting};

/// `lua/recount.lua`. Answers whether there was such a dead letter.
#[derive(Debug)]
pub struct Recount<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// Bounds of the queue.
    pub limits: Limits,
    /// Maximum number of accounts of a bot whose totals one generation caches.
    pub cached_accounts: u64,
    /// The dead letter.
    pub id: Offset,
    /// Whose it is.
    pub bot: &'a BotId,
    /// What its event posts; `None`: nothing.
    pub posting: Option<&'a Posting>,
    /// Its event, encoded.
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
        cmd.arg(bot.as_str()).arg(1).arg(self.event);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// What the events of an enqueue post.
#[derive(Debug, Default)]
pub struct Postings {
    /// Maximum number of accounts of a bot whose totals one generation caches.
    pub cached_accounts: u64,
    /// Per bot of the call, in the same order: accounts and amounts.
    pub bots: Vec<BTreeMap<Account, u64>>,
}

impl Postings {
    /// Their sum.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.bots.iter().flat_map(BTreeMap::values).sum()
    }

    /// How many arguments they are.
    pub(super) fn len(&self) -> usize {
        1 + self.bots.iter().map(|accounts| 1 + 2 * accounts.len()).sum::<usize>()
    }

    /// Their arguments.
    pub(super) fn add_to(&self, cmd: &mut Cmd) {
        cmd.arg(self.cached_accounts);
        for accounts in &self.bots {
            cmd.arg(accounts.len());
            for (account, amount) in accounts {
                cmd.arg(account.as_str()).arg(*amount);
            }
        }
    }
}

/// What leaves a queue, as arguments of a completion.
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
