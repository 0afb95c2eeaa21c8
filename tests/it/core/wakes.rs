//! Wake-ups on a cluster. Its nodes pass messages on to each other, but not to a node that was removed or
//! is cut off, which answers all the same.

use std::time::Duration;

use fairlane::redis::{Link, Target};
use futures_util::StreamExt as _;

use crate::support::cluster::Cluster;
use crate::support::config::config;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisBackend as _, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

fn link(url: &str) -> Link {
    Link::new(Target::new(url).unwrap(), Vec::new(), 10_000, Duration::from_secs(5))
}

#[tokio::test]
async fn no_subscription_leads_to_a_removed_node_that_still_runs() {
    let cluster = Cluster::start(Options::default(), 3, false).await;
    // After `CLUSTER RESET`, a removed node is like a new one.
    let arguments =
        ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-port"];
    let arguments = [&arguments[..], &["{port}"]].concat().into_iter().map(str::to_owned);
    let options = Options { tcp: true, ..Options::default() };
    let removed = RedisServer::start_with(options, &arguments.collect::<Vec<_>>());
    let url = cluster.url().replace("://", &format!("://{},", removed.tcp_addr()));
    let link = link(&url);
    // As many as there are nodes, and more.
    for number in 0..12 {
        let (mut subscriber, _) = link.subscriber().await.unwrap();
        let channel = format!("fl:test:{number}");
        subscriber.subscribe(&channel).await.unwrap();
        let mut publish = redis::pipe();
        publish.cmd("PUBLISH").arg(&channel).arg("hello");
        link.run(&publish).await.unwrap();
        let heard = tokio::time::timeout(LONG, subscriber.on_message().next()).await;
        heard.expect("a message reaches it").unwrap();
    }
}

#[tokio::test]
async fn a_node_that_is_cut_off_from_the_others_hears_nothing_until_it_is_back() {
    let cluster = Cluster::start(Options::default(), 3, false).await;
    let link = link(&cluster.url());
    let node = cluster.nodes[0].tcp_addr().to_string();
    link.subscriber().await.unwrap();
    eventually(LONG, "it hears", async || link.hears(&node).await).await;
    for other in &cluster.nodes[1..] {
        other.sigstop();
    }
    eventually(LONG, "it is cut off", async || !link.hears(&node).await).await;
    for other in &cluster.nodes[1..] {
        other.sigcont();
    }
    eventually(LONG, "it hears again", async || link.hears(&node).await).await;
}

#[tokio::test]
async fn no_subscription_leads_to_a_frozen_node_while_others_answer() {
    let cluster = Cluster::start(Options::default(), 3, false).await;
    let link = link(&cluster.url());
    link.subscriber().await.unwrap();
    let frozen = cluster.nodes[0].tcp_addr().to_string();
    cluster.nodes[0].sigstop();
    // Each one asks the frozen node first with a probability of a third.
    for _ in 0..12 {
        let (_, server) = link.subscriber().await.unwrap();
        assert_ne!(server, frozen);
    }
}

#[tokio::test]
async fn a_process_subscribes_anew_when_its_node_is_no_primary_any_more() {
    let cluster = Cluster::start(Options::default(), 3, true).await;
    let config = config(&cluster, "test", &[]);
    let instance = Instance::start(&config, Log::default().content()).await;
    let listens = async |place: usize| {
        cluster.ask(place, &["CLIENT", "LIST", "TYPE", "pubsub"]).await.contains("id=")
    };
    eventually(LONG, "it listens at the first primary", async || {
        if listens(0).await {
            return true;
        }
        for place in [1, 2] {
            cluster.tell(place, &["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        }
        false
    })
    .await;
    eventually(LONG, "the replica of the first primary takes its place", async || {
        // Redis gives it up after 5 s, for example because the machine is busy.
        cluster.tell(3, &["CLUSTER", "FAILOVER"]).await;
        for _ in 0..70 {
            if cluster.ask(3, &["ROLE"]).await.contains("master") {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        false
    })
    .await;
    eventually(LONG, "it listens at a primary", async || {
        !listens(0).await && (listens(1).await || listens(2).await || listens(3).await)
    })
    .await;
    instance.stop().await;
}
