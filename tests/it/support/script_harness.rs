//! The real scripts on a clock that the test sets. They read `TIME` from a key, and a list keeps
//! their publications. Everything else of the scripts and their calls is the product's.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use fairlane::redis::scripts::Call;
use redis::{Arg, Cmd, Connection, FromRedisValue, Pipeline, Value};

use super::process::variable;
use super::redis::RedisServer;

/// How scripts ask for the time.
const TIME: &str = "call('TIME')";
/// Seconds and microseconds, as `TIME` returns them.
const CLOCK: &str = "test:clock";
const PUBLISHED: &str = "test:published";
/// A hash: the times in ms at which keys expire, of those that scripts give a lifetime.
pub(crate) const EXPIRIES: &str = "test:expiries";
/// The scripts of the tests count the bytes of a queue with this number of events.
pub(crate) const FEW: usize = 3;

/// The variable that names a directory of scripts that run instead of those of the product.
pub(crate) const CHANGED: &str = "FAIRLANE_CHANGED_SCRIPTS";

/// Keys of the test itself.
pub(crate) const OWN_KEYS: [&str; 3] = [CLOCK, PUBLISHED, EXPIRIES];

/// Precedes `repeats.lua`: keys that get a lifetime there expire by the clock of the test.
const LIFETIMES: &str = "
local server = redis
local redis = {call = function(command, key, other, ...)
  if command == 'PTTL' then
    local at = server.call('HGET', EXPIRIES, key)
    return at and at - now_ms() or server.call('EXISTS', key) - 2
  elseif command == 'PEXPIRE' then
    return server.call('HSET', EXPIRIES, key, now_ms() + other)
  elseif command == 'RENAME' then
    server.call('HDEL', EXPIRIES, other)
    local at = server.call('HGET', EXPIRIES, key)
    if at then
      server.call('HSET', EXPIRIES, other, at)
      server.call('HDEL', EXPIRIES, key)
    end
  end
  if other then
    return server.call(command, key, other, ...)
  end
  return server.call(command, key)
end}
";

/// Removes what has expired at the time in its argument, as Redis does.
const EXPIRE: &str = "#!lua
local expiries = redis.call('HGETALL', KEYS[1])
for i = 1, #expiries, 2 do
  if tonumber(ARGV[1]) > tonumber(expiries[i + 1]) then
    redis.call('DEL', expiries[i])
    redis.call('HDEL', KEYS[1], expiries[i])
  end
end
";

/// All data of a server at one time.
pub(crate) struct Snapshot(Vec<(String, Vec<u8>)>);

/// The code of a script by its name.
macro_rules! source {
    ($name:literal) => {
        changed($name)
            .unwrap_or_else(|| include_str!(concat!("../../../lua/", $name, ".lua")).to_owned())
    };
}

macro_rules! sources {
    ($($name:literal),+) => {
        [$(($name, source!($name))),+]
    };
}

/// A connection on which scripts run at the times that the test sets.
pub(crate) struct ScriptHarness {
    connection: Connection,
    hashes: BTreeMap<&'static str, String>,
    expire: String,
}

