//! Pooled connections: a large answer delays no small answer, and no call is lost for lack of a
//! connection.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::{BotId, PipelineName, ShardCount};
use fairlane::queue::{PushOptions, Queue};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::Pause;
use fairlane::redis::{Link, POOLED_MAX, RedisError, Target};
use futures_util::future::join_all;
use redis::Pipeline;
use tokio::task::JoinSet;

use crate::support::config::{SHARDS, config};
use crate::support::http::Client;
use crate::support::instance::{Instance, queue};
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::proxy::{Proxy, ProxyMode, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(20);
/// The timeout of an instance.
const TIMEOUT: Duration = Duration::from_secs(5);
const SLICE_US: u64 = 10_000;
const ROUNDS: u32 = 5;
/// The number of dead letters that [`fill`] makes, and the bytes of each: 2.5 MiB together.
const LETTERS: usize = 16;
const LETTER_BYTES: usize = 160 << 10;

fn bot(name: &str) -> BotId {
    BotId::parse(name).unwrap()
}

/// A bot whose dead letters are in another shard than those of `large`, so that a look at it reads
/// none of them.
fn quiet() -> BotId {
    let shards = ShardCount::new(SHARDS).unwrap();
    let mut names = (0..).map(|number| bot(&format!("quiet-{number}")));
    names.find(|name| name.shard(shards) != bot("large").shard(shards)).unwrap()
}

/// Creates 2.5 MiB of dead letters of the bot `large`, all in one page of one shard.
async fn fill(queue: &Queue) {
    let large = bot("large");
    queue.pause(Some(&large)).await.unwrap();
    for number in 0..=LETTERS {
        let event = Event::builder("test.large", &large).id(number.to_string());
        let event = event.data(&"x".repeat(LETTER_BYTES)).unwrap().build().unwrap();
        queue.push(&large, &[event], PushOptions::default()).await.unwrap();
    }
    let letters = queue.dead_letters(Some(&large), 2 * LETTERS).await.unwrap();
    assert_eq!(letters.len(), LETTERS, "all but the first overflow");
}

fn overflowing(server: &RedisServer, url: &str) -> String {
    let url = format!("{url:?}");
    let settings = [
        ("redis.url", &*url),
        ("pipelines.test.max_queue", "1"),
        ("pipelines.test.on_overflow", "\"dead\""),
    ];
    config(server, "test", &settings)
}

async fn behind_proxy() -> (RedisServer, Proxy) {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    (server, proxy)
}

fn pooled(url: &str) -> Arc<Link> {
    let target = Target::new(url).unwrap();
    Arc::new(Link::pooled(target, Vec::new(), SLICE_US, TIMEOUT))
}

fn command(words: &[&str]) -> Pipeline {
    let mut pipe = Pipeline::new();
    pipe.cmd(words[0]).arg(&words[1..]);
    pipe
}

/// The ids of the connections that the server has.
async fn connections(server: &RedisServer) -> BTreeSet<String> {
    let mut connection = server.connection().await;
    let list: String = redis::cmd("CLIENT").arg("LIST").query_async(&mut connection).await.unwrap();
    let id = |line: &str| line.split(' ').next().unwrap().to_owned();
    list.lines().filter(|line| !line.contains("cmd=client")).map(id).collect()
}

/// The program under test. `FAIRLANE_PROGRAM` names another one to compare it with.
#[expect(clippy::disallowed_methods, reason = "it says which program is measured")]
fn program() -> String {
    std::env::var("FAIRLANE_PROGRAM").unwrap_or_else(|_| PROGRAM.to_owned())
}

/// An instance on a server that [`fill`] has filled.
async fn before_filled(server: &RedisServer, url: &str) -> Served {
    let config = overflowing(server, url).replace("\"recorder\"", "\"log\"");
    Served::start_of(&program(), &config).await
}

#[tokio::test]
async fn a_large_listing_delays_no_small_read() {
    let (server, proxy) = behind_proxy().await;
    let queue = queue(&overflowing(&server, &server.url()), "test").await;
    fill(&queue).await;
    let process = before_filled(&server, &proxy.url()).await;
    let client = Client::new(&process.http());
    let small = format!("/v1/pipelines/test/bots/{}", quiet());
    assert_eq!(client.get(&small).await.code, 200);

    // The page with the 2.5 MiB asks for whole letters.
    proxy.set(ProxyMode::RateEach(1 << 20));
    let letters = &queue.keys(queue.shard_of(&bot("large"))).dlq;
    let page = proxy.intercept(
        holds(["EVALSHA", letters.as_str(), "\r\n-1\r\n"]),
        1,
        Interception::HoldReply,
    );
    let mut listing = JoinSet::new();
    let lister = client.clone();
    listing.spawn(async move { lister.get("/v1/pipelines/test/dead?limit=100").await });
    assert!(page.catches(LONG).await, "the listing is under way");

    // At this point no byte of the page has arrived, and the small answer comes.
    let answer = client.get(&small).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    page.release();
    // The small answer is not delayed while the page arrives either, which takes two seconds or
    // more.
    let answer = client.get(&small).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    assert!(listing.try_join_next().is_none(), "the listing goes on");
    let read = listing.join_next().await.unwrap().unwrap();
    assert_eq!(read.code, 200);
    assert_eq!(read.json()["dead_letters"].as_array().unwrap().len(), LETTERS);
    assert!(read.body.len() > LETTERS * LETTER_BYTES, "{}", read.body.len());
}

#[tokio::test]
async fn more_than_its_connections_wait_and_none_is_lost() {
    let (server, proxy) = behind_proxy().await;
    let link = pooled(&proxy.url());
    proxy.set(ProxyMode::Delay(Duration::from_millis(20)));
    let calls = 5 * usize::try_from(POOLED_MAX).unwrap();
    let mut running = JoinSet::new();
    for _ in 0..calls {
        let link = Arc::clone(&link);
        running.spawn(async move { link.run(&command(&["INCR", "calls"])).await });
    }
    let mut most = 0;
    while let Some(done) = running.join_next().await {
        assert!(matches!(&done.unwrap().unwrap()[..], [redis::Value::Int(_)]));
        most = most.max(connections(&server).await.len());
    }
    assert!(most > 1 && most <= usize::try_from(POOLED_MAX).unwrap(), "{most} connections");
    let counted = link.run(&command(&["GET", "calls"])).await.unwrap();
    assert_eq!(counted, [redis::Value::BulkString(calls.to_string().into_bytes())]);
}

#[tokio::test]
async fn one_that_gets_no_connection_did_not_run() {
    let (server, proxy) = behind_proxy().await;
    let target = Target::new(&proxy.url()).unwrap();
    let link = Arc::new(Link::pooled(target, Vec::new(), SLICE_US, Duration::from_secs(3)));
    let held = proxy.intercept(holds(["INCR", "caught-call"]), 1, Interception::HoldReply);
    let mut running = JoinSet::new();
    let call = |key: &'static str| {
        let link = Arc::clone(&link);
        async move { link.run(&command(&["INCR", key])).await }
    };
    running.spawn(call("caught-call"));
    assert!(held.catches(LONG).await);
    // Calls that wait forever take all other connections.
    proxy.set(ProxyMode::Hold);
    for _ in 0..2 * POOLED_MAX {
        running.spawn(call("others"));
    }
    let (mut refused, mut unknown) = (0, 0);
    while let Some(done) = running.join_next().await {
        match done.unwrap() {
            Err(RedisError::Connect { .. }) => refused += 1,
            Err(RedisError::Unknown { .. }) => unknown += 1,
            other => panic!("nothing is answered: {other:?}"),
        }
    }
    assert_eq!(unknown, 1, "what was sent may have run");
    assert_eq!(refused, 2 * POOLED_MAX);
    let mut direct = server.connection().await;
    let others: Option<u64> =
        redis::cmd("GET").arg("others").query_async(&mut direct).await.unwrap();
    assert_eq!(others, None, "what got no connection was not sent");
}

