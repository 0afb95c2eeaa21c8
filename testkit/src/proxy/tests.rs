#![cfg(test)]

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;

use super::*;
use crate::redis::{Options, RedisServer};
use crate::wait::eventually;

const LONG: Duration = Duration::from_secs(10);

async fn behind_proxy() -> (RedisServer, Proxy) {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    (server, proxy)
}

async fn connect(proxy: &Proxy) -> redis::RedisResult<MultiplexedConnection> {
    redis::Client::open(proxy.url())?.get_multiplexed_async_connection().await
}

#[tokio::test]
async fn a_swallowed_reply_leaves_the_command_executed() {
    let (server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    proxy.swallow("counted", 2);
    assert_eq!(connection.incr::<_, _, i32>("counted", 1).await.unwrap(), 1);
    assert_eq!(connection.incr::<_, _, i32>("other", 1).await.unwrap(), 1);
    connection.incr::<_, _, i32>("counted", 1).await.unwrap_err();
    assert_eq!(proxy.swallowed(), 1);
    assert_eq!(server.connection().await.get::<_, i32>("counted").await.unwrap(), 2);
    let mut again = connect(&proxy).await.unwrap();
    assert_eq!(again.incr::<_, _, i32>("counted", 1).await.unwrap(), 3);
}

#[tokio::test]
async fn of_a_pipeline_only_the_replies_before_the_swallowed_one_arrive() {
    let (server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    let before = proxy.replies();
    proxy.swallow("second", 1);
    let mut pipeline = redis::pipe();
    pipeline.incr("first", 1).incr("second", 1).incr("third", 1);
    pipeline.query_async::<Vec<i32>>(&mut connection).await.unwrap_err();
    assert_eq!((proxy.replies() - before, proxy.swallowed()), (1, 1));
    assert!(server.connection().await.exists::<_, bool>("second").await.unwrap());
}

#[tokio::test]
async fn cut_connections_fail_and_new_ones_work() {
    let (_server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    proxy.cut();
    connection.set::<_, _, ()>("a", 1).await.unwrap_err();
    let () = connect(&proxy).await.unwrap().set("a", 1).await.unwrap();
    proxy.set(ProxyMode::Refuse);
    proxy.cut();
    assert!(connect(&proxy).await.is_err());
    proxy.set(ProxyMode::Pass);
    let () = connect(&proxy).await.unwrap().set("a", 1).await.unwrap();
}

#[tokio::test]
async fn lost_replies_leave_the_commands_executed_and_new_connections_work() {
    let (server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    proxy.lose_replies();
    let timeout = connection.set::<_, _, ()>("a", 1).await.unwrap_err();
    assert!(timeout.is_timeout(), "{timeout}");
    assert!(server.connection().await.exists::<_, bool>("a").await.unwrap());
    let () = connect(&proxy).await.unwrap().set("a", 2).await.unwrap();
}

#[tokio::test]
async fn held_bytes_arrive_when_they_are_released() {
    let (server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    proxy.set(ProxyMode::Hold);
    let timeout = connection.set::<_, _, ()>("a", 1).await.unwrap_err();
    assert!(timeout.is_timeout(), "{timeout}");
    let mut direct = server.connection().await;
    assert!(!direct.exists::<_, bool>("a").await.unwrap());
    proxy.set(ProxyMode::Pass);
    eventually(LONG, "the write arrives late", async || direct.exists("a").await.unwrap()).await;
}

#[tokio::test]
async fn a_delay_is_added_both_ways() {
    let (_server, proxy) = behind_proxy().await;
    let mut connection = connect(&proxy).await.unwrap();
    let delay = Duration::from_millis(30);
    proxy.set(ProxyMode::Delay(delay));
    let started = std::time::Instant::now();
    let () = connection.set("a", 1).await.unwrap();
    assert!(started.elapsed() >= 2 * delay);
}

#[tokio::test]
async fn a_slow_line_is_shared_by_all_connections() {
    let (_server, proxy) = behind_proxy().await;
    let mut connections = [connect(&proxy).await.unwrap(), connect(&proxy).await.unwrap()];
    proxy.set(ProxyMode::Rate(100_000));
    let started = std::time::Instant::now();
    let [first, second] = &mut connections;
    let sets = async |connection: &mut MultiplexedConnection| {
        connection.set::<_, _, ()>("a", "x".repeat(10_000)).await.unwrap();
    };
    tokio::join!(sets(first), sets(second));
    assert!(started.elapsed() >= Duration::from_millis(200), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_slow_line_of_one_connection_delays_no_other() {
    let (_server, proxy) = behind_proxy().await;
    let mut connections = [connect(&proxy).await.unwrap(), connect(&proxy).await.unwrap()];
    proxy.set(ProxyMode::RateEach(20_000));
    let [first, second] = &mut connections;
    let large = first.set::<_, _, ()>("a", "x".repeat(40_000));
    let small = second.set::<_, _, ()>("b", "x");
    tokio::select! {
        biased;
        _ = large => panic!("it takes two seconds"),
        done = small => done.unwrap(),
    }
}
