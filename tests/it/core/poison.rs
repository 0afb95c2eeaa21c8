//! An event that can never be handled becomes a dead letter with its reason, and its bot continues.

use std::time::Duration;

use fairlane::id::BotId;
use fairlane::queue::{DeadLetter, Queue};

use crate::support::bus::bot;
use crate::support::fleet::Fleet;
use crate::support::history::{Outcome, Record};
use crate::support::instance::queue;
use crate::support::redis::Options;
use crate::support::roles::worker::{Effect, Poison};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

fn poison(number: usize, event: u32, effect: Effect) -> Poison {
    Poison { bot: bot(number), event, effect }
}

fn id(number: usize) -> BotId {
    BotId::parse(&bot(number)).unwrap()
}

/// The events that were done for a bot, ordered by time, including repetitions.
fn done(fleet: &Fleet, number: usize) -> Vec<u32> {
    let (name, mut done) = (bot(number), Vec::new());
    fleet.records(|record| {
        if let Record::Handled { bot, event, started, outcome: Outcome::Done, .. } = *record
            && bot == name
        {
            done.push((started, event));
        }
    });
    done.sort_unstable();
    done.into_iter().map(|(_, event)| event).collect()
}

async fn letters(queue: &Queue, number: usize) -> Vec<DeadLetter> {
    queue.dead_letters(Some(&id(number)), 100).await.unwrap()
}

async fn redrive(queue: &Queue, letter: &DeadLetter) {
    assert!(queue.redrive(&letter.bot, letter.id).await.unwrap());
}

#[tokio::test]
async fn poison_becomes_a_dead_letter_with_its_reason_and_redrive_puts_it_through_in_order() {
    let mut fleet = Fleet::new(Options::default(), 4, &[("pipelines.test.max_attempts", "3")]);
    fleet.behaviour.poison = vec![
        poison(0, 10, Effect::Fails),
        poison(0, 30, Effect::Fails),
        poison(1, 10, Effect::Panics),
    ];
    fleet.start(1).await;
    fleet.publish(50).await;
    fleet.drains(LONG).await;
    let queue = queue(&fleet.config, "test").await;
    for (number, reason, events) in [
        (0, "it always fails", &[30, 10][..]),
        (1, "the handler panicked: it always panics", &[10]),
    ] {
        let found = letters(&queue, number).await;
        assert_eq!(found.len(), events.len(), "{found:?}");
        for (letter, event) in found.iter().zip(events) {
            assert_eq!((&*letter.reason, letter.attempts), (reason, 3), "{letter:?}");
            assert_eq!(letter.event.as_ref().unwrap().id(), event.to_string());
        }
        let missing = |done: &u32| !events.contains(done);
        let mut others = done(&fleet, number);
        others.dedup();
        assert!(others.iter().all(missing), "{others:?}");
        // A panic hides which event caused it, so the events before it were handled again.
        others.sort_unstable();
        others.dedup();
        assert_eq!(others, (0..50).filter(missing).collect::<Vec<_>>());
    }
    let report = fleet.report();
    assert!(report.is_clean() && report.given_up == 3, "{report}");

    // A redrive restores the order of the bus, before every later event that still waits. The order
    // of the redrive calls does not matter.
    queue.pause(Some(&id(0))).await.unwrap();
    fleet.publish(50).await;
    // All other bots must be idle: a redrive revokes a running lease, and its slice is then
    // repeated.
    eventually(LONG, "only the events of the paused bot wait", async || {
        let view = queue.view(Duration::ZERO).await.unwrap();
        view.depth == 50 && view.leased == 0 && fleet.settled() >= 4 * 50 - 3 + 3 * 50
    })
    .await;
    fleet.cure();
    for letter in letters(&queue, 0).await.iter().chain(&letters(&queue, 1).await) {
        redrive(&queue, letter).await;
    }
    queue.resume(Some(&id(0))).await.unwrap();
    fleet.drains(LONG).await;
    let handled = done(&fleet, 0);
    assert_eq!(handled[48..], [&[10, 30], &*(50..100).collect::<Vec<_>>()].concat());
    assert!(queue.dead_letters(None, 10).await.unwrap().is_empty());
    let report = fleet.report();
    assert!(report.is_clean() && report.given_up == 0, "{report}");
}

#[tokio::test]
async fn an_event_that_kills_its_process_is_given_up_after_so_many_processes() {
    let settings = [("pipelines.test.max_attempts", "2"), ("pipelines.test.lease_ttl", "\"1s\"")];
    let mut fleet = Fleet::new(Options::default(), 2, &settings);
    fleet.behaviour.poison = vec![poison(0, 5, Effect::Aborts)];
    fleet.start(1).await;
    fleet.publish(20).await;
    let queue = queue(&fleet.config, "test").await;
    let mut deaths = 0;
    while letters(&queue, 0).await.is_empty() {
        if fleet.workers[0].wait_exit(Duration::from_millis(100)).is_some() {
            deaths += 1;
            assert!(deaths <= 4, "one that may have had a lost reply, two that count, no more");
            fleet.restart(0).await;
        }
    }
    let found = letters(&queue, 0).await;
    assert_eq!((found.len(), found[0].attempts), (1, 2), "{found:?}");
    assert!(found[0].reason.starts_with("2 workers vanished"), "{found:?}");
    assert_eq!(found[0].event.as_ref().unwrap().id(), "5");
    // The bot continues, and the event itself is handled once its cause is mended.
    eventually(LONG, "all others are done", async || fleet.settled() == 39).await;
    fleet.cure();
    redrive(&queue, &found[0]).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.stale_commits, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!(report.duplicates_unexplained, 0, "{report}");
}
