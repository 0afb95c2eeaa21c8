//! A bot id is never a pattern, a key or a separator: events of every bot id are handled.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use fairlane::id::BotId;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const EACH: usize = 20;

#[tokio::test]
async fn hostile_bot_ids_go_through_everything() {
    let longest = "x".repeat(256);
    let ids = [
        "*",
        "?",
        "[a-z]",
        "{}",
        "{hostile:0}",
        "fl:{hostile:0}:meta",
        "|||",
        "1|2|3|4",
        " ",
        "a b",
        "a:b",
        "a\"b",
        "a'b",
        "a\\b",
        "%s%n",
        "$(reboot)",
        "; FLUSHALL",
        "-1",
        "0",
        "nan",
        "null",
        "true",
        "日本",
        "🤖",
        "e\u{301}",
        "\u{202e}tob",
        "\u{feff}",
        "../../etc",
        "<b>",
        &longest,
    ];
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    // One event of each bot fails once and one is given up, so that leases, parks and attempts see
    // the ids too.
    let handler = log.handler(|slice| async move {
        match slice.attempt {
            1 if slice.events[0].event.id() == "3" => Err(Failure::transient(0, "once")),
            _ if slice.events[0].event.id() == "5" => Ok(Outcomes::first(1).dead(0, "given up")),
            _ => Ok(Outcomes::first(1)),
        }
    });
    let instance = Instance::start(&config(&server, "hostile", &[]), handler).await;
    let events: Vec<String> = (0..EACH)
        .flat_map(|position| ids.iter().map(move |id| event(id, "test", position)))
        .collect();
    add(&server, STREAM, &events).await;
    let queue = instance.queue("hostile");
    let drained = async || {
        log.len() > ids.len() * EACH && queue.view(Duration::ZERO).await.unwrap().depth == 0
    };
    eventually(LONG, "all are done", drained).await;
    let mut bots: HashMap<String, Vec<usize>> = HashMap::new();
    for seen in log.all() {
        let positions = bots.entry(seen.bot).or_default();
        let position = seen.id.parse().unwrap();
        if !positions.contains(&position) {
            positions.push(position);
        }
    }
    assert_eq!(bots.len(), ids.len());
    for (bot, positions) in bots {
        assert!(ids.contains(&&*bot), "{bot:?}");
        assert_eq!(positions, (0..EACH).collect::<Vec<_>>(), "{bot:?}");
    }
    // The operators' commands accept the ids too.
    for id in ids {
        let bot = BotId::parse(id).unwrap();
        let letters = queue.dead_letters(Some(&bot), 10).await.unwrap();
        assert_eq!(letters.len(), 1, "{id:?}");
        assert_eq!((&letters[0].bot, &*letters[0].reason), (&bot, "given up"));
        assert!(queue.pause(Some(&bot)).await.unwrap(), "{id:?}");
        assert!(queue.redrive(&bot, letters[0].id).await.unwrap(), "{id:?}");
        assert_eq!(queue.next_events(&bot, 9).await.unwrap().len(), 1, "{id:?}");
        queue.set_weight(&bot, 2).await.unwrap();
        let view = queue.view_bot(&bot, Duration::ZERO).await.unwrap();
        assert_eq!((view.depth, view.weight, &view.bot), (1, 2.into(), &bot), "{id:?}");
        assert_eq!(queue.purge(&bot).await.unwrap(), 1, "{id:?}");
        assert!(queue.resume(Some(&bot)).await.unwrap(), "{id:?}");
    }
}
