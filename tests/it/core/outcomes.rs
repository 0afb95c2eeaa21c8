//! The outcomes that a handler can return, and their effect on its events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros, millis};
use fairlane::handler::{Failure, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::queue::Queue;
use tokio::sync::Semaphore;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::recorder::{Log, Seen};
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

/// The answer to an event when it is handed out for the given time. `coming` counts from 1 over all
/// attempts.
type ScriptedHandler = fn(coming: u32, slice: &Slice) -> Result<Outcomes, Failure>;

/// An instance with one bot `b` and events `0`, `1` and `2`, handled one at a time. Event `1` gets
/// the scripted answer and the others are done.
struct Three {
    server: RedisServer,
    instance: Instance,
    log: Log,
    pipeline: &'static str,
}

impl Three {
    async fn start(
        pipeline: &'static str,
        settings: &[(&str, &str)],
        answer: ScriptedHandler,
    ) -> Self {
        let server = RedisServer::start(Options::default());
        let batch = format!("pipelines.{pipeline}.batch");
        let mut settings = settings.to_vec();
        settings.push((&batch, "1"));
        let (log, comings) = (Log::default(), Arc::new(AtomicU32::new(0)));
        let handler = log.handler(move |slice: Slice| {
            let comings = Arc::clone(&comings);
            async move {
                if slice.events[0].event.id() == "1" {
                    answer(comings.fetch_add(1, Ordering::Relaxed) + 1, &slice)
                } else {
                    Ok(Outcomes::done())
                }
            }
        });
        let instance = Instance::start(&config(&server, pipeline, &settings), handler).await;
        let three = Self { server, instance, log, pipeline };
        three.send().await;
        three
    }

    async fn send(&self) {
        add(&self.server, STREAM, &["0", "1", "2"].map(|id| event("b", "test", id))).await;
    }

    /// Waits until `count` events were handed out and the queue is empty. Returns their ids and
    /// attempts.
    async fn handed_out(&self, count: usize) -> Vec<(String, u32)> {
        eventually(LONG, "they are handed out", async || self.log.len() >= count).await;
        let drained = async || {
            let view = self.instance.queue(self.pipeline).view(Duration::ZERO).await.unwrap();
            view.depth == 0 && view.delayed == 0
        };
        eventually(LONG, "the queue is empty", drained).await;
        self.log.all().into_iter().map(|Seen { id, attempt, .. }| (id, attempt)).collect()
    }

    /// The times between successive handlings of event `1`.
    fn pauses(&self) -> Vec<Duration> {
        pauses(&self.log.all().into_iter().filter(|seen| seen.id == "1").collect::<Vec<_>>())
    }

    async fn counted(&self, outcome: &str) -> Option<f64> {
        let text = get(&self.instance.address.to_string(), "/metrics").await.1;
        let labels = [("pipeline", self.pipeline), ("outcome", outcome)];
        metric(&text, "fairlane_events_total", &labels)
    }

    async fn counts(&self, outcome: &str, count: f64) {
        let what = format!("{outcome} is {count}");
        eventually(LONG, &what, async || self.counted(outcome).await == Some(count)).await;
    }

    /// The reason and the attempts of every dead letter.
    async fn letters(&self) -> Vec<(String, u32)> {
        let queue = self.instance.queue(self.pipeline);
        let found = queue.dead_letters(None, 10).await.unwrap().into_iter();
        found.map(|letter| (letter.reason, letter.attempts)).collect()
    }
}

fn pauses(seen: &[Seen]) -> Vec<Duration> {
    seen.windows(2).map(|pair| pair[1].at.checked_sub(pair[0].at).unwrap()).collect()
}

fn handed_out(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    expected.iter().map(|&(id, attempt)| (id.to_owned(), attempt)).collect()
}

#[tokio::test]
async fn a_failure_is_retried_in_order_and_counts_as_an_attempt() {
    let three = Three::start("transient", &[], |coming, _| match coming {
        1 | 2 => Err(Failure::transient(0, "not now")),
        _ => Ok(Outcomes::done()),
    })
    .await;
    let expected = handed_out(&[("0", 1), ("1", 1), ("1", 2), ("1", 3), ("2", 1)]);
    assert_eq!(three.handed_out(5).await, expected);
    three.counts("retried", 2.0).await;
    three.counts("done", 3.0).await;
}

/// Panics without output. With `RUST_BACKTRACE` set, `panic!` prints the names of all callers, and
/// finding them in the tables of a debug build blocks the thread. On a busy machine this takes
/// longer than the lease lasts, so the lease would be lost.
fn panics(text: &'static str) -> ! {
    std::panic::resume_unwind(Box::new(text))
}

#[tokio::test]
async fn a_panic_is_one_failed_attempt() {
    let three = Three::start("panic", &[], |coming, _| match coming {
        1 => panics("on purpose"),
        _ => Ok(Outcomes::done()),
    })
    .await;
    let expected = handed_out(&[("0", 1), ("1", 1), ("1", 2), ("2", 1)]);
    assert_eq!(three.handed_out(4).await, expected);
    three.counts("retried", 1.0).await;
    three.instance.stop().await;
}

#[tokio::test]
async fn an_event_that_can_never_be_handled_immediately_becomes_a_dead_letter() {
    let answer: ScriptedHandler = |_, _| Err(Failure::permanent(0, "no such user"));
    let three = Three::start("permanent", &[], answer).await;
    assert_eq!(three.handed_out(3).await, handed_out(&[("0", 1), ("1", 1), ("2", 1)]));
    assert_eq!(three.letters().await, [("no such user".to_owned(), 1)]);
    three.counts("dead", 1.0).await;
}

#[tokio::test]
async fn an_unavailable_target_parks_the_bot_and_counts_no_attempt() {
    let settings = [("pipelines.unavailable.max_attempts", "2")];
    let three = Three::start("unavailable", &settings, |coming, _| match coming {
        1..=5 => Err(Failure::unavailable(0, "down")),
        _ => Ok(Outcomes::done()),
    })
    .await;
    let mut expected = vec![("0", 1)];
    expected.extend([("1", 1); 6]);
    expected.push(("2", 1));
    assert_eq!(three.handed_out(8).await, handed_out(&expected));
    assert!(three.letters().await.is_empty());
}

#[tokio::test]
async fn why_a_bot_rests_is_told_until_it_goes_on() {
    let settings = [("pipelines.told.backoff", "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }")];
    let three = Three::start("told", &settings, |coming, _| match coming {
        1 => Err(Failure::transient(0, "no <b>user</b>, and\nno hope")),
        2 => Err(Failure::unavailable(0, "away").retry_after(Duration::from_secs(60))),
        _ => Ok(Outcomes::done()),
    })
    .await;
    let client = three.instance.client();
    let shown = async || client.get("/v1/pipelines/told/bots/b").await.json();
    let begun = millis(SystemClock.now());
    for (reason, escaped) in [
        ("no <b>user</b>, and\nno hope", "no &lt;b&gt;user&lt;/b&gt;, and\nno hope"),
        ("away", "ago: away"),
    ] {
        let told = async || shown().await["last_failure"]["reason"] == reason;
        eventually(LONG, "it is told", told).await;
        let at = shown().await["last_failure"]["time_ms"].as_u64().unwrap();
        assert!(at >= begun - 20_000 && at <= millis(SystemClock.now()), "{at}");
        let page = client.get("/bots/b").await;
        assert!(String::from_utf8_lossy(&page.body).contains(escaped), "{page:?}");
        assert_eq!(client.post("/v1/pipelines/told/bots/b/release").await.code, 204);
    }
    let idle = async || shown().await["state"] == "idle";
    eventually(LONG, "it goes on", idle).await;
    assert!(shown().await.get("last_failure").is_none());
    three.instance.stop().await;
}

#[tokio::test]
async fn a_target_that_asks_for_time_gets_it() {
    const PAUSE: Duration = Duration::from_millis(300);
    let three = Three::start("retry-after", &[], |coming, _| match coming {
        1 => Err(Failure::unavailable(0, "busy").retry_after(PAUSE)),
        _ => Ok(Outcomes::done()),
    })
    .await;
    three.handed_out(4).await;
    let pauses = three.pauses();
    assert!(pauses[0] >= PAUSE, "{pauses:?}");
}

#[tokio::test]
async fn an_event_for_later_comes_again_at_its_time_and_not_before() {
    const DELAY: Duration = Duration::from_millis(400);
    let three = Three::start("later", &[], |coming, _| match coming {
        1 => Ok(Outcomes::done().later(0, DELAY)),
        _ => Ok(Outcomes::done()),
    })
    .await;
    // The delayed event holds up no other: the events after it continue.
    let expected = handed_out(&[("0", 1), ("1", 1), ("2", 1), ("1", 1)]);
    assert_eq!(three.handed_out(4).await, expected);
    let after = three.pauses()[0];
    assert!(after >= DELAY && after < DELAY + Duration::from_secs(2), "{after:?}");
    three.counts("later", 1.0).await;
    three.counts("done", 3.0).await;
}

#[tokio::test]
async fn an_event_that_a_bot_may_not_delay_stays_in_its_queue_and_says_why() {
    for order in ["bot", "subject"] {
        let server = RedisServer::start(Options::default());
        let handler = Log::default().handler(|slice: Slice| async move {
            let later = |outcomes: Outcomes, at| outcomes.later(at, Duration::from_secs(3_600));
            Ok((0..slice.events.len()).fold(Outcomes::done(), later))
        });
        let order_by = format!("\"{order}\"");
        let settings = [
            ("quotas.delayed_events", "5"),
            ("pipelines.full.order_by", &*order_by),
            ("pipelines.full.backoff", "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }"),
        ];
        let instance = Instance::start(&config(&server, "full", &settings), handler).await;
        let events: Vec<String> = (0..12).map(|id| event("b", "test", id)).collect();
        add(&server, STREAM, &events).await;
        let (queue, bot) = (instance.queue("full"), BotId::parse("b").unwrap());
        let client = instance.client();
        eventually(LONG, "it says why", async || {
            let shown = client.get("/v1/pipelines/full/bots/b").await.json();
            let reason = shown["last_failure"]["reason"].as_str().unwrap_or_default();
            // A key whose events are all that the bot has waits apart, and shows its attempts.
            shown["lanes_aside"][0]["attempts"] == 1
                || reason.ends_with("it holds 5, and quotas.delayed_events is now 5")
        })
        .await;
        let depth = async || queue.view(Duration::ZERO).await.unwrap().depth;
        eventually(LONG, "all others are queued", async || depth().await == 7).await;
        assert_eq!(queue.holdings(&bot).await.unwrap().delayed_events, 5, "{order}");
        assert!(queue.dead_letters(None, 10).await.unwrap().is_empty(), "{order}");
        instance.stop().await;
    }
}

#[tokio::test]
async fn an_event_that_a_bot_may_never_delay_becomes_a_dead_letter_that_says_why() {
    let settings = [("quotas.delayed_bytes", "10"), ("pipelines.never.max_attempts", "2")];
    let answer: ScriptedHandler = |_, _| Ok(Outcomes::done().later(0, LONG));
    let three = Three::start("never", &settings, answer).await;
    let expected = handed_out(&[("0", 1), ("1", 1), ("1", 2), ("2", 1)]);
    assert_eq!(three.handed_out(4).await, expected);
    let letters = three.letters().await;
    assert_eq!(letters.len(), 1, "{letters:?}");
    let (reason, attempts) = &letters[0];
    assert!(reason.ends_with("it holds 0, and quotas.delayed_bytes is now 10"), "{reason}");
    assert_eq!(*attempts, 2);
    three.counts("later", 0.0).await;
}

#[tokio::test]
async fn a_handler_that_takes_too_long_is_cut_off_and_tried_again() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let cut_off = Arc::new(Semaphore::new(0));
    let guard = Arc::clone(&cut_off);
    let handler = log.handler(move |slice: Slice| {
        let guard = Arc::clone(&guard);
        async move {
            if slice.attempt < 3 {
                /// Reports that the future was dropped.
                struct Dropped(Arc<Semaphore>);
                impl Drop for Dropped {
                    fn drop(&mut self) {
                        self.0.add_permits(1);
                    }
                }
                let _dropped = Dropped(guard);
                std::future::pending::<()>().await;
            }
            Ok(Outcomes::done())
        }
    });
    let settings = [("pipelines.timeout.handler_timeout", "\"100ms\"")];
    let instance = Instance::start(&config(&server, "timeout", &settings), handler).await;
    add(&server, STREAM, &[event("b", "test", 0)]).await;
    eventually(LONG, "the third attempt", async || log.len() == 3).await;
    assert_eq!(cut_off.available_permits(), 2);
    let pauses = pauses(&log.all());
    assert!(pauses.iter().all(|&pause| pause >= Duration::from_millis(100)), "{pauses:?}");
    eventually(LONG, "it is done", async || {
        instance.queue("timeout").view(Duration::ZERO).await.unwrap().depth == 0
    })
    .await;
}

