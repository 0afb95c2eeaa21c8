//! Completions that wait for company. While bots get single events one after another, each event
//! would need its own completion. Instead, the completion of a lease that a copy took waits for a
//! moment on the shelf: one call then completes several bots of a shard, and the calls travel with
//! the next copy. Until then the bot is leased, which delays nobody: the copier takes the shelf at
//! once if it has another event for one of these bots, and the completion does not wait if the copier
//! had one while the handler ran.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::commit::Item;
use crate::id::{BotId, Fence};

/// Maximum wait of a completion. A process that dies meanwhile leaves the events to be handled again.
pub(super) const WAIT: Duration = Duration::from_millis(40);
/// From this age on, the completions travel with the next copy.
const RIDE: Duration = Duration::from_millis(35);
/// While copies follow each other within this time, company is likely.
const PACE: Duration = Duration::from_millis(10);
/// Maximum number of completions.
const ITEMS_MAX: usize = 256;
/// With this number, the completions travel with the next copy.
const ITEMS_ENOUGH: usize = 64;

#[derive(Debug, Default)]
struct State {
    items: Vec<Item>,
    bots: FxHashSet<BotId>,
    /// When the first of them was put there.
    since: Option<Instant>,
    /// The last two copies.
    copies: [Option<Instant>; 2],
    /// Per bot that is handled under a lease of a copy: the fence, and whether another event was copied.
    watched: FxHashMap<BotId, (Fence, bool)>,
}

/// Notes the copies for a bot until it is dropped.
pub(super) struct Watch {
    shelf: Arc<Shelf>,
    bot: BotId,
    fence: Fence,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shelf.state().unwatch(&self.bot, self.fence);
    }
}

impl State {
    /// Whether another event was copied meanwhile. A later lease of the bot stays watched.
    fn unwatch(&mut self, bot: &BotId, fence: Fence) -> bool {
        match self.watched.get(bot) {
            Some(&(watched, more)) if watched == fence => {
                self.watched.remove(bot);
                more
            }
            _ => false,
        }
    }
}

/// The completions of one pool that wait.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    state: Mutex<State>,
    filled: Notify,
}

impl Shelf {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether company is likely, and there is room.
    pub(super) fn is_worthwhile(&self) -> bool {
        let state = self.state();
        let paced = state.copies[0].is_some_and(|before| before.elapsed() < PACE);
        paced && state.items.len() < ITEMS_MAX
    }

    /// Notes copies for the bot of this lease from now on.
    pub(super) fn watch(self: &Arc<Self>, bot: &BotId, fence: Fence) -> Watch {
        self.state().watched.insert(bot.clone(), (fence, false));
        Watch { shelf: Arc::clone(self), bot: bot.clone(), fence }
    }

