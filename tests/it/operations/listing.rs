//! Lists for operators: every bot once, in order, page by page.

use std::collections::BTreeSet;
use std::time::Duration;

use fairlane::id::{BotId, LetterId};
use fairlane::queue::{BotFilter, BotOrder, BotState, BotView, PushOptions, Queue};

use crate::support::config::config;
use crate::support::instance::queue;
use crate::support::redis::{Options, RedisServer};

const BOTS: usize = 60;

fn bot(number: usize) -> BotId {
    BotId::parse(&format!("bot-{number:02}")).unwrap()
}

/// Bot `n` gets `n % 7 + 1` events. The bot with the highest number has the oldest.
async fn filled(server: &RedisServer) -> Queue {
    let queue = queue(&config(server, "list", &[("pipelines.list.max_queue", "5")]), "list").await;
    for number in (0..BOTS).rev() {
        let events: Vec<_> = (0..=number % 7)
            .map(|at| {
                fairlane::event::Event::builder("tag.applied", &bot(number))
                    .id(at.to_string())
                    .build()
                    .unwrap()
            })
            .collect();
        queue.push(&bot(number), &events, PushOptions::default()).await.unwrap();
    }
    queue
}

async fn walk(
    queue: &Queue,
    order: BotOrder,
    wanted: &(dyn Fn(&BotId) -> bool + Sync),
) -> Vec<BotView> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let now = Duration::from_secs(4_000_000_000);
        let page = queue.list_bots(order, after.as_ref(), 7, wanted, now).await.unwrap();
        assert!(page.bots.len() == 7 || page.next.is_none(), "only the last page is short");
        all.extend(page.bots);
        let Some(next) = page.next else { return all };
        after = Some(next);
    }
}

#[tokio::test]
async fn pages_of_bots_hold_each_bot_once_in_order() {
    let server = RedisServer::start(Options::default());
    let queue = filled(&server).await;
    queue.pause(Some(&bot(3))).await.unwrap();

    let by_depth = walk(&queue, BotOrder::Depth, &|_| true).await;
    let names: BTreeSet<_> = by_depth.iter().map(|view| view.bot.clone()).collect();
    assert_eq!((by_depth.len(), names.len()), (BOTS, BOTS));
    assert!(by_depth.is_sorted_by_key(|view| (u64::MAX - view.depth, view.bot.clone())));
    assert_eq!(by_depth[0].depth, 5, "the bound of the queue");

    let by_age = walk(&queue, BotOrder::Age, &|_| true).await;
    let order: Vec<_> = by_age.iter().map(|view| view.bot.clone()).collect();
    assert_eq!(order, (0..BOTS).rev().map(bot).collect::<Vec<_>>());

    let wanted = |bot: &BotId| bot.as_str().ends_with('7');
    let some = walk(&queue, BotOrder::Age, &wanted).await;
    assert_eq!(some.len(), BOTS / 10);
}

#[tokio::test]
async fn a_list_of_idle_bots_that_fail_has_those_with_dead_letters_and_without_queued_events() {
    let server = RedisServer::start(Options::default());
    let queue = filled(&server).await;
    // Of these two, only the second one has a dead letter. Others with dead letters keep their events.
    for number in [4, 5] {
        queue.purge(&bot(number)).await.unwrap();
    }
    let idle = BotFilter { wanted: &|_| true, state: Some(BotState::Idle), failing: true };
    let now = Duration::from_secs(4_000_000_000);
    let page = queue.list_some(BotOrder::Depth, None, BOTS, idle, now).await.unwrap();
    let found: Vec<_> = page.bots.into_iter().map(|view| (view.bot, view.state)).collect();
    assert_eq!(found, [(bot(5), BotState::Idle)]);
}

#[tokio::test]
async fn pages_of_dead_letters_hold_each_letter_once_the_newest_first() {
    let server = RedisServer::start(Options::default());
    let queue = filled(&server).await;
    let expected: usize = (0..BOTS).map(|number| (number % 7 + 1).saturating_sub(5)).sum();
    let wanted = |_: &BotId| true;
    let (mut ids, mut before): (Vec<LetterId>, _) = (Vec::new(), None);
    loop {
        let page = queue.list_dead_letters(None, &wanted, before, 4).await.unwrap().letters;
        let Some(last) = page.last() else { break };
        before = Some(last.id);
        ids.extend(page.iter().map(|letter| letter.id));
    }
    assert_eq!(ids.len(), expected);
    assert!(ids.is_sorted_by(|newer, older| newer > older), "{ids:?}");

    let letter = queue.dead_letter(ids[0]).await.unwrap().unwrap();
    assert!(queue.redrive(&letter.bot, ids[0]).await.unwrap());
    assert!(!queue.redrive(&letter.bot, ids[0]).await.unwrap(), "it is gone");
    assert!(queue.drop_dead_letter(ids[1]).await.unwrap());
    assert!(!queue.drop_dead_letter(ids[1]).await.unwrap(), "it is gone");
    assert!(queue.dead_letter("1000.1-0".parse().unwrap()).await.unwrap().is_none());
}