#[tokio::test]
async fn a_paused_bot_rests_and_the_others_go_on() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "paused", &[]), log.content()).await;
    let queue = instance.queue("paused");
    let bot = BotId::parse("a").unwrap();
    assert!(queue.pause(Some(&bot)).await.unwrap());
    let events = [event("a", "test", 1), event("b", "test", 2), event("a", "test", 3)];
    add(&server, STREAM, &events).await;
    eventually(LONG, "a's events wait", async || {
        queue.next_events(&bot, 9).await.unwrap().len() == 2
    })
    .await;
    eventually(LONG, "b's are done", async || log.len() == 1).await;
    assert_eq!(log.ids("paused"), ["2"]);
    assert!(queue.resume(Some(&bot)).await.unwrap());
    eventually(LONG, "a goes on", async || log.len() == 3).await;
    assert_eq!(log.ids("paused"), ["2", "1", "3"]);
}

/// After a SIGCONT, a task may run before its timers do. A fence is never earlier than the time at
/// which it was given, in µs.
#[tokio::test]
async fn a_process_that_was_frozen_starts_nothing_under_expired_leases() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let stood_still = Arc::new(AtomicU64::new(0));
    let until = Arc::clone(&stood_still);
    let handler = log.handler(move |slice: Slice| {
        let until = Arc::clone(&until);
        async move {
            if slice.events[0].event.kind() == "freeze" && until.load(Ordering::Relaxed) == 0 {
                // This blocks on purpose: it is the fault itself, on the only thread of the
                // runtime.
                std::thread::sleep(Duration::from_millis(1_500));
                until.store(micros(SystemClock.now()), Ordering::Relaxed);
            }
            Ok(Outcomes::done())
        }
    });
    let settings =
        [("pipelines.frozen.lease_ttl", "\"1s\""), ("pipelines.frozen.workers.max", "1")];
    let instance = Instance::start(&config(&server, "frozen", &settings), handler).await;
    // Handlers that take almost no time let the pool lease ahead for its single worker.
    let calm: Vec<String> = (0..200).map(|id| event("calm", "test", id)).collect();
    add(&server, STREAM, &calm).await;
    eventually(LONG, "it is warm", async || log.len() == 200).await;
    let queue = instance.queue("frozen");
    queue.pause(None).await.unwrap();
    let frozen: Vec<String> = (0..20).map(|id| event(&format!("b{id}"), "freeze", id)).collect();
    add(&server, STREAM, &frozen).await;
    eventually(LONG, "they wait", async || queue.view(Duration::ZERO).await.unwrap().depth == 20)
        .await;
    queue.resume(None).await.unwrap();
    eventually(LONG, "all are done", async || queue.view(Duration::ZERO).await.unwrap().depth == 0)
        .await;
    let woken = stood_still.load(Ordering::Relaxed);
    let after: Vec<Seen> = log.all().into_iter().filter(|seen| micros(seen.at) >= woken).collect();
    assert_eq!(after.len(), 20, "also the one that was frozen: it committed nothing");
    for seen in after {
        assert!(seen.fence > woken, "begun under a lease from before {woken}: {seen:?}");
    }
}

