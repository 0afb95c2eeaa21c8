//! The rate of a bot, as in `lua/permit.lua`: before a handler starts, its slice is cut to the tokens that
//! the bot has. A bot without tokens rests. Time is a step that puts a token into a bucket.

use super::parts::{Bucket, Held, Permit, Rule, System, SystemState};
use crate::state_machine::Bot;

impl Held {
    /// Whether the bot has no tokens, so that it rests after this slice.
    pub(super) fn rests(&self) -> bool {
        self.permit == Permit::Given { empty: true }
    }
}

impl System {
    pub(super) fn full(&self) -> Bucket {
        let tokens = self.burst.unwrap_or(0);
        Bucket { tokens, allowed: tokens }
    }

    /// An empty slice needs no tokens.
    pub(super) fn needs_permit(&self, held: &Held) -> bool {
        self.burst.is_some()
            && !matches!(held.permit, Permit::Given { .. })
            && held.slice.as_ref().is_some_and(|slice| !slice.is_empty())
    }

    pub(super) fn permit(&self, state: &mut SystemState, consumer: usize, reply_lost: bool) {
        let held = state.consumers[consumer].as_mut().unwrap();
        let bucket = &mut state.buckets[usize::from(held.bot)];
        let tokens = match (self.without, held.permit) {
            (Some(Rule::TakeAtOnce), Permit::Needed) => {
                held.permit = Permit::Seen(bucket.tokens);
                return;
            }
            (_, Permit::Seen(tokens)) => tokens,
            (Some(Rule::OneBucket), _) => self.full().tokens,
            _ => bucket.tokens,
        };
        let slice = held.slice.as_mut().unwrap();
        let granted = slice.len().min(usize::from(tokens));
        bucket.tokens = tokens - u8::try_from(granted).unwrap();
        // A lost reply costs its tokens.
        slice.truncate(if reply_lost { 0 } else { granted });
        held.permit = Permit::Given { empty: bucket.tokens == 0 || reply_lost };
    }
}

impl SystemState {
    pub(super) fn refill(&mut self, bot: Bot) {
        let bucket = &mut self.buckets[usize::from(bot)];
        bucket.tokens += 1;
        bucket.allowed += 1;
    }

    /// An event is handled.
    pub(super) fn spend(&mut self, bot: Bot) {
        let bucket = &mut self.buckets[usize::from(bot)];
        match bucket.allowed.checked_sub(1) {
            Some(left) => bucket.allowed = left,
            None => self.broken = Some("a bot exceeded its rate"),
        }
    }
}
