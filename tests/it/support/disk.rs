//! A Redis that cannot write its snapshots, so that it refuses every write.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::aio::MultiplexedConnection;

use super::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A directory has the place of the snapshot.
pub(crate) struct Full {
    connection: MultiplexedConnection,
    place: PathBuf,
}

impl Full {
    /// Returns once the server refuses. It was started without snapshots (`--save ""`).
    pub(crate) async fn fill(mut connection: MultiplexedConnection) -> Self {
        let (_, directory): (String, String) =
            redis::cmd("CONFIG").arg("GET").arg("dir").query_async(&mut connection).await.unwrap();
        let place = Path::new(&directory).join("dump.rdb");
        fs::create_dir(&place).unwrap();
        saves(&mut connection, "1 1").await;
        eventually(LONG, "Redis refuses", async || {
            // One that runs already refuses another.
            let _: Result<(), _> = redis::cmd("BGSAVE").query_async(&mut connection).await;
            redis::cmd("PING").query_async::<()>(&mut connection).await.is_err()
        })
        .await;
        Self { connection, place }
    }

    /// Closes all other connections.
    pub(crate) async fn cut_others(&mut self) {
        let mut kill = redis::cmd("CLIENT");
        kill.arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]);
        let _: u64 = kill.query_async(&mut self.connection).await.unwrap();
    }

    /// The server accepts writes again. Closes the connection.
    pub(crate) async fn free(mut self) {
        fs::remove_dir(&self.place).unwrap();
        saves(&mut self.connection, "").await;
        redis::cmd("PING").query_async::<()>(&mut self.connection).await.unwrap();
        // Not only dropped: a test that then blocks its thread would keep it, and a private server stays for
        // others that are connected.
        redis::cmd("QUIT").query_async::<()>(&mut self.connection).await.unwrap();
    }
}

async fn saves(connection: &mut MultiplexedConnection, when: &str) {
    let () =
        redis::cmd("CONFIG").arg(&["SET", "save", when]).query_async(connection).await.unwrap();
}
