//! Counts what is not read yet. Each broker is asked alone, and reading waits only for those that have
//! answered the question before.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::asker::Asker;
use super::leaders::{self, Leader};
use super::{FAILED, KafkaSettings, KafkaSource, Partition, lock};
use crate::bus::BusError;

/// Maximum wait for an answer: reading waits too.
const WITHIN: Duration = Duration::from_secs(2);
/// A broker that did not answer is asked again after this time.
const AGAIN: Duration = Duration::from_secs(15);

/// What the brokers were asked.
pub(super) type Counting = HashMap<Leader, Count>;

type Answer = Result<Vec<Option<i64>>, BusError>;

/// The question to one broker.
#[derive(Default)]
pub(super) struct Count {
    /// What is not answered yet.
    asked: Option<(Vec<Partition>, BoxFuture<'static, Answer>)>,
    /// Since when it has not answered in time.
    silent: Option<Instant>,
    /// Why it gave no answer to the last question.
    failed: Option<BusError>,
}

impl Count {
    /// The offsets of the next entries, if the answer is there in time.
    async fn next(&mut self, counter: &Asker, partitions: Vec<Partition>) -> Vec<(Partition, i64)> {
        if self.asked.is_none() {
            if self.silent.is_some_and(|since| since.elapsed() < AGAIN) {
                return Vec::new();
            }
            let (counter, asked) = (counter.clone(), partitions.clone());
            let answer = async move { counter.nexts(&asked).await };
            self.asked = Some((partitions, answer.boxed()));
        }
        let Some((asked, mut answer)) = self.asked.take() else { return Vec::new() };
        let within = if self.silent.is_some() { Duration::ZERO } else { WITHIN };
        match timeout(within, &mut answer).await {
            Ok(Ok(nexts)) => {
                (self.silent, self.failed) = (None, None);
                let nexts = asked.into_iter().zip(nexts);
                nexts.filter_map(|(partition, next)| Some((partition, next?))).collect()
            }
            Ok(Err(error)) => {
                (self.silent, self.failed) = (Some(Instant::now()), Some(error));
                Vec::new()
            }
            Err(_) => {
                self.silent = Some(Instant::now());
                self.asked = Some((asked, answer));
                Vec::new()
            }
        }
    }
}

/// What is known of a partition.
pub(super) enum Next {
    /// The offset of its next entry.
    At(i64),
    /// Nothing now.
    Unknown,
    /// Nothing, and it cannot be read, while others can.
    Waits(BusError),
}

impl KafkaSource {
    /// The offsets of the next entries of these partitions, as far as known.
    pub(super) async fn nexts(&self, partitions: &[Partition]) -> Vec<Next> {
        let mut nexts: Vec<_> = partitions.iter().map(|_| Next::Unknown).collect();
        // Events of a transaction that stays open wait too.
        let counter = match self.client(&self.counter, KafkaSettings::counting).await {
            Ok(counter) => counter,
            Err(error) => {
                self.not_known(&error);
                return nexts;
            }
        };
        let groups = lock(&self.leaders).groups(partitions);
        let mut counting = self.counting.lock().await;
        let mut before = std::mem::take(&mut *counting);
        let asked = groups.into_iter().map(|(leader, places)| {
            let mut count = before.remove(&leader).unwrap_or_default();
            let (of_it, counter) =
                (places.iter().map(|place| partitions[*place].clone()).collect(), &counter);
            async move {
                let found = match leader {
                    Leader::None => Vec::new(),
                    _ => count.next(counter, of_it).await,
                };
                (leader, places, count, found)
            }
        });
        let answers = join_all(asked.collect::<Vec<_>>()).await;
        let some = answers.iter().any(|(_, _, _, found)| !found.is_empty());
        for (leader, places, count, found) in answers {
            let found: HashMap<_, _> = found.into_iter().collect();
            for place in places {
                let partition = &partitions[place];
                nexts[place] = match (found.get(partition), leader, &count.failed) {
                    (Some(next), ..) => Next::At(*next),
                    (None, Leader::None, _) if some => self.waits(partition, "it has no leader"),
                    (None, _, Some(error)) if some => self.waits(partition, &leaders::cause(error)),
                    _ => Next::Unknown,
                };
            }
            if let Some(error) = &count.failed {
                self.not_known(error);
            }
            counting.insert(leader, count);
        }
        nexts
    }

    fn waits(&self, partition: &Partition, cause: &str) -> Next {
        let log = self.log_name(partition).to_string();
        Next::Waits(BusError::Waits { log, cause: cause.to_owned() })
    }

    fn not_known(&self, error: &BusError) {
        if let Some(suppressed) = FAILED.take("lag") {
            warn!(source = self.settings.name, %error, suppressed, "the lag is not known now");
        }
    }
}
