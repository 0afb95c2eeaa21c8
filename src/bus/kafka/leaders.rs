//! Which broker leads a partition. Each broker is asked alone: one that does not answer concerns only the
//! partitions that it leads.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::asker::Asker;
use super::position::Ends;
use super::{KafkaSource, Partition, lock};
use crate::bus::BusError;

/// A broker that did not answer while another did is not asked again for this time: readers wait for the
/// answer.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// What brokers name as the leader of a partition without one.
const NONE: i32 = -1;

/// The leader of a partition, as far as known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Leader {
    /// Partitions without one.
    None,
    /// It was not asked for yet.
    NotKnown,
    /// The number of a broker.
    Broker(i32),
}

/// The leaders of partitions, and which brokers do not answer.
#[derive(Debug, Default)]
pub(super) struct Leaders {
    of: HashMap<Partition, i32>,
    silent: HashMap<Leader, (Instant, BusError)>,
}

impl Leaders {
    /// Learns all partitions with their leaders.
    pub(super) fn learn(&mut self, found: &[(Partition, i32)]) {
        self.of = found.iter().cloned().collect();
    }

    /// The places of these partitions, by their leader.
    pub(super) fn groups(&self, partitions: &[Partition]) -> BTreeMap<Leader, Vec<usize>> {
        let mut groups = BTreeMap::<_, Vec<_>>::new();
        for (place, partition) in partitions.iter().enumerate() {
            let leader = match self.of.get(partition) {
                None => Leader::NotKnown,
                Some(&NONE) => Leader::None,
                Some(&broker) => Leader::Broker(broker),
            };
            groups.entry(leader).or_default().push(place);
        }
        groups
    }

    /// Why a broker is not asked now.
    fn silent(&self, leader: Leader, now: Instant) -> Option<BusError> {
        let (since, error) = self.silent.get(&leader)?;
        (now.duration_since(*since) < SILENT_FOR).then(|| error.clone())
    }

    /// Notes which brokers have answered: if none has, it is the whole cluster, and all are asked again.
    fn note(&mut self, answered: &[(Leader, Option<BusError>)], now: Instant) {
        let some = answered.iter().any(|(_, error)| error.is_none());
        for (leader, error) in answered {
            match error {
                Some(error) if some && error.is_passing() => {
                    self.silent.insert(*leader, (now, error.clone()));
                }
                _ => {
                    self.silent.remove(leader);
                }
            }
        }
    }
}

impl KafkaSource {
    /// The extents of these partitions, in order, as far as their leaders answer.
    ///
    /// # Errors
    /// If no leader answers.
    pub(super) async fn ends(
        &self,
        asker: &Asker,
        partitions: &[Partition],
    ) -> Result<Vec<Result<Ends, BusError>>, BusError> {
        let groups = lock(&self.leaders).groups(partitions);
        let questions = groups.into_iter().map(async |(leader, places)| {
            let silent = lock(&self.leaders).silent(leader, Instant::now());
            let of_it: Vec<_> = places.iter().map(|place| partitions[*place].clone()).collect();
            let (is_asked, answer) = match (leader, silent) {
                (Leader::None, _) => (false, Err(self.without_leader())),
                (_, Some(error)) => (false, Err(error)),
                _ => (true, asker.ends(&of_it).await),
            };
            (leader, places, is_asked, answer)
        });
        let answers = join_all(questions).await;
        let errors = answers.iter().filter(|(_, _, is_asked, _)| *is_asked);
        let errors: Vec<_> = errors
            .map(|(leader, _, _, answer)| (*leader, answer.as_ref().err().cloned()))
            .collect();
        lock(&self.leaders).note(&errors, Instant::now());
        let mut ends: Vec<Option<Result<Ends, BusError>>> = vec![None; partitions.len()];
        for (_, places, _, answer) in answers {
            match answer {
                Ok(found) => {
                    for (place, found) in places.into_iter().zip(found) {
                        ends[place] = Some(found);
                    }
                }
                Err(error) => {
                    for place in places {
                        ends[place] = Some(Err(error.clone()));
                    }
                }
            }
        }
        let ends: Vec<_> = ends
            .into_iter()
            .map(|ends| ends.unwrap_or_else(|| Err(self.without_leader())))
            .collect();
        match ends.iter().find_map(|ends| ends.as_ref().err()) {
            Some(error) if ends.iter().all(Result::is_err) => Err(error.clone()),
            _ => Ok(ends),
        }
    }

    fn without_leader(&self) -> BusError {
        BusError::Unknown { bus: self.settings.bus(), cause: "it has no leader".to_owned() }
    }
}

/// Why a partition cannot be read now, without the name of its bus.
pub(super) fn cause(error: &BusError) -> Arc<str> {
    match error {
        BusError::Connect { cause, .. } => {
            format!("the broker that leads it does not answer: {cause}").into()
        }
        BusError::Unknown { cause, .. } | BusError::Refused { cause, .. } => cause.as_str().into(),
        error => error.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(number: i32) -> Partition {
        Partition { topic: "t".into(), number }
    }

    #[test]
    fn partitions_are_asked_for_by_their_leader() {
        let mut leaders = Leaders::default();
        leaders.learn(&[(partition(0), 7), (partition(1), NONE), (partition(2), 7)]);
        let groups = leaders.groups(&[2, 3, 1, 0].map(partition));
        let of = |leader| groups.get(&leader).cloned().unwrap_or_default();
        assert_eq!(of(Leader::Broker(7)), [0, 3]);
        assert_eq!((of(Leader::NotKnown), of(Leader::None)), (vec![1], vec![2]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_that_alone_does_not_answer_is_left_alone_for_a_while() {
        let mut leaders = Leaders::default();
        let [one, two] = [1, 2].map(Leader::Broker);
        let bus = "Kafka".to_owned();
        let error = BusError::Connect { bus, cause: "timed out".to_owned() };
        let silent = |leaders: &Leaders, leader| leaders.silent(leader, Instant::now()).is_some();
        let failed = |leader| (leader, Some(error.clone()));
        leaders.note(&[failed(one), failed(two)], Instant::now());
        assert!(!silent(&leaders, one), "the whole cluster does not answer");
        leaders.note(&[failed(one), (two, None)], Instant::now());
        assert!(silent(&leaders, one) && !silent(&leaders, two));
        tokio::time::advance(SILENT_FOR).await;
        assert!(!silent(&leaders, one), "it is asked again");
        leaders.note(&[failed(one), (two, None)], Instant::now());
        leaders.note(&[(one, None)], Instant::now());
        assert!(!silent(&leaders, one), "it has answered");
    }
}