#[tokio::test]
async fn a_due_event_does_not_wait_for_reads_of_tenants() {
    let (server, proxy) = behind_proxy().await;
    let (log, url) = (Log::default(), format!("{:?}", proxy.url()));
    let config = config(&server, "test", &[("redis.url", &*url)]);
    let instance = Instance::start(&config, log.content()).await;
    let client = instance.client();
    let queue = instance.queue("test");
    // On a busy machine, the reads may end first.
    for _ in 0..ROUNDS {
        let before = log.len();
        // Reads take all connections of their pool. They end after 5 s.
        let held: Vec<_> = (1..=POOLED_MAX)
            .map(|nth| proxy.intercept(holds(["XREVRANGE"]), nth, Interception::HoldReply))
            .collect();
        let reads = held.iter().map(|_| client.get("/v1/pipelines/test/bots/b/attempts"));
        let handled = async {
            eventually(LONG, "all are held", async || held.iter().all(Interceptor::has_caught))
                .await;
            let (bot, due) = (bot("b"), SystemClock.now() + Duration::from_millis(200));
            let event = Event::builder("test", &bot).build().unwrap();
            let options = PushOptions { due: Some(due), ..PushOptions::default() };
            queue.push(&bot, &[event], options).await.unwrap();
            eventually(LONG, "the due event is handled", async || log.len() > before).await;
        };
        let is_first = tokio::select! {
            () = handled => true,
            _ = join_all(reads) => false,
        };
        drop(held);
        if is_first {
            instance.stop().await;
            return;
        }
        eventually(LONG, "nothing is left", async || {
            let view = queue.view(Duration::ZERO).await;
            view.is_ok_and(|view| view.depth == 0 && view.delayed == 0)
        })
        .await;
    }
    panic!("due events waited for reads");
}

