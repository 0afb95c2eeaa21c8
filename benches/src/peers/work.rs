//! The events that every system gets: the same bytes in the same order.

use std::io::Write as _;
use std::path::Path;

use fairlane::id::BotId;
use fairlane::sandbox::event;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use crate::error::BenchError;

/// Size of an event as JSON, bytes.
pub(super) const BYTES: usize = 200;

/// Events to be added, each as JSON.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub(super) events: Vec<Vec<u8>>,
    /// Number of events of each tenant.
    pub(super) per_tenant: Vec<u32>,
}

impl Work {
    /// `each` events of every tenant, with the tenants mixed at random.
    pub(super) fn mixed(tenants: usize, each: usize) -> Result<Self, BenchError> {
        let mut order: Vec<usize> = (0..tenants * each).map(|n| n % tenants).collect();
        // A fixed seed, so that every system and every run has the same order.
        order.shuffle(&mut rand::rngs::SmallRng::seed_from_u64(7));
        Self::of(tenants, order)
    }

    /// `each` events of the first `busy` tenants, in turn.
    pub(super) fn backlog(tenants: usize, busy: usize, each: usize) -> Result<Self, BenchError> {
        Self::of(tenants, (0..busy * each).map(|n| n % busy))
    }

    /// `count` events of the other tenants, each of a tenant at random.
    pub(super) fn quiet(tenants: usize, busy: usize, count: usize) -> Result<Self, BenchError> {
        let mut random = rand::rngs::SmallRng::seed_from_u64(13);
        Self::of(tenants, (0..count).map(|_| random.random_range(busy..tenants)))
    }

    fn of(tenants: usize, order: impl IntoIterator<Item = usize>) -> Result<Self, BenchError> {
        let mut per_tenant = vec![0; tenants];
        let events = order.into_iter().map(|tenant| {
            let position = &mut per_tenant[tenant];
            let bot = BotId::parse(&format!("bot-{tenant}"))?;
            let event = event(&bot, &position.to_string(), "bench", BYTES)?;
            *position += 1;
            Ok::<_, BenchError>(event)
        });
        let events = events.collect::<Result<_, _>>()?;
        Ok(Self { events, per_tenant })
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Writes one event per line.
    pub(super) fn write(&self, path: &Path) -> Result<(), BenchError> {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        for event in &self.events {
            file.write_all(event)?;
            file.write_all(b"\n")?;
        }
        Ok(file.flush()?)
    }
}

/// The event with the time at which it was due, in microseconds since 1970.
pub(super) fn due_at(event: &[u8], due: u64) -> Vec<u8> {
    // The bench has made the event itself, so it is JSON with this field.
    let mut value: Value = serde_json::from_slice(event).unwrap_or_default();
    value["data"]["sent"] = due.into();
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(event: &[u8]) -> (String, String) {
        let value: Value = serde_json::from_slice(event).unwrap();
        let text = |name: &str| value[name].as_str().unwrap().to_owned();
        (text("botid"), text("id"))
    }

    #[test]
    fn every_tenant_has_its_events_in_order_and_every_event_has_the_same_size() {
        let work = Work::mixed(3, 4).unwrap();
        assert_eq!(work.per_tenant, [4, 4, 4]);
        assert!(work.events.iter().all(|event| event.len() == BYTES));
        for tenant in ["bot-0", "bot-1", "bot-2"] {
            let places = work.events.iter().map(|event| place(event));
            let ids: Vec<_> = places.filter(|(bot, _)| bot == tenant).map(|(_, id)| id).collect();
            assert_eq!(ids, ["0", "1", "2", "3"]);
        }
    }

    #[test]
    fn busy_tenants_have_the_backlog_and_the_others_the_quiet_events() {
        let backlog = Work::backlog(5, 2, 3).unwrap();
        assert_eq!((backlog.len(), &backlog.per_tenant[..]), (6, &[3, 3, 0, 0, 0][..]));
        let quiet = Work::quiet(5, 2, 30).unwrap();
        assert_eq!(quiet.per_tenant[..2], [0, 0]);
        assert_eq!(quiet.per_tenant.iter().sum::<u32>(), 30);
    }

    #[test]
    fn the_due_time_is_part_of_the_event() {
        let work = Work::mixed(1, 1).unwrap();
        let due = due_at(&work.events[0], 1_700_000_000_000_000);
        let value: Value = serde_json::from_slice(&due).unwrap();
        assert_eq!(value["data"]["sent"], 1_700_000_000_000_000_u64);
        assert_eq!(place(&due), place(&work.events[0]));
        assert_eq!(due.len(), BYTES);
    }
}
