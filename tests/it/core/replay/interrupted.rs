//! Replays that are interrupted: each answer says how to go on without putting an event twice.

use super::kept::{MINUTE, kept};
use super::range::counts_of_pages;
use super::{Instance, JSON, LONG, Rig, STREAM, add, ids, json, mixed, replay};
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, holds};

/// An instance that reaches Redis through a proxy, and has handled twenty events of a bot.
async fn twenty_handled_behind_a_proxy() -> (Rig, Proxy, Instance) {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let proxy = Proxy::start(rig.server.tcp_addr()).await;
    let config = rig.config.replace(&rig.server.url(), &proxy.url());
    let instance = Instance::start(&config, rig.handler()).await;
    add(&rig.server, STREAM, &mixed(&["a"], 0..20)).await;
    rig.got(20).await;
    (rig, proxy, instance)
}

#[tokio::test]
async fn an_interrupted_replay_names_its_id_and_a_call_with_it_puts_each_event_once() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let proxy = Proxy::start(rig.server.tcp_addr()).await;
    let config = rig.config.replace(&rig.server.url(), &proxy.url());
    let instance = Instance::start(&config, rig.handler()).await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..200)).await;
    rig.got(400).await;
    let client = instance.client();
    let memory = async |bytes: &str| rig.server.ask(&["CONFIG", "SET", "maxmemory", bytes]).await;
    // Each step puts the events of both bots. After the second one, Redis has no memory left.
    let put = proxy.intercept(holds(["}:replay:"]), 3, Interception::HoldReply);
    let fills = async {
        assert!(put.catches(LONG).await);
        memory("1").await;
        put.release();
    };
    let asked = json!({ "from": "1h ago" });
    let ((code, told), ()) = tokio::join!(replay(&client, &asked), fills);
    assert_eq!((code, &told["type"]), (503, &json!("urn:fairlane:problem:full")), "{told}");
    let detail = told["detail"].as_str().unwrap();
    assert!(detail.starts_with("this call put at least 16 events of replay "), "{detail}");
    assert!(detail.contains("Redis had no memory left"), "{detail}");
    let (_, id) = detail.split_once("\"id\":\"").expect("it names the id");
    let id = id.split('"').next().unwrap();
    memory("0").await;

    // Its answer is lost.
    proxy.swallow("}:replay:", 1);
    let (code, told) = replay(&client, &json!({ "id": id })).await;
    assert_eq!((code, &told["type"]), (503, &json!("urn:fairlane:problem:unavailable")), "{told}");
    assert!(told["detail"].as_str().unwrap().contains(id), "{told}");
    let (code, told) = replay(&client, &json!({ "id": id })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    rig.got(800).await;
    assert_eq!((rig.ids("a", true), rig.ids("b", true)), (ids(0..200), ids(0..200)));
    instance.stop().await;
}

