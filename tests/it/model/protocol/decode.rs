//! Reads every key of the shard back into the terms of the model. It panics on content that differs
//! from the key table.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fairlane::id::{BotId, Lane, Offset};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::EventName;
use redis::{FromRedisValue, Pipeline, Value};

use super::operation::{BOTS, KEYS, STREAMS};
use super::real::REFUSED;
use crate::model::state_machine::{
    Attempts, Bot, Event, Key, LANES, Lease, Letter, Name, Noted, Reason, Server, size,
};
use crate::support::script_harness::{EXPIRIES, FEW, OWN_KEYS};

/// Ids that would do harm as a pattern, as a hash tag or joined with a separator. They are in the
/// order in which Redis sorts them.
pub(super) const NAMES: [&str; BOTS as usize] = ["*", "12:34", "{a} b", "|1|2|3|4"];
pub(super) const STREAM_NAMES: [&str; STREAMS as usize] = ["events", "{more}:*"];

pub(super) struct Decoded {
    pub(super) server: Server,
    pub(super) letters: Vec<Offset>,
}

/// The commands that read all data of the shard.
pub(super) fn look(keys: &ShardKeys, bots: &[BotId]) -> Pipeline {
    let mut pipe = redis::pipe();
    pipe.keys("*").hgetall(keys.meta());
    pipe.zrange_withscores(keys.ready(), 0, -1).zrange_withscores(keys.busy(), 0, -1);
    pipe.hgetall(keys.owners()).hgetall(keys.attempts()).zrange_withscores(keys.finishes(), 0, -1);
    pipe.smembers(keys.paused()).hgetall(&keys.weight).hgetall(&keys.offsets);
    pipe.zrange_withscores(&keys.due, 0, -1).hgetall(&keys.later);
    pipe.cmd("XRANGE").arg(&keys.dlq).arg("-").arg("+").hgetall(keys.held());
    for bot in bots {
        pipe.lrange(keys.queue(bot), 0, -1);
        for lane in lanes() {
            pipe.lrange(keys.lane(lane, bot), 0, -1);
        }
    }
    for key in 0..KEYS {
        pipe.get(keys.idempotency(&key_name(key)));
    }
    pipe.hgetall(EXPIRIES).hgetall(&keys.names_now).hgetall(&keys.names_before);
    pipe
}

pub(super) fn decode(keys: &ShardKeys, values: Vec<Value>) -> Decoded {
    let mut values = values.into_iter();
    check_keys(keys, read(&mut values));
    let mut server = Server::default();
    let mut bots_with_lanes = 0;
    for (field, value) in read::<BTreeMap<String, String>>(&mut values) {
        match &*field {
            "v" => server.v = number(&value),
            "f" => server.f = number(&value),
            "seq" => server.seq = number(&value),
            "depth" => server.depth = number(&value),
            "open" => server.open = number(&value),
            "told" => server.told = number(&value),
            "run" => server.run = run(&value),
            "lanes" => bots_with_lanes = number(&value),
            "paused" => server.shard_paused = value == "1",
            _ => panic!("meta has a field {field:?}"),
        }
    }
    server.ctl = scores(&mut values);
    server.busy = scores(&mut values);
    server.own = by_bot(&mut values, |value| {
        let [fence, acked, start, confirmed] = parts(value);
        let acked = u32::try_from(acked).unwrap();
        let start = i64::try_from(start).unwrap();
        assert!(confirmed <= 2, "{value:?}");
        Lease { fence, acked, start, confirmed: confirmed > 0, handed: confirmed == 2 }
    });
    for (bot, text) in by_bot(&mut values, str::to_owned) {
        let fields: Vec<&str> = text.splitn(5, '|').collect();
        let counts = fields[..4].join("|");
        let [suspect, lost, failed, isolate] = parts(&counts).map(|n| u32::try_from(n).unwrap());
        let attempts = Attempts { suspect, lost, failed, isolate };
        if let Some(lanes) = fields.get(4) {
            set_aside(&mut server, bot, lanes);
        }
        if attempts != Attempts::default() || fields.len() == 4 {
            server.att.insert(bot, attempts);
        }
    }
    assert_eq!(bots_with_lanes, server.aside.len(), "bots with lanes are counted");
    server.fin = scores(&mut values);
    server.paused = read::<Vec<String>>(&mut values).iter().map(|name| bot(name)).collect();
    server.weight = by_bot(&mut values, number);
    server.offsets = read::<BTreeMap<String, String>>(&mut values)
        .into_iter()
        .map(|(stream, at)| {
            let stream = STREAM_NAMES.iter().position(|name| *name == stream).unwrap();
            let at = (0..10_000).find(|&n| offset(n).to_string() == at).unwrap();
            (u8::try_from(stream).unwrap(), at)
        })
        .collect();
    let due: Vec<(String, String)> = read(&mut values);
    let mut later: BTreeMap<String, Vec<u8>> = read(&mut values);
    for (id, due_ms) in due {
        let stored = later.remove(&id).expect("what is due is stored");
        let (bot, event) = delayed(&stored);
        server.later.insert(number(&id), (number(&due_ms), bot, event));
    }
    assert!(later.is_empty(), "what is stored is due: {later:?}");
    let (letters, dead) = read::<Vec<(String, Vec<(String, Vec<u8>)>)>>(&mut values)
        .into_iter()
        .map(|(id, fields)| (id.parse::<Offset>().unwrap(), letter(fields)))
        .unzip();
    server.dead = dead;
    let held: BTreeMap<String, u64> = read(&mut values);
    for bot in 0..BOTS {
        let records: Vec<Vec<u8>> = read(&mut values);
        let queue: VecDeque<(u64, Event)> = records.iter().map(|bytes| record(bytes)).collect();
        if !queue.is_empty() {
            server.queues.insert(bot, queue);
        }
        for lane in 0..LANES {
            let records: Vec<Vec<u8>> = read(&mut values);
            if !records.is_empty() {
                let list = records.iter().map(|bytes| record(bytes)).collect();
                server.lists.insert((bot, lane), list);
            }
        }
    }
    for key in 0..KEYS {
        if let Some(sequence) = read::<Option<String>>(&mut values) {
            server.keys.insert(key, number(&sequence));
        }
    }
    let mut expiries: BTreeMap<String, i64> = read(&mut values);
    server.names.now = noted(read(&mut values), expiries.remove(&keys.names_now));
    server.names.before = noted(read(&mut values), expiries.remove(&keys.names_before));
    assert_eq!(expiries, BTreeMap::new(), "only names have a lifetime");
    let truth = server.holdings().into_iter();
    let truth = truth.map(|((kind, bot), n)| (format!("{kind}{}", NAMES[usize::from(bot)]), n));
    let mut truth: BTreeMap<String, u64> = truth.collect();
    for (bot, queue) in &server.queues {
        let field = format!("q{}", NAMES[usize::from(*bot)]);
        let few = queue.len() < FEW && !server.aside.contains_key(bot);
        if few && !held.contains_key(&field) {
            truth.remove(&field);
        }
    }
    assert_eq!(held, truth, "what bots hold is counted");
    Decoded { server, letters }
}