impl ScriptHarness {
    pub(crate) fn new(server: &RedisServer) -> Self {
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        if variable(CHANGED).is_some() {
            // A changed script may not end.
            connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        let mut shared = source!("shared");
        for (real, ours) in [
            (TIME, time()),
            ("call('PUBLISH', WAKE, ", format!("call('RPUSH', '{PUBLISHED}', ")),
            // Short queues of a test are counted too.
            ("FEW, LARGE = 32,", format!("FEW, LARGE = {FEW},")),
        ] {
            assert_eq!(shared.matches(real).count(), 1, "shared.lua says {real} once");
            shared = shared.replace(real, &ours);
        }
        shared.push_str(&source!("ledger"));
        shared.push_str(&source!("notifications"));
        shared.push_str(&source!("offsets"));
        let lifetimes = LIFETIMES.replace("EXPIRIES", &format!("'{EXPIRIES}'"));
        let repeats = format!("{lifetimes}{}", source!("repeats"));
        let sources = sources!(
            "enqueue",
            "push",
            "claim",
            "complete",
            "promote",
            "due",
            "pause",
            "resume",
            "purge",
            "redrive",
            "revoke",
            "recover",
            "drop_letters",
            "audit",
            "reconcile",
            "heads",
            "increment_if_exists",
            "upsert",
            "replace",
            "import",
            "recount",
            "schedule",
            "begin",
            "finish",
            "amend",
            "release",
            "restore",
            "forget",
            "slice",
            "replay",
            "permit",
            "set",
            "budget"
        );
        let mut hashes = BTreeMap::from(sources.map(|(name, file)| {
            assert!(
                !file.contains("'TIME'") && !file.contains("'PUBLISH'"),
                "{name}: TIME and PUBLISH belong in shared.lua"
            );
            let (first, body) = file.split_once('\n').unwrap();
            let repeats = if body.contains("repeated(") { repeats.as_str() } else { "" };
            (name, load(&mut connection, &format!("{first}\n{shared}\n{repeats}\n{body}")))
        }));
        hashes.extend(small_scripts().map(|(name, code)| (name, load(&mut connection, &code))));
        let expire = load(&mut connection, EXPIRE);
        Self { connection, hashes, expire }
    }

    /// A call of the script with this name.
    pub(crate) fn raw(&self, name: &str, keys: &[&str], arguments: &[&str]) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hashes[name]).arg(keys.len()).arg(keys).arg(arguments);
        command
    }

    /// The call as the product would send it, except for the hash of the script.
    pub(crate) fn command<C: Call>(&self, call: &C) -> Cmd {
        let command = call.command();
        let mut ours = Cmd::new();
        for (at, argument) in command.args_iter().enumerate() {
            match argument {
                Arg::Simple(_) if at == 1 => ours.arg(&self.hashes[C::NAME]),
                Arg::Simple(argument) => ours.arg(argument),
                _ => unreachable!("no script has a cursor"),
            };
        }
        ours
    }

    /// Runs one command at this time, and then the commands of `look`, all in one write. Returns
    /// the reply, the publications, and the replies of `look`.
    pub(crate) fn run(
        &mut self,
        now_us: i64,
        command: Cmd,
        look: &Pipeline,
    ) -> Result<(Value, Vec<String>, Vec<Value>), redis::RedisError> {
        let mut pipe = redis::pipe();
        pipe.del(&[CLOCK, PUBLISHED]).ignore();
        pipe.rpush(CLOCK, &[now_us / 1_000_000, now_us % 1_000_000]).ignore();
        pipe.cmd("EVALSHA").arg(&self.expire).arg(1).arg(EXPIRIES).arg(now_us / 1_000).ignore();
        pipe.add_command(command);
        pipe.lrange(PUBLISHED, 0, -1);
        for command in look.cmd_iter() {
            pipe.add_command(command.clone());
        }
        let mut replies = pipe.query::<Vec<Value>>(&mut self.connection)?.into_iter();
        let reply = replies.next().expect("a reply for each command");
        let published = Vec::from_redis_value(replies.next().expect("a reply for each command"))?;
        Ok((reply, published, replies.collect()))
    }

    /// Runs one script at this time. Returns its reply and its publications.
    pub(crate) fn call<C: Call>(&mut self, now_us: i64, call: &C) -> (C::Reply, Vec<String>) {
        let command = self.command(call);
        let (reply, published, _) = self.run(now_us, command, &redis::pipe()).unwrap();
        (C::reply(reply).unwrap(), published)
    }

    /// All data of the server, without the lifetimes that Redis itself watches.
    pub(crate) fn save(&mut self) -> Snapshot {
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut self.connection).unwrap();
        let mut pipe = redis::pipe();
        for key in &keys {
            pipe.cmd("DUMP").arg(key);
        }
        let values: Vec<Vec<u8>> = pipe.query(&mut self.connection).unwrap();
        Snapshot(keys.into_iter().zip(values).collect())
    }

    /// Takes the server back, as a restart that lost the writes since then.
    pub(crate) fn restore(&mut self, snapshot: &Snapshot) {
        let mut pipe = redis::pipe();
        pipe.cmd("FLUSHALL").ignore();
        for (key, value) in &snapshot.0 {
            pipe.cmd("RESTORE").arg(key).arg(0).arg(value).ignore();
        }
        pipe.exec(&mut self.connection).unwrap();
    }

    /// The plain connection.
    pub(crate) fn plain(&mut self) -> &mut Connection {
        &mut self.connection
    }
}

/// What scripts call for the time in a test.
fn time() -> String {
    format!("call('LRANGE', '{CLOCK}', 0, -1)")
}

/// The scripts that work without the shared code of queues. Those that compare no offsets do not notice the
/// code for it.
fn small_scripts() -> [(&'static str, String); 13] {
    let offsets = source!("offsets");
    let sources = sources!(
        "act", "advance", "arrived", "beat", "check", "emit", "hold", "letters", "note", "peek",
        "present", "readers", "trim"
    );
    sources.map(|(name, file)| {
        let (first, body) = file.split_once('\n').unwrap();
        (name, format!("{first}\n{offsets}\n{body}").replace(TIME, &time()))
    })
}

fn changed(name: &str) -> Option<String> {
    let directory = variable(CHANGED)?;
    std::fs::read_to_string(Path::new(&directory).join(name).with_extension("lua")).ok()
}

fn load(connection: &mut Connection, code: &str) -> String {
    redis::cmd("SCRIPT").arg("LOAD").arg(code).query(connection).unwrap()
}