#[tokio::test]
async fn a_call_that_is_given_up_leaves_its_answer_to_no_other() {
    let (_server, proxy) = behind_proxy().await;
    let link = pooled(&proxy.url());
    link.run(&command(&["SET", "a", "1"])).await.unwrap();
    let held = proxy.intercept(holds(["ECHO", "late"]), 1, Interception::HoldReply);
    let given_up = Arc::clone(&link);
    let mut calling = JoinSet::new();
    calling.spawn(async move { given_up.run(&command(&["ECHO", "late"])).await });
    assert!(held.catches(LONG).await);
    calling.abort_all();
    assert!(calling.join_next().await.unwrap().unwrap_err().is_cancelled());
    let answer = link.run(&command(&["GET", "a"])).await.unwrap();
    assert_eq!(answer, [redis::Value::BulkString(b"1".to_vec())]);
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_told_as_soon_as_it_is_known() {
    let (server, proxy) = behind_proxy().await;
    let link = pooled(&proxy.url());
    proxy.set(ProxyMode::Refuse);
    let watch = Stopwatch::start();
    let error = link.run(&command(&["GET", "a"])).await.unwrap_err();
    assert!(matches!(error, RedisError::Connect { .. }), "{error}");
    watch.within(TIMEOUT, "it is told");
    proxy.set(ProxyMode::Pass);
    link.run(&command(&["GET", "a"])).await.unwrap();
    drop(server);
}

/// Fills the pool of an instance with idle connections.
async fn rested(client: &Client, path: &str) {
    let mut reading = JoinSet::new();
    for _ in 0..2 * POOLED_MAX {
        let (client, path) = (client.clone(), path.to_owned());
        reading.spawn(async move { client.get(&path).await.code });
    }
    while let Some(code) = reading.join_next().await {
        assert_eq!(code.unwrap(), 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_rested_while_redis_restarted_fail_no_read() {
    let mut server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let (client, path) = (instance.client(), format!("/v1/pipelines/test/bots/{}", quiet()));
    for _ in 0..3 {
        rested(&client, &path).await;
        // A connection that was used just now is used again without a check.
        tokio::time::sleep(Duration::from_millis(20)).await;
        server.restart();
        for _ in 0..2 * POOLED_MAX {
            let answer = client.get(&path).await;
            assert_eq!(answer.code, 200, "{answer:?}");
        }
    }
    instance.stop().await;
}

#[tokio::test]
async fn scripts_that_redis_forgot_are_loaded_again_on_every_connection() {
    let server = RedisServer::start(Options::default());
    let name = PipelineName::parse("test").unwrap();
    let target = Target::new(&server.url()).unwrap();
    let shards = ShardCount::new(SHARDS).unwrap();
    let keys: Vec<_> =
        shards.shards().map(|shard| ShardKeys::new(target.prefix(), &name, shard)).collect();
    let link = Arc::new(Link::pooled(target, keys.clone(), SLICE_US, TIMEOUT));
    for _ in 0..3 {
        let mut running = JoinSet::new();
        for keys in keys.iter().cycle().take(5 * keys.len()) {
            let (link, keys) = (Arc::clone(&link), keys.clone());
            running.spawn(async move {
                link.call(&Pause { keys: &keys, bot: Some(&bot("b")), note: "", replaces: false })
                    .await
            });
        }
        while let Some(paused) = running.join_next().await {
            paused.unwrap().unwrap();
        }
        let mut connection = server.connection().await;
        let () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut connection).await.unwrap();
    }
}

/// How long `times` looks at a bot take: the median, the 99th percentile and the maximum.
async fn looks(client: &Client, times: usize) -> [Duration; 3] {
    let path = format!("/v1/pipelines/test/bots/{}", quiet());
    let mut took = Vec::with_capacity(times);
    for _ in 0..times {
        let begun = Instant::now();
        assert_eq!(client.get(&path).await.code, 200);
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    [took[times / 2], took[times * 99 / 100], took[times - 1]]
}

/// Prints how long a look at a bot takes, alone and beside clients that list 4 MiB of dead letters
/// in a loop. It measures with Redis on the same machine, and behind a line that carries 32 MiB a
/// second for each connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn p99_of_a_look_at_a_bot_beside_large_listings() {
    println!("{}", program());
    let (server, proxy) = behind_proxy().await;
    fill(&queue(&overflowing(&server, &server.url()), "test").await).await;
    let places: [(_, _, _, &[usize]); 2] =
        [("here", server.url(), 1_000, &[0, 1, 4]), ("line", proxy.url(), 200, &[0, 1])];
    for (place, url, times, crowds) in places {
        let process = before_filled(&server, &url).await;
        proxy.set(ProxyMode::RateEach(32 << 20));
        let client = Client::new(&process.http());
        looks(&client, times / 10).await;
        for listers in crowds {
            let mut listing = JoinSet::new();
            for _ in 0..*listers {
                let client = client.clone();
                listing.spawn(async move {
                    loop {
                        let answer = client.get("/v1/pipelines/test/dead?limit=100").await;
                        assert!(answer.body.len() > LETTERS * LETTER_BYTES, "{}", answer.code);
                    }
                });
            }
            let [p50, p99, max] = looks(&client, times).await;
            println!("{place}, {listers} listing: p50 {p50:?}, p99 {p99:?}, max {max:?}");
            assert!(listing.try_join_next().is_none(), "the listings go on");
        }
        proxy.set(ProxyMode::Pass);
    }
}
