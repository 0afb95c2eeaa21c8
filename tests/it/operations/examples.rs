//! The examples work as they promise. Each is tested where its interpreter is installed, as it is in CI.

use std::process::{Command, Output};

use fairlane::notifications::record::{NotificationId, State};

use crate::support::automation_rig::{self, tag};
use crate::support::config::config;
use crate::support::instance::Instance;
use crate::support::notification_rig::{Rig, ends, kept};
use crate::support::push::{LONG, pushing};
use crate::support::receiver::Receiver;
use crate::support::receivers::{ExampleReceiver, example, is_there};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::eventually;

const SECRETS: (&str, &str) = ("callbacks.secrets", "[\"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"]");

const NEXT: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

/// The key of a bot's pushes, as `fairlane secret` prints it.
fn secret_of(bot: &str) -> String {
    printed(&["--bot", bot])
}

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(PROGRAM)
        .arg("secret")
        .args(arguments)
        .env("FAIRLANE__CALLBACKS__SECRETS", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs `publish.sh`: one event by XADD, one by curl.
fn publish(server: &RedisServer, process: &Served, bot: &str) -> Output {
    let redis = format!("redis-cli -s {}", server.url().trim_start_matches("redis+unix://"));
    Command::new("bash")
        .arg(example("publish.sh"))
        .args([bot, "order.placed", r#"{"total":12}"#])
        .env("REDIS", redis)
        .env("FAIRLANE", format!("http://{}", process.http()))
        .output()
        .unwrap()
}

/// Publishes for the bot `shop` and waits until the receiver has both events.
async fn both_arrive(server: &RedisServer, process: &Served, receiver: &ExampleReceiver) {
    let published = publish(server, process, "shop");
    assert!(published.status.success(), "{published:?}");
    let said = String::from_utf8_lossy(&published.stdout);
    assert!(said.contains(r#""accepted":1"#), "{said}");
    let count = || receiver.pushes().iter().map(|push| push.events.len()).sum::<usize>();
    eventually(LONG, "both events arrive", async || count() == 2).await;
    let pushes = receiver.pushes();
    let ids: Vec<&str> = pushes.iter().flat_map(|p| &p.events).map(|e| e.id.as_str()).collect();
    assert!(ids[0].starts_with("redis-") && ids[1].starts_with("http-"), "{ids:?}");
    assert!(pushes.iter().all(|push| push.bot == "shop" && push.fence > 0));
}

#[tokio::test]
async fn events_published_by_redis_and_by_curl_reach_the_receiver_in_python() {
    if !is_there("python3") || !is_there("curl") {
        return println!("not shown: there is no python3 or no curl");
    }
    let server = RedisServer::start(Options::default());
    let receiver = ExampleReceiver::python(&["--secret", &secret_of("shop")]);
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
    // Pushes of another bot are signed with another secret, so the receiver rejects them.
    assert!(publish(&server, &process, "other").status.success());
    eventually(LONG, "it is refused again and again", async || {
        crate::support::push::metric(&process, "events_total", &[("outcome", "retried")]).await >= 2
    })
    .await;
    assert!(receiver.pushes().iter().all(|push| push.bot == "shop"));
}

#[tokio::test]
async fn the_receiver_in_python_can_answer_first_and_complete_later() {
    if !is_there("python3") || !is_there("curl") {
        return println!("not shown: there is no python3 or no curl");
    }
    let server = RedisServer::start(Options::default());
    // The receiver completes at a process that only listens and has no push target of its own.
    let listening = Served::start_as(&pushing(&server, "http://127.0.0.1:8/", &[]), "http").await;
    let fairlane = format!("http://{}", listening.http());
    let receiver = ExampleReceiver::python(&["--async", &fairlane, "--secret", &secret_of("shop")]);
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
    eventually(LONG, "both are counted where they were completed", async || {
        let done = [("outcome", "done")];
        crate::support::push::metric(&listening, "events_total", &done).await == 2
    })
    .await;
}

#[tokio::test]
async fn events_published_by_redis_and_by_curl_reach_the_receiver_in_node() {
    if !is_there("node") || !is_there("curl") {
        return println!("not shown: there is no node or no curl");
    }
    let server = RedisServer::start(Options::default());
    let receiver = ExampleReceiver::node(&["--secret", &secret_of("shop")]);
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
    // Pushes of another bot are signed with another secret, so the receiver rejects them.
    assert!(publish(&server, &process, "other").status.success());
    eventually(LONG, "it is refused again and again", async || {
        crate::support::push::metric(&process, "events_total", &[("outcome", "retried")]).await >= 2
    })
    .await;
    assert!(receiver.pushes().iter().all(|push| push.bot == "shop"));
}

#[tokio::test]
async fn the_receiver_in_node_can_answer_first_and_complete_later() {
    if !is_there("node") || !is_there("curl") {
        return println!("not shown: there is no node or no curl");
    }
    let server = RedisServer::start(Options::default());
    let listening = Served::start_as(&pushing(&server, "http://127.0.0.1:8/", &[]), "http").await;
    let fairlane = format!("http://{}", listening.http());
    let receiver = ExampleReceiver::node(&["--async", &fairlane, "--secret", &secret_of("shop")]);
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
    eventually(LONG, "both are counted where they were completed", async || {
        let done = [("outcome", "done")];
        crate::support::push::metric(&listening, "events_total", &done).await == 2
    })
    .await;
}

#[tokio::test]
async fn events_published_by_redis_and_by_curl_reach_the_receiver_in_php() {
    if !is_there("php") || !is_there("curl") {
        return println!("not shown: there is no php or no curl");
    }
    let server = RedisServer::start(Options::default());
    let receiver = ExampleReceiver::php(&secret_of("shop"));
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
}

#[tokio::test]
async fn the_receiver_in_php_can_answer_first_and_complete_later() {
    if !is_there("php") || !is_there("curl") {
        return println!("not shown: there is no php or no curl");
    }
    let server = RedisServer::start(Options::default());
    let listening = Served::start_as(&pushing(&server, "http://127.0.0.1:8/", &[]), "http").await;
    let fairlane = format!("http://{}", listening.http());
    let receiver = ExampleReceiver::php_async(&secret_of("shop"), &fairlane);
    let process = Served::start(&pushing(&server, &receiver.url, &[SECRETS])).await;
    both_arrive(&server, &process, &receiver).await;
    eventually(LONG, "both are counted where they were completed", async || {
        let done = [("outcome", "done")];
        crate::support::push::metric(&listening, "events_total", &done).await == 2
    })
    .await;
}

#[tokio::test]
async fn the_sender_in_ruby_has_a_notification_sent_and_explains_a_refused_one() {
    if !is_there("ruby") {
        return println!("not shown: there is no ruby");
    }
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let run = async |seconds: &str, url: &str| {
        let mut ruby = tokio::process::Command::new("ruby");
        ruby.arg(example("send_delayed.rb")).args(["shop", "ann", seconds, url]);
        ruby.arg(r#"{"text":"Grüße"}"#).env("LANG", "C.UTF-8");
        ruby.env("FAIRLANE", format!("http://{}", instance.client().address));
        ruby.output().await.unwrap()
    };
    let sent = run("0.2", &receiver.url()).await;
    assert!(sent.status.success(), "{sent:?}");
    let id = String::from_utf8(sent.stdout).unwrap().trim().parse().unwrap();
    assert_eq!(ends(&instance, id, State::Sent).await.uid, "ann");
    let call = &receiver.calls()[0];
    assert_eq!((call.line.as_str(), &*call.text("text")), ("POST /hook HTTP/1.1", "Grüße"));
    let refused = run("-1", &receiver.url()).await;
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("400") && said.contains("delay"), "{said}");
    instance.stop().await;
}

#[tokio::test]
async fn producers_in_python_and_php_put_events_on_the_bus_and_explain_refused_ones() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "test", &[]), log.content()).await;
    let url = format!("http://{}", instance.client().address);
    for (interpreter, script) in [("python3", "publish.py"), ("php", "publish.php")] {
        if !is_there(interpreter) {
            println!("not shown: there is no {interpreter}");
            continue;
        }
        let run = async |bot: &str| {
            let mut command = tokio::process::Command::new(interpreter);
            command.arg(format!("{}/examples/{script}", env!("CARGO_MANIFEST_DIR")));
            command.args([bot, "order.paid", r#"{"price":12}"#]).env("FAIRLANE", &url);
            command.output().await.unwrap()
        };
        let done = run(interpreter).await;
        assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
        eventually(LONG, "it is handled", async || {
            log.all().iter().any(|seen| seen.bot == interpreter)
        })
        .await;
        let refused = run("").await;
        assert!(String::from_utf8_lossy(&refused.stderr).contains("botid"), "{script}");
        assert!(!refused.status.success(), "{script}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn a_notification_reaches_receivers_in_three_languages_that_believe_its_signature_alone() {
    let secrets = format!("[{}, {:?}]", &SECRETS.1[1..SECRETS.1.len() - 1], NEXT);
    let rig = Rig::new(&[("callbacks.secrets", &secrets)]);
    let instance = rig.start().await;
    let client = instance.client();
    for interpreter in ["python3", "php", "node"] {
        if !is_there(interpreter) {
            println!("not shown: there is no {interpreter}");
            continue;
        }
        // During a rotation of secrets, a receiver knows only one of the two.
        let key = printed(&["--bot", "shop", "--kind", "notification"]);
        let receiver = ExampleReceiver::notified(interpreter, &key);
        let send = async |bot: &str, url: &str| -> NotificationId {
            let path = format!(
                "/send_delayed?delay=0&bot={bot}&method=POST&body=Gr%C3%BC%C3%9Fe&url={url}"
            );
            let answer = client.get(&path).await;
            answer.header("x-event-id").expect("it is accepted").parse().unwrap()
        };
        let id = send("shop", &format!("{}/remind", receiver.url)).await;
        ends(&instance, id, State::Sent).await;
        let line = format!("{} POST /remind Grüße", id.message().as_str());
        assert!(receiver.log().contains(&line), "{}", receiver.log());
        // This notification is signed with the secret of another bot.
        let other = send("other", &format!("{}/other", receiver.url)).await;
        eventually(LONG, "it is refused", async || {
            kept(&instance, other).await.reason.contains("answered 401")
        })
        .await;
        assert!(!receiver.log().contains("/other"), "{}", receiver.log());
    }
    instance.stop().await;
}

#[tokio::test]
async fn the_welcome_flow_reminds_a_user_without_a_reply() {
    if !is_there("curl") {
        return println!("not shown: there is no curl");
    }
    let rig = automation_rig::Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let mut script = Command::new("bash");
    script.arg(example("welcome.sh")).args(["shop", &receiver.url(), "try"]);
    script.env("FAIRLANE", format!("http://{}", rig.client.address)).env("DELAY", "1s");
    // The instance runs on this thread, so the script must not block it.
    let output = tokio::task::spawn_blocking(move || script.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(r#""matched":[{"rule":"10-welcome","actions":["emit"]}]"#), "{said}");
    rig.publish(&[
        tag("shop", "silent", "1", "new"),
        tag("shop", "quick", "2", "new"),
        tag("shop", "quick", "3", "replied"),
    ])
    .await;
    // Two checks, and the tag of the reminded subscriber.
    rig.settles(3 + 3).await;
    eventually(LONG, "the reminder", async || receiver.called() == 1).await;
    assert_eq!(receiver.calls()[0].json()["subject"], "silent");
    rig.instance.stop().await;
}