    /// Puts a completion there.
    ///
    /// # Errors
    /// The completion, if another event of its bot was copied meanwhile.
    pub(super) fn put(&self, item: Item) -> Result<(), Box<Item>> {
        let mut state = self.state();
        if state.unwatch(&item.completion.bot, item.completion.fence) {
            return Err(Box::new(item));
        }
        state.bots.insert(item.completion.bot.clone());
        state.items.push(item);
        if state.since.is_none() {
            state.since = Some(Instant::now());
            drop(state);
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Puts completions there that are due now, such as those that a copy took along in vain.
    pub(super) fn put_due(&self, items: Vec<Item>) {
        if items.is_empty() {
            return;
        }
        let mut state = self.state();
        state.bots.extend(items.iter().map(|item| item.completion.bot.clone()));
        state.items.extend(items);
        let now = Instant::now();
        state.since = Some(now.checked_sub(WAIT).unwrap_or(now));
        drop(state);
        self.filled.notify_one();
    }

    /// Takes all completions.
    pub(super) fn take(&self) -> Vec<Item> {
        let mut state = self.state();
        state.since = None;
        state.bots.clear();
        std::mem::take(&mut state.items)
    }

    /// Notes a copy for these bots. Takes all completions if one of the bots waits for its own, or if
    /// they are many, or old enough.
    pub(super) fn take_along<'a>(&self, bots: impl Iterator<Item = &'a BotId>) -> Vec<Item> {
        let mut state = self.state();
        let now = Instant::now();
        state.copies = [state.copies[1], Some(now)];
        let mut waits = false;
        for bot in bots {
            waits |= state.bots.contains(bot);
            if let Some((_, more)) = state.watched.get_mut(bot) {
                *more = true;
            }
        }
        let Some(since) = state.since else { return Vec::new() };
        let ready = now - since >= RIDE || state.items.len() >= ITEMS_ENOUGH;
        if !ready && !waits {
            return Vec::new();
        }
        drop(state);
        self.take()
    }

    /// Whether completions have waited for long enough.
    pub(super) fn is_due(&self) -> bool {
        self.state().since.is_some_and(|since| since.elapsed() >= WAIT)
    }

    /// Returns when completions have waited for long enough.
    pub(super) async fn due(&self) {
        loop {
            let filled = self.filled.notified();
            let since = self.state().since;
            match since {
                Some(since) if since.elapsed() >= WAIT => return,
                Some(since) => tokio::select! {
                    () = tokio::time::sleep_until(since + WAIT) => {}
                    () = filled => {}
                },
                None => filled.await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    fn shelf(bots: &[&str]) -> Shelf {
        let shelf = Shelf::default();
        for name in bots {
            shelf.put(Item::of(&bot(name))).unwrap();
        }
        shelf
    }

    fn along(shelf: &Shelf, name: &str) -> usize {
        shelf.take_along([bot(name)].iter()).len()
    }

    #[tokio::test(start_paused = true)]
    async fn completions_wait_only_while_copies_follow_each_other() {
        let shelf = shelf(&[]);
        assert!(!shelf.is_worthwhile());
        along(&shelf, "a");
        assert!(!shelf.is_worthwhile(), "one copy is not a sequence");
        along(&shelf, "b");
        assert!(shelf.is_worthwhile());
        tokio::time::advance(PACE).await;
        assert!(!shelf.is_worthwhile());
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_takes_them_along_for_one_of_their_bots_or_if_they_are_many_or_old() {
        assert_eq!(along(&shelf(&["a", "b"]), "c"), 0);
        assert_eq!(along(&shelf(&["a", "b"]), "b"), 2);
        assert_eq!(along(&shelf(&["a"; ITEMS_ENOUGH]), "c"), ITEMS_ENOUGH);
        let old = shelf(&["a", "b"]);
        tokio::time::advance(RIDE).await;
        assert_eq!(along(&old, "c"), 2);
        assert_eq!(along(&old, "a"), 0, "they are gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_completion_does_not_wait_if_its_bot_got_an_event_meanwhile() {
        let shelf = Arc::new(shelf(&[]));
        let a = Item::of(&bot("a")).completion.fence;
        let first = shelf.watch(&bot("a"), a);
        along(&shelf, "a");
        shelf.put(Item::of(&bot("a"))).unwrap_err();
        let second = shelf.watch(&bot("a"), Fence::new(2));
        drop(first);
        along(&shelf, "b");
        shelf.put(Item::of(&bot("a"))).unwrap();
        along(&shelf, "a");
        assert!(shelf.state().watched[&bot("a")].1, "the later lease is still watched");
        drop(second);
        assert!(shelf.state().watched.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_copy_they_are_due_after_the_wait() {
        let shelf = shelf(&["a"]);
        let put = Instant::now();
        shelf.due().await;
        let waited = put.elapsed();
        assert!((WAIT..WAIT + RIDE).contains(&waited), "{waited:?}");
        assert!(shelf.is_due());
        assert_eq!(shelf.take().len(), 1);
        assert!(!shelf.is_due());
        let never = tokio::time::timeout(WAIT * 2, shelf.due()).await;
        never.expect_err("nothing waits");
    }

    #[tokio::test(start_paused = true)]
    async fn completions_that_a_copy_gives_back_are_due_immediately() {
        tokio::time::advance(WAIT).await;
        let shelf = shelf(&["a", "b"]);
        let items = shelf.take_along([bot("a")].iter());
        assert!(shelf.take().is_empty());
        shelf.put_due(items);
        assert!(shelf.is_due());
        shelf.due().await;
        assert_eq!(along(&shelf, "b"), 2, "they are still those of their bots");
        shelf.put(Item::of(&bot("c"))).unwrap();
        assert_eq!(along(&shelf, "b"), 0, "that of b is gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_waits_for_due_completions_is_woken_by_new_ones() {
        let shelf = Arc::new(shelf(&[]));
        let due = |wait| tokio::time::timeout(wait, shelf.due());
        let put = async {
            tokio::time::sleep(WAIT).await;
            shelf.put(Item::of(&bot("a"))).unwrap();
        };
        let (heard, ()) = tokio::join!(due(WAIT * 3), put);
        heard.unwrap();
        let items = shelf.take();
        let give_back = async {
            tokio::time::sleep(WAIT).await;
            shelf.put_due(items);
        };
        let (heard, ()) = tokio::join!(due(WAIT + RIDE), give_back);
        heard.expect("they are due without a further wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_shelf_takes_no_more() {
        let shelf = shelf(&["a"; ITEMS_MAX - 1]);
        let is_worthwhile = || {
            shelf.state().copies = [Some(Instant::now()); 2];
            shelf.is_worthwhile()
        };
        assert!(is_worthwhile());
        shelf.put(Item::of(&bot("b"))).unwrap();
        assert!(!is_worthwhile());
    }
}
