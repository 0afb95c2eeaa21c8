//! Counts the instructions of the parts of the hot path, under callgrind, and compares them with
//! `instructions.txt`. `make instructions` builds and runs it.
//!
//! Unlike a time, a count does not depend on the load of the machine. It depends a little on the
//! compiler, hence the tolerance.

#![expect(dead_code, unreachable_pub, unused_imports, reason = "it uses parts of these modules")]

// The modules of the hot path, and not the crate: an optimised build of the crate takes minutes, and
// this one seconds.
#[path = "../../src/clock.rs"]
mod clock;
#[path = "../../src/event/mod.rs"]
mod event;
#[path = "../../src/expression/mod.rs"]
mod expression;
#[path = "../../src/id/mod.rs"]
mod id;
#[path = "../../src/ledger.rs"]
mod ledger;
#[path = "../../src/quotas.rs"]
mod quotas;
#[path = "../../src/rate/mod.rs"]
mod rate;
#[path = "../../src/pool/scale.rs"]
mod scale;
#[path = "../../tests/it/core/scripts/costs/table.rs"]
mod table;

#[path = "../../src/redis"]
mod redis {
    pub mod aside;
    pub mod keys;
    pub mod reply;
    pub mod scripts;
    mod slot;

    /// Loads the scripts.
    pub(crate) fn load(connection: &mut redis::Connection) -> redis::RedisResult<()> {
        scripts::all().try_for_each(|script| {
            redis::cmd("SCRIPT").arg("LOAD").arg(&script.code).exec(connection)
        })
    }
}

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ::redis::{Connection, Value};
use tempfile::TempDir;

use self::event::Event;
use self::expression::{Facts, Filter, Glob, Sees};
use self::id::{BotId, Offset, PipelineName, Prefix, ShardCount};
use self::quotas::{NO_QUOTAS, Quota};
use self::redis::keys::ShardKeys;
use self::redis::scripts::{
    Call, Claim, Complete, Completion, Enqueue, Grant, Limits, Mode, Recover, Span, Take,
};
use self::scale::{Load, wanted};
use self::table::{Row, Table, Tolerance};

/// Runs with one compiler hardly differ. Rust 1.95 and 1.97 differ by up to 2.5 %.
const TOLERANCE: Tolerance = Tolerance { percent: 5, count: 100 };
const REMEDY: &str = "If the change is intended, write the new references with `make instructions ARGS=--renew`. \
                      Otherwise undo what added to it.";
/// Number of calls in one count.
const TIMES: u64 = 100;
/// The bots of a batch, and the events of each.
const BOTS: usize = 10;
const EVENTS: usize = 10;
const SLICE_US: u64 = 10_000;

const JSON: &str = r#"{"specversion":"1.0","id":"0190-7f3a","source":"shop","type":"tag.applied","botid":"bot-4711","subject":"subscriber-7","data":{"tag":"vip","channel":"telegram","price":12.5,"note":"some text that fills"}}"#;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] => compare(false),
        ["--renew"] => compare(true),
        ["under-callgrind", url] => run(url),
        _ => Err("usage: instructions [--renew]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs this program under callgrind, and compares its counts.
fn compare(renew: bool) -> Result<(), Box<dyn Error>> {
    let redis = Redis::start()?;
    let out = redis.directory.path().join("out");
    let program = std::env::current_exe()?;
    let output = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind", "--collect-atstart=no"])
        .args([format!("--toggle-collect=*{COUNTED}"), format!("--dump-after=*{COUNTED}")])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["under-callgrind", &redis.url()])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("valgrind does not start ({error}): run `make setup`"))?;
    if !output.status.success() {
        return Err("the program failed under callgrind".into());
    }
    let names = String::from_utf8(output.stdout)?;
    let mut rows = Vec::new();
    for (number, name) in (1..).zip(names.lines()) {
        // Callgrind numbers the files in the order of the calls.
        let text = std::fs::read_to_string(format!("{}.{number}", out.display()))
            .map_err(|_| format!("callgrind did not count {name}"))?;
        let count = text.lines().find_map(|line| line.strip_prefix("totals: "));
        let count: u64 = count.ok_or("callgrind wrote no total")?.parse()?;
        rows.push(Row::new(name, count / TIMES));
    }
    if rows.is_empty() || out.with_extension((rows.len() + 1).to_string()).exists() {
        return Err(format!("callgrind counted other calls than the {} parts", rows.len()).into());
    }
    let conditions = format!("an {} processor", std::env::consts::ARCH);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.txt");
    let judged = Table { conditions, rows }.judge(&path, TOLERANCE, renew);
    judged.map_err(|error| format!("{error}\n{REMEDY}").into())
}

