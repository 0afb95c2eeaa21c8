//! `fairlane tail`, as an operator runs it beside Fairlane.

use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use crate::support::bus::{add, event};
use crate::support::cli::run_in;
use crate::support::config::{STREAM, config};
use crate::support::process::signal;
use crate::support::push::{LONG, Push};
use crate::support::receiver::{Call, Reply};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::{PROGRAM, Served};
use crate::support::terminal::Terminal;
use crate::support::wait::{eventually, holds_within};

/// The lines of an output so far.
type Lines = Arc<Mutex<Vec<String>>>;

/// Kills the process when it is dropped.
struct Tail {
    child: Child,
    out: Lines,
    err: Lines,
    _directory: tempfile::TempDir,
}

fn lines_of(from: impl Read + Send + 'static) -> Lines {
    let lines = Lines::default();
    let read = Arc::clone(&lines);
    // The thread ends with the process.
    std::thread::spawn(move || {
        let from = BufReader::new(from).lines();
        from.map_while(Result::ok).for_each(|line| read.lock().unwrap().push(line));
    });
    lines
}

fn spawn(directory: &Path, config: &str, arguments: &[&str]) -> Child {
    std::fs::write(directory.join("fairlane.toml"), config).unwrap();
    Command::new(PROGRAM)
        .arg("tail")
        .args(arguments)
        .current_dir(directory)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

impl Tail {
    /// Starts, and returns once it follows.
    async fn start(config: &str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut child = spawn(directory.path(), config, arguments);
        let out = lines_of(child.stdout.take().unwrap());
        let err = lines_of(child.stderr.take().unwrap());
        let tail = Self { child, out, err, _directory: directory };
        tail.until_said("following ").await;
        tail
    }

    fn lines(&self) -> Vec<String> {
        self.out.lock().unwrap().clone()
    }

    /// The attempts so far, as pipeline, bot, result and first event.
    fn seen(&self) -> Vec<[String; 4]> {
        let of = |line: &String| {
            let line: Value = serde_json::from_str(line).unwrap();
            ["pipeline", "bot", "result", "first_id"]
                .map(|name| line[name].as_str().unwrap_or_else(|| panic!("{line}")).to_owned())
        };
        self.lines().iter().map(of).collect()
    }

    async fn until_seen(&self, what: [&str; 4]) {
        eventually(LONG, &format!("{what:?} is shown"), async || {
            self.seen().iter().any(|seen| *seen == what)
        })
        .await;
    }

    async fn until_said(&self, text: &str) {
        eventually(LONG, &format!("it says {text:?}"), async || {
            self.err.lock().unwrap().iter().any(|line| line.contains(text))
        })
        .await;
    }

    /// The exit code, after a signal or without one.
    fn end(mut self, with: Option<&str>) -> Option<i32> {
        if let Some(name) = with {
            signal(self.child.id(), name);
        }
        let mut status = None;
        holds_within(LONG, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.expect("it ends").code()
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn answer(call: Call) -> Reply {
    match call.text("bot").as_str() {
        "failing" => Reply::new(500, "oops"),
        _ => Reply::new(200, "fine"),
    }
}

const SLOWLY: (&str, &str) =
    ("pipelines.test.backoff", "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }");
/// A second pipeline, which handles everything.
const OTHER: [(&str, &str); 4] = [
    ("pipelines.other.handler_timeout", "\"5s\""),
    ("pipelines.other.handler", "\"log\""),
    ("pipelines.other.events", "[\"*\"]"),
    ("pipelines.other.start", "\"earliest\""),
];

#[tokio::test]
async fn outcomes_of_several_pipelines_are_shown_as_they_happen_and_only_those_that_are_wanted() {
    let push = Push::new(&[&[SLOWLY], &OTHER[..]].concat(), answer).await;
    let served = push.serve().await;
    push.publish("early", 0..1).await;
    let all = Tail::start(&push.config, &["--json"]).await;
    all.until_seen(["test", "early", "done", "0"]).await;
    all.until_seen(["other", "early", "done", "0"]).await;

    let failing = Tail::start(&push.config, &["--json", "--failing", "-n", "0"]).await;
    let one =
        Tail::start(&push.config, &["--json", "--bot", "good", "--pipeline", "test", "-n", "0"])
            .await;
    for id in 1..4 {
        push.publish("good", id..=id).await;
        all.until_seen(["test", "good", "done", &id.to_string()]).await;
    }
    push.publish("failing", 7..8).await;
    for tail in [&all, &failing] {
        tail.until_seen(["test", "failing", "failed", "7"]).await;
    }
    all.until_seen(["other", "failing", "done", "7"]).await;
    one.until_seen(["test", "good", "done", "3"]).await;
    push.publish("good", 4..5).await;
    one.until_seen(["test", "good", "done", "4"]).await;

    let shown = failing.seen();
    assert_eq!(shown.len(), 1, "{shown:?}");
    let shown = one.seen();
    assert!(shown.iter().all(|seen| seen[0] == "test" && seen[1] == "good"), "{shown:?}");
    let mut shown = all.seen();
    let count = shown.len();
    shown.sort();
    shown.dedup();
    assert_eq!(shown.len(), count, "an attempt is shown twice: {shown:?}");
    let failed: Vec<Value> =
        failing.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&failed[0]["status"], &failed[0]["answer"]), (&500.into(), &"oops".into()));
    assert_eq!((all.end(Some("INT")), failing.end(Some("TERM"))), (Some(0), Some(0)));
    drop(served);
}

#[tokio::test]
async fn each_failure_of_a_bot_is_shown_once_although_others_of_it_were_shown_before() {
    let push = Push::new(&[("pipelines.test.max_attempts", "1")], answer).await;
    let served = push.serve().await;
    let tail = Tail::start(&push.config, &["--json", "--failing", "-n", "0"]).await;
    for id in 0..3 {
        push.publish("failing", id..=id).await;
        tail.until_seen(["test", "failing", "dead", &id.to_string()]).await;
    }
    let expected = ["0", "1", "2"].map(|id| ["test", "failing", "dead", id]);
    assert_eq!(tail.seen(), expected);
    drop(served);
}

/// The first lines of the pipeline `test`.
async fn last_lines(config: &str, arguments: &[&str], count: usize) -> Vec<String> {
    let tail = Tail::start(config, &[&["--pipeline", "test"], arguments].concat()).await;
    eventually(LONG, "the last attempts are shown", async || tail.lines().len() >= count).await;
    tail.lines()
}

#[tokio::test]
async fn the_last_attempts_are_shown_first_and_lines_align_without_colours() {
    let push = Push::new(&[SLOWLY], answer).await;
    let served = push.serve().await;
    let before = Tail::start(&push.config, &["--json", "-n", "0"]).await;
    for (bot, id) in [("good", 0), ("failing", 1), ("good", 2)] {
        push.publish(bot, id..=id).await;
        let result = if bot == "good" { "done" } else { "failed" };
        before.until_seen(["test", bot, result, &id.to_string()]).await;
    }
    let text = last_lines(&push.config, &["-n", "2"], 3).await;
    assert!(text[0].starts_with("TIME (UTC)    RESULT "), "{text:?}");
    // The header is ASCII, but a duration may be in µs.
    let in_column = |line: usize, name: &str, content: &str| {
        let place = text[0].find(name).unwrap();
        let cell: String = text[line].chars().skip(place).collect();
        assert!(cell.starts_with(content), "{name}: {text:?}");
    };
    in_column(1, "RESULT", "failed 500 ");
    in_column(1, "BOT", "failing ");
    assert!(text[1].contains("oops (again in 1h)"), "{text:?}");
    in_column(2, "RESULT", "done 200 ");
    in_column(2, "FIRST EVENT", "2");
    assert!(!text.join("").contains('\u{1b}'), "{text:?}");
    let failing = last_lines(&push.config, &["--failing"], 2).await;
    assert!(failing[1].contains("failed 500"), "{failing:?}");
    let good = last_lines(&push.config, &["--bot", "good"], 3).await;
    assert!(good[1..].iter().all(|line| line.contains("good")), "{good:?}");
    drop(served);
}

#[tokio::test]
async fn the_last_attempts_have_failures_of_bots_that_failed_long_before_another_one() {
    // Both bots are in the same shard.
    let settings = [SLOWLY, ("redis.shards", "1")];
    let push = Push::new(&settings, |_| async { Reply::new(500, "oops") }).await;
    let served = push.serve().await;
    let before = Tail::start(&push.config, &["--json", "-n", "0"]).await;
    push.publish("early", 0..1).await;
    before.until_seen(["test", "early", "failed", "0"]).await;
    // As if it had failed ten seconds earlier.
    push.server.ask(&["ZINCRBY", "fl:{test:0}:history-bots", "-10000", "early"]).await;
    push.publish("late", 1..2).await;
    before.until_seen(["test", "late", "failed", "1"]).await;
    let tail = Tail::start(&push.config, &["--json", "--failing", "-n", "2"]).await;
    let [early, late] = [["test", "early", "failed", "0"], ["test", "late", "failed", "1"]];
    tail.until_seen(late).await;
    assert_eq!(tail.seen(), [early, late]);
    drop(served);
}

#[tokio::test]
async fn on_a_terminal_results_are_coloured_and_lines_fit_unless_no_color_is_set() {
    let push = Push::new(&[SLOWLY], answer).await;
    let served = push.serve().await;
    push.publish("failing", 0..1).await;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("fairlane.toml"), &push.config).unwrap();
    // Ctrl-C must not end the shell too.
    let script = format!("trap : INT; {PROGRAM} tail; echo exit $?");
    for (env, coloured) in [(&[][..], true), (&[("NO_COLOR", "1")][..], false)] {
        let terminal = Terminal::run(directory.path(), &script, env);
        terminal.until("failed 500").await;
        assert_eq!(terminal.has_colours(), coloured, "{}", terminal.text());
        let shown = terminal.text();
        let lines: Vec<&str> = shown.lines().collect();
        let line = lines.iter().position(|line| line.contains("failed 500")).unwrap();
        assert!(lines[line - 1].starts_with("TIME (UTC)"), "{shown}");
        assert_eq!(lines[line + 1..].join("").trim(), "", "a line is broken: {shown}");
        // Ctrl-C
        terminal.keys("\u{3}");
        terminal.until("exit 0").await;
    }
    drop(served);
}

#[tokio::test]
async fn it_waits_for_a_redis_that_restarts_and_shows_what_ends_afterwards() {
    let redis =
        RedisServer::start(Options { persistence: Persistence::Always, ..Options::default() });
    let mut push = Push::on(redis, &[], answer).await;
    let served = push.serve().await;
    let tail = Tail::start(&push.config, &["--json"]).await;
    push.publish("good", 0..1).await;
    tail.until_seen(["test", "good", "done", "0"]).await;
    push.server.kill9();
    tail.until_said("waiting until Redis answers").await;
    push.server.restart();
    tail.until_said("Redis answers again, after ").await;
    push.publish("good", 1..2).await;
    tail.until_seen(["test", "good", "done", "1"]).await;
    let shown = tail.seen();
    assert_eq!(shown.iter().filter(|seen| seen[3] == "0").count(), 1, "{shown:?}");
    assert_eq!(tail.end(Some("INT")), Some(0));
    drop(served);
}

#[tokio::test]
async fn it_says_so_when_attempts_are_gone_before_it_could_show_them() {
    let redis = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.test.handler", "\"log\""),
        ("pipelines.test.history", "{ max_bytes = 1048576 }"),
    ];
    let config = config(&redis, "test", &settings);
    let served = Served::start(&config).await;
    publish_for_bots(&redis, 0..1).await;
    let tail = Tail::start(&config, &["--json", "-n", "0"]).await;
    let other = Tail::start(&config, &["--json", "-n", "0"]).await;
    publish_for_bots(&redis, 1..2).await;
    tail.until_seen(["test", "bot-1", "done", "1"]).await;
    signal(tail.child.id(), "STOP");
    // More than a shard keeps, of as many bots, so that no two attempts share a note.
    publish_for_bots(&redis, 2..8_000).await;
    other.until_seen(["test", "bot-7999", "done", "7999"]).await;
    signal(tail.child.id(), "CONT");
    tail.until_said("some attempts may be missing").await;
    tail.until_seen(["test", "bot-7999", "done", "7999"]).await;
    drop(served);
}

