//! Tests with a real `redis-server`.

use redis::aio::MultiplexedConnection;

use super::*;

async fn client(rig: &Rig) -> MultiplexedConnection {
    let client = redis::Client::open(rig.url().expose()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

/// Fails if the server of this client goes on.
async fn ends(mut client: MultiplexedConnection) {
    let ended = async {
        while redis::cmd("PING").query_async::<Value>(&mut client).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("the server ends");
}

/// Such as the client of a task that was aborted a moment ago.
#[tokio::test]
async fn a_rig_is_removed_with_its_server_although_a_client_is_still_connected() {
    let rig = Rig::start().await.unwrap();
    let (directory, held) = (rig.directory().to_owned(), client(&rig).await);
    rig.remove().unwrap();
    assert!(!directory.exists());
    ends(held).await;
}

#[tokio::test]
async fn a_dropped_rig_leaves_neither_its_server_nor_its_directory() {
    let rig = Rig::start().await.unwrap();
    let (directory, held) = (rig.directory().to_owned(), client(&rig).await);
    drop(rig);
    assert!(!directory.exists());
    ends(held).await;
}
