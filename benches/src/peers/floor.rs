//! The floor: readers of a stream with XREADGROUP and XACK, in threads of this process. They keep no
//! order per tenant beside each other, share nothing fairly, and retry nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fairlane::event::EventError;
use fairlane::sandbox::{Rig, STREAM};
use redis::Connection;
use serde::Deserialize;
use tokio::task::JoinHandle;

use super::system::{BATCH, HANDLING, Measure};
use super::tally::{Seen, Tally};
use super::workers::Payload;
use crate::error::BenchError;

const GROUP: &str = "floor";
/// How long a read waits for events, ms. Then the reader looks whether it must stop.
const BLOCK_MS: usize = 100;

/// The streams of an answer: their names and their entries with ids and fields.
type Streams = Vec<(String, Vec<(String, Vec<String>)>)>;

#[derive(Deserialize)]
struct Event {
    id: String,
    botid: String,
    data: Payload,
}

/// Connected readers.
pub(super) struct Floor {
    connections: Vec<Connection>,
    measure: Measure,
}

/// Readers at work. They end when this is dropped.
pub(super) struct Readers {
    is_stopped: Arc<AtomicBool>,
    readers: Vec<JoinHandle<Result<(), BenchError>>>,
}

impl Floor {
    pub(super) fn open(rig: &Rig, readers: usize, measure: Measure) -> Result<Self, BenchError> {
        let client = redis::Client::open(format!("redis+unix://{}", rig.target()))?;
        let connect = |_| client.get_connection();
        let mut connections = (0..readers).map(connect).collect::<Result<Vec<_>, _>>()?;
        if let Some(connection) = connections.first_mut() {
            let mut create = redis::cmd("XGROUP");
            create.arg("CREATE").arg(STREAM).arg(GROUP).arg("0").arg("MKSTREAM");
            let () = create.query(connection)?;
        }
        Ok(Self { connections, measure })
    }

    /// Maximum number of events per read. An event that takes time must not wait behind others of
    /// its batch while another reader has nothing to do.
    pub(super) fn count(&self) -> usize {
        if self.measure == Measure::Fairness { 1 } else { BATCH }
    }

    pub(super) fn start(self, tally: &Arc<Tally>) -> Readers {
        let count = self.count();
        let handling = (self.measure == Measure::Fairness).then_some(HANDLING);
        let is_stopped = Arc::new(AtomicBool::new(false));
        let readers = self.connections.into_iter().enumerate().map(|(number, connection)| {
            let (tally, is_stopped) = (Arc::clone(tally), Arc::clone(&is_stopped));
            tokio::task::spawn_blocking(move || {
                read(connection, number, count, handling, &tally, &is_stopped)
            })
        });
        let readers = readers.collect();
        Readers { is_stopped, readers }
    }
}

impl Readers {
    pub(super) async fn stop(mut self) -> Result<(), BenchError> {
        self.is_stopped.store(true, Ordering::Relaxed);
        for reader in self.readers.drain(..) {
            // A reader is never cancelled. Its panic continues here.
            reader.await.unwrap_or_else(|failed| std::panic::resume_unwind(failed.into_panic()))?;
        }
        Ok(())
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

fn read(
    mut connection: Connection,
    number: usize,
    count: usize,
    handling: Option<Duration>,
    tally: &Tally,
    is_stopped: &AtomicBool,
) -> Result<(), BenchError> {
    while !is_stopped.load(Ordering::Relaxed) {
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg(GROUP).arg(number).arg("COUNT").arg(count);
        read.arg("BLOCK").arg(BLOCK_MS).arg("STREAMS").arg(STREAM).arg(">");
        let found: Option<Streams> = read.query(&mut connection)?;
        let mut confirm = redis::cmd("XACK");
        confirm.arg(STREAM).arg(GROUP);
        let mut handled = Vec::new();
        for (id, fields) in found.into_iter().flatten().flat_map(|(_, entries)| entries) {
            let text = fields.get(1).map_or("", String::as_str);
            let event: Event = serde_json::from_str(text).map_err(EventError::Json)?;
            let Some(seen) = Seen::new(&event.botid, &event.id, event.data.sent) else { continue };
            tally.started(seen);
            if let Some(handling) = handling {
                std::thread::sleep(handling);
            }
            tally.ended(seen);
            handled.push(seen);
            confirm.arg(id);
        }
        if !handled.is_empty() {
            let () = confirm.query(&mut connection)?;
            tally.completed(handled.into_iter());
        }
    }
    Ok(())
}