/// A slow machine may need several tries, each with another bot: it takes short slices.
const TRIES: usize = 10;
/// Events of a bot of which all become dead letters.
const DEAD: usize = 1_200;

/// Queues events of a bot, and has them handled. Returns the most arguments of a call of Redis meanwhile.
/// Asserts that all are dead letters, in order.
async fn all_die(server: &RedisServer, queue: &Queue, bot: &str, events: &[String]) -> usize {
    let depth = async || queue.view(Duration::ZERO).await.unwrap().depth;
    let log_from = async |us: &str| {
        server.ask(&["CONFIG", "SET", "slowlog-log-slower-than", us]).await;
    };
    server.ask(&["CONFIG", "SET", "slowlog-max-len", "100000"]).await;
    log_from("-1").await;
    queue.pause(None).await.unwrap();
    add(server, STREAM, events).await;
    eventually(LONG, "they wait", async || depth().await == events.len() as u64).await;
    log_from("0").await;
    queue.resume(None).await.unwrap();
    eventually(LONG, "all are done", async || depth().await == 0).await;

    let bot = BotId::parse(bot).unwrap();
    let letters = queue.dead_letters(Some(&bot), 2 * events.len()).await.unwrap();
    let ids = letters.iter().rev().map(|letter| letter.event.as_ref().unwrap().id());
    assert!(ids.eq((0..events.len()).map(|id| id.to_string())), "{}", letters.len());
    // Redis shows the first arguments of a call, and the number of the others.
    let calls = server.ask(&["SLOWLOG", "GET", "-1"]).await;
    let counts = calls.split(" more arguments)").filter_map(|text| text.rsplit('(').next());
    counts.filter_map(|count| count.parse().ok()).max().unwrap()
}

