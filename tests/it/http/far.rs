//! The pages while Redis is far away: each command takes 200 or 300 ms.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::config::configs;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::proxy::distance::Distance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::tokens::{self, Tokens};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

struct Far {
    _server: RedisServer,
    distance: Distance,
    instance: Instance,
}

impl Far {
    async fn start(pipelines: &[&str], settings: &[(&str, &str)]) -> Self {
        let server = RedisServer::start(Options { tcp: true, ..Options::default() });
        let distance = Distance::start(server.tcp_addr()).await;
        let url = format!("{:?}", distance.url());
        let config = configs(&server, pipelines, &[&[("redis.url", &*url)], settings].concat());
        let instance = Instance::start(&config, Log::default().content()).await;
        Self { _server: server, distance, instance }
    }

    async fn stop(self) {
        self.distance.set(Duration::ZERO);
        self.instance.stop().await;
    }
}

/// Leaves three events of a bot in the queues of these pipelines.
async fn queue(client: &Client, bot: &str, pipelines: &[&str]) {
    for pipeline in pipelines {
        assert_eq!(client.post(&format!("/v1/pipelines/{pipeline}/pause")).await.code, 204);
    }
    let event = |id: u32| json!({ "specversion": "1.0", "id": id.to_string(), "source": "test", "type": "a", "botid": bot });
    let events = json!([event(1), event(2), event(3)]).to_string();
    let answer = client.publish("application/cloudevents-batch+json", events).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
    eventually(LONG, "they wait", async || {
        let all = client.get("/v1/pipelines").await.json();
        let all = all["pipelines"].as_array().unwrap();
        all.iter().filter(|one| one["depth"] == 3).count() == pipelines.len()
    })
    .await;
}

async fn text(client: &Client, path: &str) -> String {
    let answer = client.get(path).await;
    assert_eq!(answer.code, 200, "{path}: {answer:?}");
    String::from_utf8(answer.body).unwrap()
}

/// Whether a page has a row or panel for each of these.
fn has(page: &str, keys: &[&str]) -> bool {
    keys.iter().all(|key| page.contains(&format!("data-key=\"{key}\"")))
}

#[tokio::test]
async fn the_overview_has_its_tables_although_redis_takes_300_ms_for_each_command() {
    let far = Far::start(&["test", "second", "third"], &[("redis.shards", "16")]).await;
    let client = far.instance.client();
    queue(&client, "shop", &["test", "second"]).await;
    far.distance.set(Duration::from_millis(150));
    // The pipelines do not wait for the ranking, which takes longer than the page waits.
    eventually(LONG, "its tables are complete", async || {
        has(&text(&client, "/").await, &["third", "test/shop", "second/shop"])
    })
    .await;
    far.stop().await;
}

#[tokio::test]
async fn an_operator_keeps_its_tables_while_the_bots_of_a_tenant_are_ranked() {
    let tokens = Tokens::new(&[
        ("tenant", r#"scopes = ["read"], bots = ["shop-*"]"#),
        ("root", r#"scopes = ["read", "operate", "publish"], bots = ["*"]"#),
    ]);
    let settings = [("redis.shards", "16"), ("auth.tokens", &*tokens.setting)];
    let far = Far::start(&["test"], &settings).await;
    let by = |token: &str| far.instance.client().with_token(&tokens::text(token));
    let (tenant, root) = (by("tenant"), by("root"));
    queue(&root, "shop-1", &["test"]).await;
    far.distance.set(Duration::from_millis(150));
    eventually(LONG, "the tables are complete", async || {
        has(&text(&root, "/").await, &["test", "test/shop-1"])
    })
    .await;
    let mut ranking = JoinSet::new();
    ranking.spawn(async move { text(&tenant, "/bots").await });
    // The tenant is ahead.
    tokio::time::sleep(Duration::from_millis(300)).await;
    // The second one may begin a ranking of its own, which takes longer than the page waits.
    for keys in [&["test", "test/shop-1"][..], &["test"]] {
        let page = text(&root, "/").await;
        assert!(has(&page, keys), "{page}");
    }
    assert!(has(&ranking.join_all().await[0], &["test/shop-1"]));
    far.stop().await;
}

/// Side by side, the rankings would need more connections than there are.
#[tokio::test]
async fn the_bots_of_eight_tenants_are_ranked_although_redis_takes_200_ms_for_each_command() {
    let tenants: Vec<String> = (0..8).map(|n| format!("tenant-{n}")).collect();
    let tables = tenants.iter().map(|name| (&**name, r#"scopes = ["read"], bots = ["shop-*"]"#));
    let root = ("root", r#"scopes = ["read", "operate", "publish"], bots = ["*"]"#);
    let tokens = Tokens::new(&tables.chain([root]).collect::<Vec<_>>());
    let settings = [("redis.shards", "16"), ("auth.tokens", &*tokens.setting)];
    let far = Far::start(&["test"], &settings).await;
    let by = |token: &str| far.instance.client().with_token(&tokens::text(token));
    queue(&by("root"), "shop-1", &["test"]).await;
    far.distance.set(Duration::from_millis(100));
    let pages = tenants.iter().map(|name| {
        let client = by(name);
        async move { client.send("GET", "/bots", &[("x-deadline-ms", "30000")], b"").await }
    });
    for answer in join_all(pages).await {
        assert_eq!(answer.code, 200, "{answer:?}");
        let page = String::from_utf8(answer.body).unwrap();
        assert!(has(&page, &["test/shop-1"]), "{page}");
    }
    far.stop().await;
}

#[tokio::test]
async fn the_page_of_a_bot_in_four_pipelines_is_there_although_redis_takes_300_ms_for_each_command()
{
    let pipelines = ["first", "second", "third", "fourth"];
    let far = Far::start(&pipelines, &[]).await;
    let client = far.instance.client();
    queue(&client, "shop", &pipelines).await;
    far.distance.set(Duration::from_millis(150));
    let page = text(&client, "/bots/shop").await;
    assert!(has(&page, &pipelines), "{page}");
    far.stop().await;
}
