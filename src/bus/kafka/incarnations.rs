//! Which topics were made anew, as far as other processes have found that out.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::asker::Asker;
use super::{FAILED, FIRST, KafkaSource, Partition, lock};

/// Interval of reading the incarnations that other processes have committed.
const INCARNATIONS_EVERY: Duration = Duration::from_secs(30);
/// The same after a failure: readers wait for the answer.
const INCARNATIONS_AGAIN: Duration = Duration::from_secs(15);

impl KafkaSource {
    /// Another process may have found that a topic was made anew. Returns whether that is known: otherwise
    /// a pipeline that is new to the topic would start before its first record.
    pub(super) async fn read_incarnations(&self, asker: &Asker, partitions: &[Partition]) -> bool {
        let read = *lock(&self.incarnations_read);
        if partitions.is_empty() || read.is_some_and(|read| read.elapsed() < INCARNATIONS_EVERY) {
            return true;
        }
        let failed = *lock(&self.incarnations_failed);
        if failed.is_some_and(|failed| failed.elapsed() < INCARNATIONS_AGAIN) {
            return read.is_some();
        }
        match asker.committed(partitions).await {
            Ok(found) => {
                let mut incarnations = lock(&self.incarnations);
                for (partition, found) in partitions.iter().zip(found) {
                    if let Some(found) = found.filter(|found| found.incarnation > FIRST) {
                        let known = incarnations.entry(partition.clone()).or_default();
                        *known = found.incarnation.max(*known);
                    }
                }
            }
            // A later listing asks again.
            Err(error) if error.is_passing() => {
                debug!(source = self.settings.name, %error, "cannot read committed offsets");
                *lock(&self.incarnations_failed) = Some(Instant::now());
                return read.is_some();
            }
            // Without the right, what is read tells it too.
            Err(error) => {
                if let Some(suppressed) = FAILED.take("committed") {
                    warn!(source = self.settings.name, %error, suppressed,
                        "cannot read committed offsets: permit Read and Describe on the group, or a new pipeline may get old records of a topic that was made anew");
                }
            }
        }
        *lock(&self.incarnations_read) = Some(Instant::now());
        true
    }
}
