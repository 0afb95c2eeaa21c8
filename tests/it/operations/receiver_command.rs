//! `fairlane receiver`, as a user runs it beside Fairlane.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use fairlane::notifications::record::{NewNotification, State};
use serde_json::Value;

use crate::support::http::Client;
use crate::support::notification_rig::{LONG, Rig, accept, bot, ends, kept, to};
use crate::support::process::signal;
use crate::support::push::{metric, pushing};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::{eventually, holds_within};

const SECRETS: &str = "[\"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"]";

/// Kills the process when it is dropped.
struct Running {
    child: Child,
    address: String,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Running {
    /// Starts on a free port, with or without secrets in the configuration.
    fn start(secrets: &str, arguments: &[&str]) -> Self {
        let (receiver, from) = Self::start_unread(secrets, arguments);
        let read = Arc::clone(&receiver.lines);
        // The thread ends with the process.
        std::thread::spawn(move || {
            from.map_while(Result::ok).for_each(|line| read.lock().unwrap().push(line));
        });
        receiver
    }

    /// The same, with its output behind the first line.
    fn start_unread(secrets: &str, arguments: &[&str]) -> (Self, Lines<BufReader<ChildStdout>>) {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("fairlane.toml");
        std::fs::write(&config, format!("callbacks.secrets = {secrets}\n")).unwrap();
        let mut child = Command::new(PROGRAM)
            .args(["receiver", "--listen", "127.0.0.1:0", "--config"])
            .arg(&config)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut from = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = from.next().expect("it says where it listens").unwrap();
        let address =
            first.split("http://").nth(1).unwrap().trim_end_matches(['"', '}']).to_owned();
        (Self { child, address, lines: Arc::default() }, from)
    }

    /// Waits until it ends by itself.
    fn ends(&mut self) -> ExitStatus {
        let mut ended = None;
        assert!(holds_within(LONG, || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        }));
        ended.unwrap()
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    fn told(&self) -> Vec<Value> {
        self.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn it_checks_signatures_and_its_recheck_targets_answer_as_their_names_say() {
    let rig = Rig::new(&[("callbacks.secrets", SECRETS)]);
    let instance = rig.start().await;
    let receiver = Running::start(SECRETS, &["--json", "--bot", "shop", "--headers"]);
    let recheck = |path: &str| NewNotification {
        recheck: receiver.url(&format!("/recheck/{path}")),
        ..to(receiver.url("/remind"))
    };
    let sent = accept(
        &instance,
        &NewNotification {
            body: "{\"a\":\"b\"}".to_owned(),
            method: "POST".to_owned(),
            ..recheck("ok")
        },
    )
    .await;
    ends(&instance, sent, State::Sent).await;
    let id = sent.message().as_str().to_owned();
    let told = receiver.told();
    let facts: Vec<_> = told
        .iter()
        .map(|one| {
            ["method", "path", "signature", "id", "body"].map(|field| one[field].as_str().unwrap())
        })
        .collect();
    let wanted = [
        ["GET", "/recheck/ok", "good", &id, ""],
        ["POST", "/remind", "good", &id, "{\"a\":\"b\"}"],
    ];
    assert_eq!(facts, wanted, "{told:?}");
    assert!(told.iter().all(|one| one["status"] == 200 && one["again"] == false), "{told:?}");
    assert!(told[1]["headers"].as_array().unwrap().iter().any(|header| header[0] == "webhook-id"));

    let refused = accept(&instance, &recheck("refused")).await;
    ends(&instance, refused, State::Refused).await;
    let missing = accept(&instance, &recheck("404")).await;
    ends(&instance, missing, State::Refused).await;
    let busy = accept(&instance, &recheck("503")).await;
    let forged = NewNotification { bot: bot("other"), ..to(receiver.url("/remind")) };
    let forged = accept(&instance, &forged).await;
    for (id, reason) in [(busy, "answered 503"), (forged, "answered 401")] {
        let is_put_off = async || kept(&instance, id).await.reason.contains(reason);
        eventually(LONG, reason, is_put_off).await;
    }
    eventually(LONG, "it tells of the forged one", async || {
        receiver.told().iter().any(|one| one["signature"] == "wrong" && one["status"] == 401)
    })
    .await;
    // It looks like a push, and the bot is right; the key is that of notifications.
    let push = r#"{"pipeline":"p","bot":"shop","lease":"l","fence":9,"attempt":1,"events":[]}"#;
    let forged = NewNotification {
        method: "POST".to_owned(),
        body: push.to_owned(),
        ..to(receiver.url("/push"))
    };
    accept(&instance, &forged).await;
    eventually(LONG, "it refuses a notification that looks like a push", async || {
        receiver.told().iter().any(|one| one["path"] == "/push" && one["signature"] == "wrong")
    })
    .await;
    let client = Client::new(&receiver.address);
    assert_eq!(client.get("/health").await.code, 200);
    assert_eq!(client.get("/").await.code, 401, "unsigned");
    instance.stop().await;
}

#[tokio::test]
async fn it_marks_calls_that_repeat_a_successful_one() {
    let receiver = Running::start("[]", &["--json", "--retry-after", "7s", "--status", "503"]);
    let client = Client::new(&receiver.address);
    for id in ["a", "b", "a"] {
        client.send("POST", "/hook", &[("webhook-id", id)], b"x\ny").await;
    }
    let push = |events: &[&str]| {
        let events: Vec<Value> =
            events.iter().map(|id| serde_json::json!({"id": id, "source": "s"})).collect();
        serde_json::json!({"pipeline": "p", "bot": "shop", "lease": "l", "fence": 7, "attempt": 1, "events": events})
    };
    for events in [&["1", "2"][..], &["2", "3"], &["1", "2"]] {
        let answer = client.send("POST", "/", &[], push(events).to_string().as_bytes()).await;
        assert_eq!(answer.json(), serde_json::json!({"ack": 2}));
    }
    let all = async || receiver.told().len() == 6;
    eventually(LONG, "it tells of all", all).await;
    let told = receiver.told();
    let again: Vec<bool> = told.iter().map(|one| one["again"].as_bool().unwrap()).collect();
    assert_eq!(again, [false, false, true, false, false, true]);
    assert_eq!(told[0]["body"], "x\\ny");
    assert_eq!(
        told[4]["push"],
        serde_json::json!({"bot": "shop", "fence": 7, "attempt": 1, "events": ["2", "3"], "again": 1})
    );
    assert!(told.iter().all(|one| one["signature"] == "unchecked"));
}

#[tokio::test]
async fn it_fails_on_purpose_and_a_call_after_a_failed_one_is_new() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let failing = Running::start("[]", &["--fail", "1", "--status", "503", "--retry-after", "40s"]);
    let id = accept(&instance, &to(failing.url("/x"))).await;
    eventually(LONG, "it is put off", async || {
        kept(&instance, id).await.reason == "the receiver answered 503: failed on purpose"
    })
    .await;
    let kept = kept(&instance, id).await;
    assert!(kept.next_ms.unwrap() >= kept.due_ms + 40_000, "{kept:?}");
    eventually(LONG, "it tells of it on a line", async || {
        failing.lines().iter().any(|line| {
            line.contains("  503  unchecked  new    GET /x") && line.contains(id.message().as_str())
        })
    })
    .await;
    instance.stop().await;
}

#[tokio::test]
async fn it_answers_pushes_first_and_completes_their_leases() {
    let server = RedisServer::start(Options::default());
    let secrets = [("callbacks.secrets", SECRETS)];
    let listening = Served::start_as(&pushing(&server, "http://127.0.0.1:8/", &[]), "http").await;
    let fairlane = format!("http://{}", listening.http());
    let receiver = Running::start(SECRETS, &["--json", "--async", &fairlane, "--delay", "100ms"]);
    let _process = Served::start(&pushing(&server, &receiver.url("/"), &secrets)).await;
    let event = r#"{"specversion":"1.0","id":"1","source":"s","type":"order.paid","botid":"shop"}"#;
    let client = Client::new(&listening.http());
    let kind = [("content-type", "application/cloudevents+json")];
    let answer = client.send("POST", "/v1/events", &kind, event.as_bytes()).await;
    assert_eq!(answer.code, 202, "{answer:?}");
    eventually(LONG, "it is counted where it was completed", async || {
        metric(&listening, "events_total", &[("outcome", "done")]).await == 1
    })
    .await;
    eventually(LONG, "it tells of both", async || receiver.told().len() == 2).await;
    let told = receiver.told();
    assert_eq!(
        (&told[0]["status"], &told[0]["signature"]),
        (&202.into(), &"good".into()),
        "{told:?}"
    );
    assert_eq!(told[0]["push"]["events"], serde_json::json!(["1"]));
    assert_eq!(
        (&told[1]["signature"], &told[1]["status"]),
        (&"ours".into(), &204.into()),
        "{told:?}"
    );
}

#[test]
fn it_stops_when_nothing_reads_its_output() {
    let (mut receiver, output) = Running::start_unread("[]", &[]);
    drop(output);
    assert!(receiver.ends().success());
}

#[test]
fn it_stops_at_a_signal_and_refuses_invalid_arguments() {
    let mut receiver = Running::start("[]", &[]);
    signal(receiver.child.id(), "TERM");
    assert!(receiver.ends().success());
    for (arguments, problem) in [
        (&["--fail", "2"][..], "a fraction from 0 to 1"),
        (&["--status", "200"], "a status from 300 to 599"),
        (&["--secret", "x"], "does not start with whsec_"),
        (&["--bot", "shop"], "callbacks.secrets is empty"),
    ] {
        let output = Command::new(PROGRAM)
            .args(["receiver", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .current_dir(std::env::temp_dir())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(problem), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
    }
}