#[tokio::test]
async fn a_replay_that_redis_does_not_answer_names_its_id_before_the_deadline_of_its_request() {
    let (rig, proxy, instance) = twenty_handled_behind_a_proxy().await;
    let client = instance.client();
    let put = proxy.intercept(holds(["}:replay:"]), 1, Interception::HoldReply);
    let (path, headers) = ("/v1/pipelines/work/replay", [JSON, ("x-deadline-ms", "4000")]);
    let answer = client.send("POST", path, &headers, br#"{"from":"1h ago"}"#).await;
    assert_eq!((answer.code, answer.problem().as_str()), (503, "unavailable"), "{answer:?}");
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.starts_with("this call began to put events of replay "), "{detail}");
    let (_, id) = detail.split_once("\"id\":\"").expect("it names the id");
    put.release();
    let id = id.split('"').next().unwrap();
    let (code, told) = replay(&client, &json!({ "id": id })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    rig.got(40).await;
    assert_eq!(rig.ids("a", true), ids(0..20));
    instance.stop().await;
}

/// The first command about the run reads it, and the second one stores it. Only then are events put.
#[tokio::test]
async fn a_replay_that_is_interrupted_before_it_puts_an_event_says_so() {
    let (rig, proxy, instance) = twenty_handled_behind_a_proxy().await;
    let client = instance.client();
    let (path, headers) = ("/v1/pipelines/work/replay", [JSON, ("x-deadline-ms", "4000")]);
    for nth in [1, 2] {
        let held = proxy.intercept(holds(["fl:replay:"]), nth, Interception::HoldReply);
        let answer = client.send("POST", path, &headers, br#"{"from":"1h ago"}"#).await;
        held.release();
        assert_eq!((answer.code, answer.problem().as_str()), (503, "unavailable"), "{answer:?}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(
            detail.starts_with("this call put no event; then Redis did not answer in time"),
            "{nth}: {detail}"
        );
    }
    let (code, told) = replay(&client, &json!({ "from": "1h ago" })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    rig.got(40).await;
    assert_eq!(rig.ids("a", true), ids(0..20));
    instance.stop().await;
}

/// The times of the second call are others.
#[tokio::test]
async fn a_replay_whose_interrupted_call_stored_it_goes_on_by_its_id() {
    let (rig, proxy, instance) = twenty_handled_behind_a_proxy().await;
    let client = instance.client();
    let (path, headers) = ("/v1/pipelines/work/replay", [JSON, ("x-deadline-ms", "4000")]);
    let asked = json!({ "id": "mine", "from": "1h ago" });
    let held = proxy.intercept(holds(["SET", "fl:replay:mine"]), 1, Interception::HoldReply);
    let answer = client.send("POST", path, &headers, asked.to_string().as_bytes()).await;
    held.release();
    assert_eq!((answer.code, answer.problem().as_str()), (503, "unavailable"), "{answer:?}");
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.starts_with("this call put no event; then "), "{detail}");
    let remedy = "; repeat the call or, if that is refused, call again with \"id\":\"mine\" and without \"from\"";
    assert!(detail.ends_with(remedy), "{detail}");
    let (code, told) = replay(&client, &asked).await;
    assert_eq!(code, 409, "{told}");
    let (code, told) = replay(&client, &json!({ "id": "mine" })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    rig.got(40).await;
    assert_eq!(rig.ids("a", true), ids(0..20));
    instance.stop().await;
}

/// The run has put events that it does not count.
#[tokio::test]
async fn a_run_whose_first_put_had_no_answer_is_kept_although_a_page_has_none_later() {
    let (rig, proxy, instance) = twenty_handled_behind_a_proxy().await;
    let client = instance.client();
    proxy.swallow("}:replay:", 1);
    let (code, told) = replay(&client, &json!({ "from": "1h ago", "id": "r" })).await;
    assert_eq!(code, 503, "{told}");
    let page = holds(["XRANGE", STREAM, "COUNT\r\n$2\r\n32\r\n"]);
    let lost = proxy.intercept(page, 1, Interception::LoseReply);
    let (code, told) = replay(&client, &json!({ "id": "r" })).await;
    assert_eq!(code, 503, "{told}");
    assert!(lost.has_caught());
    let left = kept(&rig, "r").await;
    assert!(left > 24 * 60 * MINUTE, "{left}");
    let (code, told) = replay(&client, &json!({ "id": "r" })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    rig.got(40).await;
    assert_eq!(rig.ids("a", true), ids(0..20));
    instance.stop().await;
}

/// Redis may have been too slow for such a page.
#[tokio::test]
async fn after_a_page_without_an_answer_a_replay_goes_on_with_half_a_page() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let proxy = Proxy::start(rig.server.tcp_addr()).await;
    let config = rig.config.replace(&rig.server.url(), &proxy.url());
    let instance = Instance::start(&config, rig.handler()).await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..200)).await;
    rig.got(400).await;
    rig.server.note_commands().await;
    let page = holds(["XRANGE", STREAM, "COUNT\r\n$2\r\n64\r\n"]);
    let lost = proxy.intercept(page, 1, Interception::LoseReply);
    let client = instance.client();
    let (code, told) = replay(&client, &json!({ "from": "1h ago" })).await;
    assert_eq!((code, &told["type"]), (503, &json!("urn:fairlane:problem:unavailable")), "{told}");
    assert!(lost.has_caught());
    let detail = told["detail"].as_str().unwrap();
    let (_, id) = detail.split_once("\"id\":\"").expect("it names the id");
    let id = id.split('"').next().unwrap();
    let (code, told) = replay(&client, &json!({ "id": id })).await;
    assert_eq!((code, &told["done"]), (200, &json!(true)), "{told}");
    let counts = counts_of_pages(&rig).await;
    assert_eq!(counts[..5], [16, 32, 64, 32, 64], "{counts:?}");
    rig.got(800).await;
    assert_eq!((rig.ids("a", true), rig.ids("b", true)), (ids(0..200), ids(0..200)));
    instance.stop().await;
}
