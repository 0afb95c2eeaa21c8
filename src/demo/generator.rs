//! Generates events of many bots; only a few bots are busy.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use super::BUSY;
use crate::clock::{Clock as _, SystemClock, micros};
use crate::event::{Event, EventError};
use crate::id::BotId;
use crate::sandbox::SandboxError;

/// The attribute with the time when an event was sent, µs since 1970.
const SENT: &str = "sent";

/// The time when a generated event was sent, µs since 1970.
pub(super) fn sent(event: &Event) -> Option<u64> {
    event.extension(SENT)?.as_str()?.parse().ok()
}

/// The form of event ids.
#[derive(Debug)]
pub(crate) enum Ids {
    /// Positions among the events of the bot: unique for the bot within one run.
    Positions,
    /// Unique over all runs, because receivers detect repeated events by their ids.
    Unique {
        /// The part of this run.
        run: uuid::Uuid,
        /// The number of the next event.
        next: u64,
    },
}

impl Ids {
    /// Unique ids for a new run.
    pub(crate) fn unique() -> Self {
        Self::Unique { run: uuid::Uuid::now_v7(), next: 0 }
    }
}

/// Generates events: for quiet bots by a Zipf distribution, and campaigns for the busy ones.
pub(crate) struct Generator {
    random: SmallRng,
    /// Cumulative Zipf weights of the quiet bots.
    weights: Vec<f64>,
    positions: Vec<u32>,
    ids: Ids,
}

impl Generator {
    #[expect(clippy::cast_precision_loss, reason = "a number of bots")]
    /// A generator for this number of bots.
    pub(crate) fn new(bots: usize, ids: Ids) -> Self {
        let mut sum = 0.0;
        let weights = (1..=bots.saturating_sub(BUSY).max(1))
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        let positions = vec![0; bots.max(BUSY + 1)];
        Self { random: SmallRng::seed_from_u64(42), weights, positions, ids }
    }

    /// A random quiet bot.
    pub(crate) fn quiet(&mut self) -> usize {
        let total = self.weights.last().copied().unwrap_or(1.0);
        let point = self.random.random_range(0.0..total);
        BUSY + self.weights.partition_point(|&weight| weight < point).min(self.weights.len() - 1)
    }

    /// The next event of a bot, in the form of the bus.
    pub(crate) fn event(&mut self, bot: usize) -> Result<Vec<u8>, SandboxError> {
        let (kind, data) = self.happening();
        let position = self.positions[bot];
        self.positions[bot] += 1;
        let id = match &mut self.ids {
            Ids::Positions => position.to_string(),
            Ids::Unique { run, next } => {
                *next += 1;
                format!("{}-{next}", run.simple())
            }
        };
        let subscriber = self.random.random_range(0..10_000);
        let event = Event::builder(kind, &BotId::parse(&format!("bot-{bot}"))?)
            .id(id)
            .source("demo")
            .subject(format!("subscriber-{subscriber}"))
            .extension(SENT, json!(micros(SystemClock.now()).to_string()))
            .data(&data)
            .map_err(EventError::Json)?
            .build()?;
        Ok(serde_json::to_vec(&event).map_err(EventError::Json)?)
    }

    /// The type of an event, and its data in the form that profiles of the automations understand.
    fn happening(&mut self) -> (&'static str, Value) {
        const TAGS: [&str; 4] = ["vip", "newsletter", "trial", "cart-left"];
        const CHANNELS: [&str; 3] = ["telegram", "whatsapp", "instagram"];
        const LANGUAGES: [&str; 3] = ["en", "es", "pt"];
        let random = &mut self.random;
        let mut one_of = |texts: &[&'static str]| texts[random.random_range(0..texts.len())];
        let (tag, channel, language) = (one_of(&TAGS), one_of(&CHANNELS), one_of(&LANGUAGES));
        match random.random_range(0..6) {
            0 => ("message.received", json!({ "channel": channel, "text": "hello" })),
            1 => ("tag.applied", json!({ "tag": tag })),
            2 => ("tag.removed", json!({ "tag": tag })),
            3 if random.random() => {
                ("field.changed", json!({ "field": "language", "value": language }))
            }
            3 => {
                let age = random.random_range(16..90);
                ("field.changed", json!({ "field": "age", "value": age }))
            }
            4 => ("subscriber.created", json!({ "channel": channel, "language": language })),
            _ => {
                let cents = random.random_range(100..20_000);
                ("order.paid", json!({ "cents": cents, "currency": "EUR" }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::automations::profile::{self, Profile};

    #[test]
    fn the_generator_prefers_few_bots_but_reaches_many() {
        let mut generator = Generator::new(1_000, Ids::Positions);
        let mut met = vec![0_u32; 1_000];
        for _ in 0..20_000 {
            met[generator.quiet()] += 1;
        }
        assert!(
            met[..BUSY].iter().all(|&count| count == 0),
            "campaign bots send by campaigns only"
        );
        assert!(met[BUSY] > 20 * met[900].max(1), "{} {}", met[BUSY], met[900]);
        assert!(met.iter().filter(|&&count| count > 0).count() > 800);
    }

    #[test]
    fn no_id_repeats_among_bots_and_runs() {
        let mut ids = BTreeSet::new();
        for _ in 0..3 {
            let mut generator = Generator::new(20, Ids::unique());
            for number in 0..1_000 {
                let event = Event::from_json(&generator.event(BUSY + number % 10).unwrap());
                assert!(ids.insert(event.unwrap().id().to_owned()));
            }
        }
    }

    #[test]
    fn every_type_that_changes_a_profile_is_applied_by_the_automations() {
        let mut generator = Generator::new(20, Ids::unique());
        let (mut profile, mut met) = (Profile::default(), BTreeMap::new());
        for _ in 0..2_000 {
            let event = Event::from_json(&generator.event(BUSY).unwrap()).unwrap();
            let changes = profile::changes(&event).unwrap();
            *met.entry(event.kind().to_owned()).or_insert(0) += changes.len();
            for change in changes {
                profile.apply(change).unwrap();
            }
        }
        let changing = ["field.changed", "subscriber.created", "tag.applied", "tag.removed"];
        let others = ["message.received", "order.paid"];
        let expected: BTreeSet<_> = changing.iter().chain(&others).copied().collect();
        assert_eq!(met.keys().map(String::as_str).collect::<BTreeSet<_>>(), expected);
        for kind in changing {
            assert!(met[kind] > 0, "{kind} changes nothing");
        }
        let fields: Vec<_> = profile.fields.keys().map(String::as_str).collect();
        assert_eq!(fields, ["age", "channel", "language"]);
    }

    #[test]
    fn when_it_was_sent_is_read_back() {
        let mut generator = Generator::new(20, Ids::Positions);
        let event = Event::from_json(&generator.event(BUSY).unwrap()).unwrap();
        let now = micros(SystemClock.now());
        assert!(sent(&event).is_some_and(|sent| now - sent < 60_000_000));
        assert_eq!(event.id(), "0");
    }
}
