//! Streams that are made anew, trimmed, purged, or that lost their last messages.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use async_nats::jetstream::stream;
use fairlane::bus::source::Source as _;
use fairlane::id::Offset;

use super::{
    Copy, STREAM, config, fetch, id, ids, log, make, open, progress, publish, settings, source,
};
use crate::support::nats::{NatsServer, Options};

#[tokio::test]
async fn a_stream_made_anew_is_read_from_its_beginning_and_the_loss_is_told() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..10)).await.unwrap();
    let before = log(&source).await;
    server.jetstream().await.delete_stream(STREAM).await.unwrap();
    make(&server, config()).await;
    publish(&source, &ids(20..23)).await.unwrap();
    let read = Offset { seq: 7, ..before.last };
    let now = log(&source).await;
    assert!(now.first.unwrap() > before.last);
    let opened = open(&source, read, before.last).await;
    assert_eq!((opened.at.seq, opened.lost), (0, 3));
    assert_eq!(Copy::behind(read).until(&source, 3).await, ids(20..23));
    // A process that never saw the old one cannot count.
    let other = super::source(settings(&server));
    assert_eq!(open(&other, read, before.last).await.lost, 1);
}

#[tokio::test]
async fn a_stream_made_anew_while_it_is_read_ends_the_reading() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..10)).await.unwrap();
    let mut copy = Copy::default();
    copy.until(&source, 10).await;
    server.jetstream().await.delete_stream(STREAM).await.unwrap();
    make(&server, config()).await;
    publish(&source, &ids(20..23)).await.unwrap();
    assert_eq!(copy.until(&source, 13).await[10..], ids(20..23));
    assert_eq!(copy.lost, 0);
}

#[tokio::test]
async fn messages_that_the_stream_deleted_before_they_were_read_are_counted() {
    let server = NatsServer::start(Options::default());
    let stream = make(&server, stream::Config { max_messages: 15, ..config() }).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..20)).await.unwrap();
    let end = log(&source).await.last;
    let at = |seq| Offset { seq, ..end };
    // Nothing was read yet, so nothing is missed.
    let opened = open(&source, Offset::default(), Offset::default()).await;
    assert_eq!((opened.at, opened.lost), (at(5), 0));
    let opened = open(&source, at(2), at(2)).await;
    assert_eq!((opened.at, opened.entries, opened.lost), (at(5), 5, 3));
    assert_eq!(id(&fetch(&source, 1, Duration::ZERO).await.unwrap().entries[0]), "e5");
    assert_eq!(open(&source, at(5), at(5)).await.lost, 0);
    stream.purge().await.unwrap();
    let opened = open(&source, at(12), at(12)).await;
    assert_eq!((opened.at, opened.lost), (at(20), 8));
    assert_eq!(log(&source).await.first, None);
    publish(&source, &ids(20..21)).await.unwrap();
    assert_eq!(id(&fetch(&source, 9, Duration::ZERO).await.unwrap().entries[0]), "e20");
}

#[tokio::test]
async fn messages_that_are_deleted_while_the_stream_is_read_do_not_end_the_reading() {
    let server = NatsServer::start(Options::default());
    make(&server, stream::Config { max_messages: 10, ..config() }).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..5)).await.unwrap();
    let mut copy = Copy::default();
    copy.until(&source, 5).await;
    publish(&source, &ids(5..40)).await.unwrap();
    assert_eq!(copy.until(&source, 15).await[5..], ids(30..40));
    assert_eq!(copy.errors, 0);
}

fn copy_directory(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}

/// Publishes 10 messages, then 5 that are lost with the restored backup; then `more` new ones.
async fn restored(more: u32) -> (NatsServer, fairlane::bus::nats::NatsSource, Copy) {
    let mut server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..10)).await.unwrap();
    server.kill9();
    let backup = tempfile::tempdir().unwrap();
    let backup = backup.path().join("store");
    copy_directory(&server.store(), &backup);
    server.restart();
    publish_again(&source, &ids(10..15)).await;
    let mut copy = Copy::default();
    copy.until(&source, 15).await;
    server.kill9();
    copy_directory(&backup, &server.store());
    server.restart();
    publish_again(&super::source(settings(&server)), &ids(100..100 + more)).await;
    (server, source, copy)
}

async fn publish_again(source: &fairlane::bus::nats::NatsSource, ids: &[String]) {
    crate::support::wait::eventually(super::LONG, "published", async || {
        publish(source, ids).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn after_a_lost_tail_new_messages_are_read_once_by_each_shard() {
    // Fewer and more new messages than were lost.
    for more in [3, 20] {
        let (server, source, mut copy) = restored(more).await;
        let position = copy.position;
        let count = 15 + usize::try_from(more).unwrap();
        assert_eq!(copy.until(&source, count).await[15..], ids(100..100 + more), "{more}");
        let end = copy.position;
        assert_eq!(log(&source).await.last, end);
        // A process that knows nothing of it.
        let other = super::source(settings(&server));
        let mut again = Copy::behind(position);
        assert_eq!(again.until(&other, usize::try_from(more).unwrap()).await, ids(100..100 + more));
        assert_eq!(again.lost, 0);
        // A shard that was behind.
        let behind = Offset { seq: 8, ..position };
        let opened = open(&other, behind, end).await;
        assert_eq!((opened.at, opened.lost), (behind, 0));
        let batch = fetch(&other, 100, Duration::ZERO).await.unwrap();
        let read: Vec<_> = batch.entries.iter().map(id).collect();
        assert_eq!(read, [ids(8..10), ids(100..100 + more)].concat());
        // What the other shard had is not new to it, and the rest is.
        let new = batch.entries.iter().filter(|entry| entry.offset > position).count();
        assert_eq!(new, usize::try_from(more).unwrap());
    }
}

#[tokio::test]
async fn copied_messages_are_deleted_when_they_are_old_enough() {
    let server = NatsServer::start(Options::default());
    let stream = make(&server, config()).await;
    let keep_long = {
        let mut settings = settings(&server);
        settings.trim = Some(Duration::from_secs(3_600));
        source(settings)
    };
    let mut settings = settings(&server);
    settings.trim = Some(Duration::ZERO);
    let source = source(settings);
    publish(&source, &ids(0..10)).await.unwrap();
    let log = log(&source).await;
    let at = |seq| Offset { seq, ..log.last };
    for source in [&keep_long, &source] {
        open(source, Offset::default(), Offset::default()).await;
    }
    let release = async |source: &fairlane::bus::nats::NatsSource, read, keep| {
        source.release(&progress(&log, read, keep)).await.unwrap()[0].deleted
    };
    assert_eq!(release(&keep_long, at(10), Some(at(10))).await, 0);
    assert_eq!(release(&source, at(10), None).await, 0);
    assert_eq!(release(&source, at(8), Some(at(7))).await, 6);
    assert_eq!(stream.get_info().await.unwrap().state.first_sequence, 7);
}
