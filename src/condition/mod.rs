//! The state of a bot in one pipeline, in one sentence with its times: for the page of the bot and for
//! the command line. A pure function makes the sentence from what was read.

mod words;

use crate::clock::millis;
use crate::config::PipelineConfig;
use crate::history::Attempt;
use crate::queue::{BotState, BotView, Holdings, LastFailure};

/// What was read of a bot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Condition<'a> {
    pub(crate) look: &'a BotView,
    pub(crate) failure: Option<&'a LastFailure>,
    /// Its last attempts, the newest first.
    pub(crate) attempts: &'a [Attempt],
    pub(crate) holds: &'a Holdings,
    /// Whether the whole pipeline is paused.
    pub(crate) stopped: bool,
    /// The process that handles the bot, if it is known.
    pub(crate) handled: Option<Handled<'a>>,
    pub(crate) terms: &'a Terms,
}

/// A slice that is being handled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handled<'a> {
    /// Since when, ms since 1970.
    pub(crate) since_ms: u64,
    /// The name of its machine, and its process id.
    pub(crate) process: (&'a str, u32),
}

/// What the pipeline grants. `None`: it is not in the configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct Terms {
    /// An event that failed this often becomes a dead letter.
    pub(crate) attempts_max: Option<u32>,
    /// Maximum rate of the events of one bot.
    pub(crate) rate: Option<String>,
    /// How long attempts are kept, ms.
    pub(crate) kept_ms: Option<u64>,
    /// The host that is called.
    pub(crate) target: Option<String>,
}

/// How a sentence is to be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    /// Something waits or rests as it should.
    Waits,
    /// Something failed.
    Bad,
}

impl Terms {
    /// The terms of a pipeline. Its target is not shown to tenants.
    pub(crate) fn of(config: Option<&PipelineConfig>, sees_target: bool) -> Self {
        let Some(config) = config else { return Self::default() };
        let target = config.url.as_ref().filter(|_| sees_target).map(|url| url.host().to_owned());
        Self {
            attempts_max: Some(config.max_attempts.get()),
            rate: config.rate.map(|rate| rate.to_string()),
            kept_ms: (config.history.slices > 0).then(|| millis(config.history.keep)),
            target,
        }
    }
}

impl Condition<'_> {
    /// Whether nothing of the bot is known.
    pub(crate) fn is_unseen(&self) -> bool {
        self.look.state == BotState::Idle
            && self.look.depth == 0
            && self.attempts.is_empty()
            && [self.holds.dead_letters, self.holds.delayed_events, self.holds.pending] == [0; 3]
    }

    pub(crate) fn tone(&self) -> Tone {
        let fails = self.failure.is_some() || self.look.attempts > 0;
        if fails || self.holds.dead_letters > 0 {
            return Tone::Bad;
        }
        match self.look.state {
            BotState::Idle | BotState::Leased => Tone::Good,
            BotState::Ready | BotState::Parked | BotState::Paused => Tone::Waits,
        }
    }
}