/// A private server, which gives the replies to parse.
struct Redis {
    directory: TempDir,
    child: Child,
}

impl Redis {
    fn start() -> Result<Self, Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        let child = Command::new("redis-server")
            .current_dir(directory.path())
            .args(["--port", "0", "--save", "", "--unixsocket", "redis.sock"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("redis-server does not start ({error}): run `make setup`"))?;
        let redis = Self { directory, child };
        let client = ::redis::Client::open(redis.url())?;
        for _ in 0..1_000 {
            if client.get_connection().is_ok() {
                return Ok(redis);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err("redis-server does not answer".into())
    }

    fn url(&self) -> String {
        format!("redis+unix://{}", self.directory.path().join("redis.sock").display())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // There is no data to save.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The end of the full name of [`counted_by_callgrind`]. No other function has it.
const COUNTED: &str = "counted_by_callgrind";

/// Callgrind counts the instructions inside this function, and writes them when it returns.
#[inline(never)]
fn counted_by_callgrind(part: &mut dyn FnMut()) {
    for _ in 0..TIMES {
        part();
    }
}

/// Counts a part, and prints its name. The part returns whether it worked.
fn count(name: &str, mut part: impl FnMut() -> bool) {
    // The first call fills caches, and the allocator takes its pages.
    assert!(part(), "{name} failed");
    counted_by_callgrind(&mut || assert!(black_box(part())));
    println!("{name}");
}

/// Counts all parts. Under callgrind.
fn run(url: &str) -> Result<(), Box<dyn Error>> {
    events()?;
    matching()?;
    let mut connection = ::redis::Client::open(url)?.get_connection()?;
    redis::load(&mut connection)?;
    calls(&Replies::of(&mut connection)?)
}

fn events() -> Result<(), Box<dyn Error>> {
    let bot = BotId::parse("bot-4711")?;
    count("event: read JSON", || Event::from_json(black_box(JSON.as_bytes())).is_ok());
    let packed = rmp_serde::to_vec(&serde_json::from_str::<serde_json::Value>(JSON)?)?;
    count("event: read MessagePack", || Event::from_msgpack(black_box(&packed)).is_ok());
    let event = Event::from_json(JSON.as_bytes())?;
    count("event: encode", || !black_box(&event).encode().is_empty());
    let mut record = vec![0x93, 1, 0xcf, 0, 0, 0, 0, 0, 0, 0, 1];
    record.extend(event.encode());
    let slice = vec![record; EVENTS];
    let decodes = |record: &Vec<u8>| Event::decode(black_box(record), &bot).is_ok();
    count("slice: decode 10 events", || slice.iter().all(decodes));
    Ok(())
}

fn matching() -> Result<(), Box<dyn Error>> {
    let event = Event::from_json(JSON.as_bytes())?;
    let (prefix, inner) = (Glob::new("tag.*"), Glob::new("*.appl*d"));
    count("match: glob with a prefix", || prefix.matches(black_box("tag.applied")));
    count("match: glob with two stars", || inner.matches(black_box("tag.applied")));
    let filter =
        Filter::compile(r#"event.data.tag == "vip" && event.data.price > 10.0"#, Sees::Event)?;
    count("match: facts of an event", || Facts::of(black_box(&event)).is_ok());
    let facts = Facts::of(&event)?;
    count("match: filter", || matches!(filter.matches(black_box(&facts)), Ok(true)));
    let shards = ShardCount::new(16).ok_or("no shards")?;
    count("match: shard of a bot", || black_box(event.bot()).shard(shards).index() < 16);
    let load = Load { ready: 20, busy: 8, slice: Duration::from_millis(3), ..Load::default() };
    count("pool: wanted workers", || wanted(black_box(load)) > 0);
    Ok(())
}

/// Calls of one shard, and the replies of a real server.
struct Replies {
    keys: ShardKeys,
    enqueued: Value,
    claimed: Value,
    completed: Value,
    items: Vec<Completion>,
}

impl Replies {
    fn of(to: &mut Connection) -> Result<Self, Box<dyn Error>> {
        let shard = ShardCount::new(1).and_then(|one| one.shards().next()).ok_or("no shard")?;
        let keys = ShardKeys::new(&Prefix::default(), &PipelineName::parse("p")?, shard);
        reply(to, &Recover { keys: &keys, run: "a run id of a server", slice_us: SLICE_US })?;
        let event = Event::from_json(JSON.as_bytes())?.encode();
        let enqueued = reply(to, &enqueue(&keys, &event))?;
        let claimed = reply(to, &claim(&keys))?;
        let leases = Claim::reply(claimed.clone())?;
        let run = &leases.run;
        let item = |grant: &Grant| Completion {
            bot: grant.bot.clone(),
            run: Arc::clone(run),
            fence: grant.fence,
            before: 0,
            n: EVENTS,
            bytes: 2_000,
            mode: Mode::Release,
            cost: 1_000,
            exceptions: Vec::new(),
            leaving: None,
            aside: None,
        };
        let items: Vec<Completion> = leases.leases.iter().map(item).collect();
        if items.len() != BOTS {
            return Err(format!("the claim leased {} bots, not {BOTS}", items.len()).into());
        }
        let completed = reply(to, &complete(&keys, &items))?;
        Ok(Self { keys, enqueued, claimed, completed, items })
    }
}

fn reply<C: Call>(to: &mut Connection, call: &C) -> Result<Value, Box<dyn Error>> {
    Ok(call.command().query(to)?)
}

fn enqueue<'a>(keys: &'a ShardKeys, event: &'a [u8]) -> Enqueue<'a> {
    let quota = Quota::NONE;
    let limits = Limits {
        slice_us: SLICE_US,
        linger_ms: 0,
        max_queue: 0,
        overflow_dead: true,
        dead_max: 100,
        quota,
    };
    let bot = |n| BotId::parse(&format!("bot-{n}")).map(|bot| (bot, vec![event; EVENTS]));
    let bots = (0..BOTS).filter_map(|n| bot(n).ok()).collect();
    let (prev, last, quotas) = (Offset::default(), Offset { ms: 1, seq: 1 }, &NO_QUOTAS);
    let (postings, take) = (None, Take::default());
    Enqueue {
        keys,
        spans: vec![Span { log: "events", prev, last }],
        repeats: None,
        limits,
        quotas,
        bots,
        postings,
        take,
    }
}

fn claim(keys: &ShardKeys) -> Claim<'_> {
    Claim {
        keys,
        max: 64,
        bound: None,
        ttl_ms: 30_000,
        seen: 0,
        slice_us: SLICE_US,
        alone: false,
        isolate: 4,
    }
}

fn complete<'a>(keys: &'a ShardKeys, items: &'a [Completion]) -> Complete<'a> {
    Complete { keys, dead_max: 100, quotas: &NO_QUOTAS, ledger: false, items }
}

fn calls(replies: &Replies) -> Result<(), Box<dyn Error>> {
    let keys = &replies.keys;
    let event = Event::from_json(JSON.as_bytes())?.encode();
    let (enqueue, claim, complete) =
        (enqueue(keys, &event), claim(keys), complete(keys, &replies.items));
    let written = |command: ::redis::Cmd| !command.get_packed_command().is_empty();
    count("enqueue: command for 10 bots, 10 events each", || {
        written(black_box(&enqueue).command())
    });
    count("enqueue: reply", || Enqueue::reply(black_box(&replies.enqueued).clone()).is_ok());
    count("claim: command", || written(black_box(&claim).command()));
    let claimed = &replies.claimed;
    count("claim: reply with 10 bots", || Claim::reply(black_box(claimed).clone()).is_ok());
    count("complete: command for 10 bots", || written(black_box(&complete).command()));
    let completed = &replies.completed;
    count("complete: reply for 10 bots", || Complete::reply(black_box(completed).clone()).is_ok());
    Ok(())
}