#[tokio::test]
async fn a_slice_with_many_dead_letters_is_settled_in_short_calls_and_in_order() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let handler = log.handler(|slice: Slice| async move {
        let dead = if slice.bot.as_str() == "calm" { 0 } else { slice.events.len() };
        Ok((0..dead).fold(Outcomes::done(), |outcomes, at| outcomes.dead(at, "refused")))
    });
    let settings = [("pipelines.parts.batch", "5000"), ("quotas.dead_letters", "0")];
    let instance = Instance::start(&config(&server, "parts", &settings), handler).await;
    // Then the pool knows that a slice may be long.
    let calm: Vec<String> = (0..200).map(|id| event("calm", "test", id)).collect();
    add(&server, STREAM, &calm).await;
    eventually(LONG, "it is warm", async || log.len() == 200).await;
    let mut shown = false;
    for n in 0..TRIES {
        let bot = format!("b-{n}");
        let events: Vec<String> = (0..DEAD).map(|id| event(&bot, "test", id)).collect();
        let most = all_die(&server, instance.queue("parts"), &bot, &events).await;
        // A dead letter has four.
        assert!(most < 2_100, "{most}");
        let seen: Vec<Seen> = log.all().into_iter().filter(|seen| seen.bot == bot).collect();
        shown = seen.chunk_by(|one, next| one.fence == next.fence).any(|slice| slice.len() > 500);
        if shown {
            break;
        }
    }
    assert!(shown, "the machine was too slow in every one of {TRIES} tries");
    instance.stop().await;
}

