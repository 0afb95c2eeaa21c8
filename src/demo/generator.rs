//! Events of many bots, few of them busy.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};

use super::BUSY;
use crate::bench::BenchError;
use crate::clock::{Clock as _, SystemClock, micros};
use crate::event::{Event, EventError};
use crate::id::BotId;

#[derive(Serialize, Deserialize)]
pub(super) struct Payload {
    pub(super) sent: u64,
    tag: String,
    channel: String,
}

/// Makes events: quiet bots by Zipf, campaigns for the busy ones.
pub(crate) struct Generator {
    random: SmallRng,
    /// Cumulated Zipf weights of the quiet bots.
    weights: Vec<f64>,
    positions: Vec<u32>,
    prefix: String,
}

impl Generator {
    #[expect(clippy::cast_precision_loss, reason = "a number of bots")]
    /// For `bots` tenants; ids of events begin with `prefix`.
    pub(crate) fn new(bots: usize, prefix: &str) -> Self {
        let mut sum = 0.0;
        let weights = (1..=bots.saturating_sub(BUSY).max(1))
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        let positions = vec![0; bots.max(BUSY + 1)];
        Self { random: SmallRng::seed_from_u64(42), weights, positions, prefix: prefix.to_owned() }
    }

    /// One of the quiet bots.
    pub(crate) fn quiet(&mut self) -> usize {
        let total = self.weights.last().copied().unwrap_or(1.0);
        let point = self.random.random_range(0.0..total);
        BUSY + self.weights.partition_point(|&weight| weight < point).min(self.weights.len() - 1)
    }

    /// The next event of a bot, as the bus takes it.
    pub(crate) fn event(&mut self, bot: usize) -> Result<Vec<u8>, BenchError> {
        const KINDS: [(&str, &str); 5] = [
            ("message.received", "telegram"),
            ("tag.applied", "whatsapp"),
            ("field.changed", "instagram"),
            ("subscriber.created", "telegram"),
            ("order.paid", "web"),
        ];
        const TAGS: [&str; 4] = ["vip", "newsletter", "trial", "cart-left"];
        let (kind, channel) = KINDS[self.random.random_range(0..KINDS.len())];
        let payload = Payload {
            sent: micros(SystemClock.now()),
            tag: TAGS[self.random.random_range(0..TAGS.len())].to_owned(),
            channel: channel.to_owned(),
        };
        let id = format!("{}{}", self.prefix, self.positions[bot]);
        self.positions[bot] += 1;
        let subscriber = self.random.random_range(0..10_000);
        let event = Event::builder(kind, &BotId::parse(&format!("bot-{bot}"))?)
            .id(id)
            .source("demo")
            .subject(format!("subscriber-{subscriber}"))
            .data(&payload)
            .map_err(EventError::Json)?
            .build()?;
        Ok(serde_json::to_vec(&event).map_err(EventError::Json)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_prefers_few_bots_but_reaches_many() {
        let mut generator = Generator::new(1_000, "");
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
}
