//! The exports of a process: how many there are, whose, and how they go on.
//!
//! A bot has one export at a time, and a token has a quarter of all places. When all places are in
//! use, the token with the most gives one up, or an export whose client reads nothing. So no client
//! that reads slowly keeps others out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use tokio::time::Instant;

use super::CountersError;
use super::view::AdId;
use crate::id::BotId;

/// Maximum number of exports per process.
pub(crate) const ALL: usize = 8;
/// Maximum number of exports of one token that is not for all bots.
pub(crate) const OF_ONE: usize = ALL / 4;
/// An export whose client reads nothing for this long gives way to another one.
const STALLED: Duration = Duration::from_secs(30);

/// Another export has taken the turn.
#[derive(Debug, thiserror::Error)]
#[error("another export took over the place of this one; start the export again")]
pub(crate) struct Overtaken;

/// Why an export stops early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// A store failed.
    #[error(transparent)]
    Counters(#[from] CountersError),
    /// Another export needed the place.
    #[error(transparent)]
    Overtaken(#[from] Overtaken),
}

/// The views of pages. The export goes on with each page, because its client has to read all earlier
/// views first. A page may have no views: then only the next page shows that the client waits.
pub(crate) fn views<E: Into<CountersError>>(
    pages: impl Stream<Item = Result<Vec<(AdId, u64)>, E>> + Send + Unpin + 'static,
    turn: Turn,
) -> impl Stream<Item = Result<(AdId, u64), Broken>> + Send + Unpin + 'static {
    let page = move |page: Result<Vec<(AdId, u64)>, E>| {
        turn.go_on()?;
        let views = page.map_err(|error| Broken::Counters(error.into()))?;
        Ok::<_, Broken>(stream::iter(views.into_iter().map(Ok)))
    };
    pages.map(page).try_flatten()
}

/// Grants turns to exports.
#[derive(Debug, Clone, Default)]
pub(crate) struct Exports(Arc<Mutex<Running>>);

#[derive(Debug, Default)]
struct Running {
    /// Number of exports so far.
    count: u64,
    /// Oldest first.
    exports: Vec<Export>,
}

#[derive(Debug)]
struct Export {
    number: u64,
    token: Box<str>,
    bot: BotId,
    /// When the client last read data.
    moved: Instant,
}

/// What happens if all places are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WhenFull {
    /// The token with the most gives one up.
    TakeOver,
    /// Only an export whose client reads nothing gives way.
    Refuse,
}

impl Export {
    fn is_stalled(&self) -> bool {
        self.moved.elapsed() >= STALLED
    }
}

impl Exports {
    /// A turn for a token that may have `max`. `None`: another export of the bot runs, the token has
    /// as many as it may, or no place is free.
    pub(crate) fn begin(&self, token: &str, max: usize, bot: &BotId) -> Option<Turn> {
        self.grant(token, max, bot, WhenFull::TakeOver)
    }

    /// As [`Self::begin`], but no other export ends for it unless its client reads nothing.
    pub(crate) fn begin_if_free(&self, token: &str, max: usize, bot: &BotId) -> Option<Turn> {
        self.grant(token, max, bot, WhenFull::Refuse)
    }