/// Checks that no script writes other keys than those that are read here.
fn check_keys(keys: &ShardKeys, found: Vec<String>) {
    let known: BTreeSet<String> =
        ["meta", "ctl", "busy", "own", "att", "fin", "paused", "weight", "held"]
            .into_iter()
            .chain(["hwm", "due", "later", "dlq", "names-now", "names-before"])
            .map(str::to_owned)
            .chain(NAMES.map(|name| format!("q:{name}")))
            .chain(
                NAMES.iter().flat_map(|name| lanes().map(move |lane| format!("a:{lane}:{name}"))),
            )
            .chain((0..KEYS).map(|key| format!("idem:{}", key_name(key))))
            .map(|name| format!("{}{name}", keys.prefix()))
            .collect();
    for key in found {
        assert!(known.contains(&key) || OWN_KEYS.contains(&&*key), "a key {key:?} was written");
    }
}

fn lanes() -> impl Iterator<Item = Lane> {
    Lane::all().take(usize::from(LANES))
}

/// Reads the lanes of a bot that are set aside, as `real` wrote them, and whether its queue goes first.
fn set_aside(server: &mut Server, bot: Bot, text: &str) {
    let rest = text.strip_prefix("7;").unwrap_or_else(|| panic!("{text:?} are no lanes"));
    let (tried, rest) = rest.split_once(';').unwrap();
    assert!(["", "q"].contains(&tried), "{text:?}");
    let lane = |text: &str| {
        let [lane, due_ms, 1, 2] = numbers(text, ':') else { panic!("{text:?} is no lane") };
        (u8::try_from(lane).unwrap(), i64::try_from(due_ms).unwrap())
    };
    server.aside.insert(bot, rest.split(',').map(lane).collect());
    if tried == "q" {
        server.redriven.insert(bot);
    }
}

fn read<T: FromRedisValue>(values: &mut impl Iterator<Item = Value>) -> T {
    T::from_redis_value(values.next().expect("one value a command")).unwrap()
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text:?} has lost digits or is no number"))
}

fn scores(values: &mut impl Iterator<Item = Value>) -> BTreeMap<Bot, i64> {
    let scores: Vec<(String, String)> = read(values);
    scores.into_iter().map(|(name, score)| (bot(&name), number(&score))).collect()
}

fn by_bot<T>(
    values: &mut impl Iterator<Item = Value>,
    parse: impl Fn(&str) -> T,
) -> BTreeMap<Bot, T> {
    let fields: BTreeMap<String, String> = read(values);
    fields.into_iter().map(|(name, value)| (bot(&name), parse(&value))).collect()
}

