//! `lua/record.lua`: bounds of what is kept of attempts.

use std::time::Duration;

use fairlane::id::{BotId, PipelineName, Prefix, ShardCount};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{Kept, Record};
use fairlane::redis::{Link, Target};

use crate::support::redis::{Options, RedisServer};

const HOUR_MS: u64 = 3_600_000;
const NOW: u64 = 1_760_000_000_000;

struct Shard {
    server: RedisServer,
    link: Link,
    keys: ShardKeys,
}

fn bot(id: &str) -> BotId {
    BotId::parse(id).unwrap()
}

/// A failure of this number of bytes, with its length before it.
fn failure(bytes: u16, fill: u8) -> Vec<u8> {
    let mut all = bytes.to_be_bytes().to_vec();
    all.resize(usize::from(bytes) + 2, fill);
    all
}

impl Shard {
    fn new() -> Self {
        let server = RedisServer::start(Options::default());
        let target = Target::new(&server.url()).unwrap();
        let link = Link::new(target, Vec::new(), 1_000, Duration::from_secs(10));
        let shard = ShardCount::new(1).unwrap().shards().next().unwrap();
        let keys = ShardKeys::new(&Prefix::default(), &PipelineName::parse("p").unwrap(), shard);
        Self { server, link, keys }
    }

    async fn record(&self, now_ms: u64, done: &[Vec<u8>], failed: &[(BotId, Vec<u8>)]) {
        let kept =
            Kept { keep_ms: HOUR_MS, done_bytes: 20_000, failed_bytes: 20_000, bot_bytes: 2_000 };
        let call = Record { keys: &self.keys, now_ms, kept, done, failed };
        self.link.call(&call).await.unwrap();
    }

    async fn failures(&self, id: &str) -> Option<Vec<u8>> {
        let mut connection = self.server.connection().await;
        let get = redis::Cmd::hget(&self.keys.history[1], id);
        get.query_async(&mut connection).await.unwrap()
    }

    async fn number(&self, command: &[&str]) -> u64 {
        let mut connection = self.server.connection().await;
        let mut cmd = redis::cmd(command[0]);
        cmd.arg(&command[1..]);
        cmd.query_async(&mut connection).await.unwrap()
    }

    /// The bytes that the two kinds are counted with.
    async fn counted(&self) -> (u64, u64) {
        let mut connection = self.server.connection().await;
        let get = redis::Cmd::hmget(&self.keys.history[3], &["done", "failed"]);
        get.query_async(&mut connection).await.unwrap()
    }
}

#[tokio::test]
async fn a_bot_that_fails_all_the_time_loses_its_own_oldest_failures_and_no_other_bots() {
    let shard = Shard::new();
    shard.record(NOW, &[], &[(bot("quiet"), failure(100, b'q'))]).await;
    for round in 0..200_u8 {
        let failed = [(bot("busy"), failure(300, round))];
        shard.record(NOW + u64::from(round), &[], &failed).await;
    }
    assert_eq!(shard.failures("quiet").await.unwrap(), failure(100, b'q'));
    let busy = shard.failures("busy").await.unwrap();
    let expected: Vec<u8> = (194..200).flat_map(|round| failure(300, round)).collect();
    assert_eq!(busy, expected, "the newest that fit into 2,000 bytes");
}

#[tokio::test]
async fn the_last_failure_of_a_bot_is_kept_although_it_is_longer_than_the_bound() {
    let shard = Shard::new();
    for round in 1..=2 {
        shard.record(NOW, &[], &[(bot("long"), failure(4_000, round))]).await;
    }
    assert_eq!(shard.failures("long").await.unwrap(), failure(4_000, 2));
}

#[tokio::test]
async fn the_bots_whose_last_failure_is_oldest_go_first_and_the_bytes_are_counted_exactly() {
    let shard = Shard::new();
    for n in 0..100_u64 {
        shard.record(NOW + n, &[], &[(bot(&format!("b{n}")), failure(1_000, 1))]).await;
    }
    let left = shard.number(&["HLEN", &shard.keys.history[1]]).await;
    assert!((15..=18).contains(&left), "{left} of 1,000 bytes each");
    assert_eq!(shard.failures("b0").await, None);
    assert!(shard.failures("b99").await.is_some());
    assert_eq!(shard.number(&["ZCARD", &shard.keys.history[2]]).await, left);
    let (_, failed) = shard.counted().await;
    assert_eq!(failed, left * (1_002 + 160 + 2 * 3));
    let used = shard.number(&["MEMORY", "USAGE", &shard.keys.history[1]]).await;
    assert!(used < 20_000 * 3 / 2, "{used} bytes of Redis");
}

#[tokio::test]
async fn the_stream_of_completed_slices_keeps_its_bytes_and_the_newest() {
    let shard = Shard::new();
    for n in 0..300_u32 {
        shard.record(NOW, &[n.to_be_bytes().repeat(100), b"x".to_vec()], &[]).await;
    }
    let left = shard.number(&["XLEN", &shard.keys.history[0]]).await;
    let (done, _) = shard.counted().await;
    assert!(done <= 20_000 && (40..80).contains(&left), "{done} bytes in {left} entries");
    // A portion above the bound leaves nothing.
    shard.record(NOW, &[vec![1; 30_000]], &[]).await;
    assert_eq!(shard.number(&["XLEN", &shard.keys.history[0]]).await, 0);
    assert_eq!(shard.counted().await.0, 0);
}

#[tokio::test]
async fn entries_older_than_keep_are_removed_and_every_key_has_a_ttl() {
    let shard = Shard::new();
    shard.record(NOW, &[], &[(bot("old"), failure(10, 1))]).await;
    shard.record(NOW + 2 * HOUR_MS, &[b"x".to_vec()], &[(bot("new"), failure(10, 1))]).await;
    assert_eq!(shard.failures("old").await, None);
    assert!(shard.failures("new").await.is_some());
    for key in &shard.keys.history {
        let left = shard.number(&["PTTL", key]).await;
        assert!((1..=HOUR_MS).contains(&left), "{key}: {left} ms");
    }
}

#[tokio::test]
async fn counts_of_keys_that_have_expired_start_again() {
    let shard = Shard::new();
    shard.record(NOW, &[b"x".repeat(500)], &[(bot("a"), failure(10, 1))]).await;
    let mut connection = shard.server.connection().await;
    let gone = &shard.keys.history[..2];
    let () = redis::cmd("DEL").arg(gone).query_async(&mut connection).await.unwrap();
    shard.record(NOW, &[b"x".to_vec()], &[(bot("a"), failure(10, 1))]).await;
    assert_eq!(shard.counted().await, (65, 12 + 160 + 2));
}
