//! `[[limits.bots]]`.

use std::num::{NonZeroU32, NonZeroUsize};

use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::pool::{BotsLimits, Totals};
use crate::rate::{BotLimits, BotRate, Bucket};

/// The limits of one bot in one pipeline.
#[derive(Debug, Clone)]
pub struct BotLimitsConfig {
    /// The bot.
    pub bot: BotId,
    /// The pipeline.
    pub pipeline: PipelineName,
    /// Its limits there.
    pub limits: BotLimits,
}

impl Config {
    /// How fast the bots of a pipeline are handled.
    #[must_use]
    pub fn limits_of_bots(&self, pipeline: &PipelineName) -> BotsLimits {
        let Some(config) = self.pipelines.get(pipeline) else { return BotsLimits::default() };
        let own = self.limited_bots.iter().filter(|own| own.pipeline == *pipeline);
        BotsLimits {
            general: BotLimits {
                weight: None,
                rate: config.rate.map(BotRate::At),
                burst: config.burst.map(NonZeroU32::get),
            },
            bots: own.map(|own| (own.bot.clone(), own.limits)).collect(),
            total: Totals {
                rate: config.total_rate.map(|rate| Bucket::new(rate, None)),
                concurrency: config.total_concurrency.map(NonZeroUsize::get),
            },
        }
    }
}