/// A slice of a bot with ordering keys ends with one call.
#[tokio::test]
async fn many_expired_events_of_a_bot_with_ordering_keys_become_dead_letters_in_short_calls() {
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.lanes.batch", "5000"),
        ("pipelines.lanes.slice_time", "\"1s\""),
        ("pipelines.lanes.order_by", "\"subject\""),
        ("quotas.dead_letters", "0"),
    ];
    let log = Log::default();
    let instance = Instance::start(&config(&server, "lanes", &settings), log.content()).await;
    let event = |bot: &str, expiry: &str, id: usize| {
        serde_json::json!({
            "specversion": "1.0", "id": id.to_string(), "source": "test", "type": "test",
            "botid": bot, "subject": "s", "expirytime": expiry,
        })
        .to_string()
    };
    let calm: Vec<String> = (0..200).map(|id| event("calm", "9999-01-01T00:00:00Z", id)).collect();
    add(&server, STREAM, &calm).await;
    eventually(LONG, "it is warm", async || log.len() == 200).await;
    let mut shown = false;
    for n in 0..TRIES {
        let bot = format!("b-{n}");
        let events: Vec<String> =
            (0..DEAD).map(|id| event(&bot, "2000-01-01T00:00:00Z", id)).collect();
        let most = all_die(&server, instance.queue("lanes"), &bot, &events).await;
        assert!(most < 2_100, "{most}");
        // The log shows some of them itself, and counts only the others.
        shown = most >= 1_900;
        if shown {
            break;
        }
    }
    assert!(shown, "the machine was too slow in every one of {TRIES} tries");
    instance.stop().await;
}