/// Publishes an event for each of these bots.
async fn publish_for_bots(server: &RedisServer, ids: std::ops::Range<u32>) {
    let events: Vec<_> = ids.map(|id| event(&format!("bot-{id}"), "test.event", id)).collect();
    add(server, STREAM, &events).await;
}

#[tokio::test]
async fn it_ends_quietly_when_nothing_reads_its_output_any_more() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let mut child = spawn(directory.path(), &config(&server, "test", &[]), &[]);
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut first = String::new();
    said.read_line(&mut first).unwrap();
    assert!(first.starts_with("following attempts in test"), "{first}");
    drop(child.stdout.take());
    let mut status = None;
    holds_within(Duration::from_secs(10), || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    if status.is_none() {
        child.kill().unwrap();
    }
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!((status.and_then(|status| status.code()), rest.as_str()), (Some(0), ""));
}

#[test]
fn a_pipeline_that_keeps_no_attempts_is_named_instead_of_silence() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let slices = [("pipelines.test.history", "{ slices = 0 }")];
    std::fs::write(directory.path().join("fairlane.toml"), config(&server, "test", &slices))
        .unwrap();
    let ran = run_in(directory.path(), &["tail"], "");
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("pipeline test keeps no attempts (history.slices = 0)"), "{ran:?}");
    assert!(ran.err.contains("set history.slices above 0"), "{ran:?}");
    let ran = run_in(directory.path(), &["tail", "--pipeline", "nosuch"], "");
    assert!(ran.code == 64 && ran.err.contains("there is no pipeline"), "{ran:?}");
}