    fn grant(&self, token: &str, max: usize, bot: &BotId, full: WhenFull) -> Option<Turn> {
        let mut running = self.running();
        running.exports.retain(|one| one.bot != *bot || !one.is_stalled());
        let list = &mut running.exports;
        if list.iter().any(|one| one.bot == *bot) {
            return None;
        }
        let count =
            |list: &[Export], name: &str| list.iter().filter(|one| *one.token == *name).count();
        let own = count(list, token);
        if own >= max {
            return None;
        }
        if list.len() >= ALL {
            let has_more = |one: &Export| count(list, &one.token) > own + 1;
            let crowd = match full {
                WhenFull::TakeOver => list.iter().position(has_more),
                WhenFull::Refuse => None,
            };
            let stalled = || list.iter().position(Export::is_stalled);
            list.remove(crowd.or_else(stalled)?);
        }
        running.count += 1;
        let number = running.count;
        let (token, bot) = (token.into(), bot.clone());
        running.exports.push(Export { number, token, bot, moved: Instant::now() });
        Some(Turn { exports: self.clone(), number })
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to export. It ends when it is dropped, or when another export needs the place.
#[derive(Debug)]
pub(crate) struct Turn {
    exports: Exports,
    number: u64,
}

impl Turn {
    /// Records that the client has read all data so far.
    pub(crate) fn go_on(&self) -> Result<(), Overtaken> {
        let mut running = self.exports.running();
        let own = running.exports.iter_mut().find(|one| one.number == self.number);
        own.ok_or(Overtaken)?.moved = Instant::now();
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.exports.running().exports.retain(|one| one.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bot(number: usize) -> BotId {
        BotId::parse(&format!("bot-{number}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_bot_has_one_export_and_one_whose_client_stalls_gives_way() {
        let exports = Exports::default();
        let begin = || exports.begin("token", ALL, &bot(1));
        let first = begin().unwrap();
        assert!(begin().is_none());
        drop(first);
        let second = begin().unwrap();
        tokio::time::advance(STALLED / 2).await;
        second.go_on().unwrap();
        tokio::time::advance(STALLED / 2).await;
        assert!(begin().is_none(), "it went on meanwhile");
        tokio::time::advance(STALLED / 2).await;
        let third = begin().unwrap();
        assert!(matches!(second.go_on(), Err(Overtaken)));
        drop(second);
        assert!(begin().is_none(), "an overtaken export ends no turn but its own");
        third.go_on().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_export_goes_on_with_each_page_although_none_has_views() {
        let exports = Exports::default();
        let turn = exports.begin("token", ALL, &bot(1)).unwrap();
        let empty = stream::iter(0..10).then(async |page| {
            tokio::time::advance(STALLED / 2).await;
            let views = if page == 9 { vec![(AdId::parse("x").unwrap(), 7)] } else { Vec::new() };
            Ok::<_, CountersError>(views)
        });
        let mut views = views(Box::pin(empty), turn);
        let (ad, n) = views.next().await.unwrap().unwrap();
        assert_eq!((ad.as_str(), n), ("x", 7));
        assert!(exports.begin("other", ALL, &bot(1)).is_none(), "it is not stalled");
        // Its client reads nothing, so another one takes over.
        tokio::time::advance(STALLED).await;
        assert!(exports.begin("other", ALL, &bot(1)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_export_that_was_overtaken_ends_at_the_next_page() {
        let exports = Exports::default();
        let turn = exports.begin("token", ALL, &bot(1)).unwrap();
        let pages = stream::iter(
            [1, 2].map(|n| Ok::<_, CountersError>(vec![(AdId::parse("x").unwrap(), n)])),
        );
        let mut views = views(pages, turn);
        assert!(views.next().await.unwrap().is_ok());
        tokio::time::advance(STALLED).await;
        let _other = exports.begin("token", ALL, &bot(1)).unwrap();
        assert!(matches!(views.next().await, Some(Err(Broken::Overtaken(_)))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_has_a_quarter_and_many_of_them_keep_no_other_out() {
        let exports = Exports::default();
        let mut bots = (0..).map(bot);
        let mut begin = |token: &str, max| exports.begin(token, max, &bots.next().unwrap());
        let greedy: Vec<_> = ["a", "b", "c", "d"]
            .into_iter()
            .flat_map(|token| [(); OF_ONE].map(|()| begin(token, OF_ONE).unwrap()))
            .collect();
        assert_eq!(greedy.len(), ALL);
        assert!(begin("a", OF_ONE).is_none(), "it has its share");
        let quiet = begin("quiet", OF_ONE).expect("a token with two gives one up");
        assert!(matches!(greedy[0].go_on(), Err(Overtaken)), "the oldest of it");
        quiet.go_on().unwrap();
        assert!(begin("quiet", OF_ONE).is_none(), "none takes one from its equals");
        tokio::time::advance(STALLED).await;
        quiet.go_on().unwrap();
        assert!(begin("quiet", OF_ONE).is_some(), "but from one whose client stalls");
        drop((greedy, quiet));
        assert!(exports.running().exports.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_operator_may_have_all_until_another_asks() {
        let exports = Exports::default();
        let all: Vec<_> =
            (0..ALL).map(|number| exports.begin("root", ALL, &bot(number)).unwrap()).collect();
        assert!(exports.begin("root", ALL, &bot(ALL)).is_none());
        assert!(
            exports.begin_if_free("tenant", OF_ONE, &bot(ALL)).is_none(),
            "a page takes none over"
        );
        let _tenant = exports.begin("tenant", OF_ONE, &bot(ALL)).expect("it takes one over");
        assert!(matches!(all[0].go_on(), Err(Overtaken)), "the oldest");
    }
}