fn parts(text: &str) -> [u64; 4] {
    numbers(text, '|')
}

fn numbers(text: &str, between: char) -> [u64; 4] {
    let parts: Vec<u64> = text.split(between).map(number).collect();
    parts.try_into().unwrap_or_else(|_| panic!("{text:?} has not four parts"))
}

pub(super) fn bot(name: &str) -> Bot {
    let at = NAMES.iter().position(|known| *known == name);
    u8::try_from(at.unwrap_or_else(|| panic!("a bot {name:?}"))).unwrap()
}

/// These offsets sort wrongly as texts, as floats, or by the first part alone.
pub(super) fn offset(number: u64) -> Offset {
    match number {
        0 => Offset::default(),
        n => Offset { ms: 8 + n / 3, seq: u64::MAX - [12, 9, 3][(n % 3) as usize] },
    }
}

pub(super) fn key_name(key: Key) -> String {
    format!("key {key}")
}

/// Run ids differ in their first eight characters.
pub(super) fn run_id(run: u32) -> String {
    format!("{run:08x}{:0>32}", "")
}

pub(super) fn run(id: &str) -> Option<u32> {
    (!id.is_empty()).then(|| u32::from_str_radix(&id[..8], 16).unwrap())
}

/// An event as `MessagePack`: a 16-bit number, then zeros up to its size.
pub(super) fn encode(event: Event) -> Vec<u8> {
    let [high, low] = event.to_be_bytes();
    let mut bytes = vec![0xcd, high, low];
    bytes.resize(usize::try_from(size(event)).unwrap(), 0);
    bytes
}

fn event(bytes: &[u8]) -> Event {
    let &[0xcd, high, low, ..] = bytes else { panic!("{bytes:?} is no event") };
    let event = Event::from_be_bytes([high, low]);
    assert_eq!(bytes, encode(event));
    event
}

/// Names differ in their first byte alone, or in their last.
pub(super) fn name(name: Name) -> EventName {
    let [high, low] = name.to_be_bytes();
    let mut bytes = *b"\0\r\n*|{a} b|12:34";
    (bytes[0], bytes[15]) = (high, low);
    bytes
}

fn noted(fields: BTreeMap<Vec<u8>, String>, until_ms: Option<i64>) -> Option<Noted> {
    if fields.is_empty() {
        assert_eq!(until_ms, None, "no names, no lifetime");
        return None;
    }
    let read = |(field, value): (Vec<u8>, String)| {
        assert_eq!(value, "");
        let number = Name::from_be_bytes([field[0], field[15]]);
        assert_eq!(field, name(number));
        number
    };
    let names = fields.into_iter().map(read).collect();
    Some(Noted { names, until_ms: until_ms.expect("names have a lifetime") })
}

fn record(bytes: &[u8]) -> (u64, Event) {
    let (head, rest) = bytes.split_at(3);
    assert_eq!(head, [0x93, 1, 0xcf], "a record of version 1");
    let (sequence, rest) = rest.split_at(8);
    (u64::from_be_bytes(sequence.try_into().unwrap()), event(rest))
}

fn delayed(stored: &[u8]) -> (Bot, Event) {
    let colon = stored.iter().position(|&byte| byte == b':').unwrap();
    let length: usize = number(std::str::from_utf8(&stored[..colon]).unwrap());
    let (name, bytes) = stored[colon + 1..].split_at(length);
    (bot(std::str::from_utf8(name).unwrap()), event(bytes))
}

fn letter(fields: Vec<(String, Vec<u8>)>) -> Letter {
    let mut fields: BTreeMap<String, Vec<u8>> = fields.into_iter().collect();
    let mut field = |name: &str| fields.remove(name).unwrap();
    let mut text = |name: &str| String::from_utf8(field(name)).unwrap();
    let reason = text("reason");
    let full = reason.strip_prefix("the queue of the bot is full (max_queue = ");
    let quota = reason.strip_prefix("the quota of the bot is full (quotas.queued_bytes, now ");
    let in_brackets = |rest: Option<&str>| rest.and_then(|rest| rest.strip_suffix(')')).map(number);
    let reason = match (in_brackets(full), in_brackets(quota)) {
        (Some(max), _) => Reason::Full(usize::try_from(max).unwrap()),
        (_, Some(limit)) => Reason::Quota(limit),
        _ if reason == REFUSED => Reason::Refused,
        _ => panic!("an unknown reason {reason:?}"),
    };
    let (bot, attempts) = (bot(&text("bot")), number(&text("attempts")));
    let time_ms = number(&text("time"));
    let (sequence, event) = record(&field("record"));
    Letter { bot, sequence, event, reason, attempts, time_ms }
}
