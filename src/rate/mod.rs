//! The limits of a bot as numbers: rates, weights, and the token bucket. Pure; the scripts keep the
//! buckets (`lua/permit.lua`, `lua/budget.lua`).
//!
//! The token bucket is the generic cell rate algorithm (GCRA, ITU-T I.371): one number per bucket, the
//! time at which it is full again. An event moves this time by one interval. An event may be handed
//! out while the time is at most `burst - 1` intervals ahead of now.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum number of events that a bucket holds.
pub const BURST_MAX: u32 = 1_000_000;
/// A bucket is full again after at most this time (ten years), µs: so every time stays exact.
const DEPTH_MAX_US: f64 = 3.2e14;
/// Parts of one in which numbers are kept.
const PARTS: f64 = 1_000.0;
/// Maximum number of events per unit of time.
const AMOUNT_MAX: f64 = 1_000_000.0;

/// Why a text is no limit. Says what to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Not a rate.
    #[error(
        "write events per second, minute or hour, from 0.001 to 1000000, such as \"10/s\", \"0.5/s\", \"30/m\" or \"100/h\"; to stop a bot, pause it"
    )]
    Rate,
    /// Not a weight.
    #[error("write a number from 0.01 to 1000, such as 0.5 or 3")]
    Weight,
    /// Not a burst.
    #[error("write a whole number from 1 to 1000000")]
    Burst,
}

/// A number with up to three decimals, in thousandths.
fn thousandths(text: &str, least: f64, most: f64) -> Option<u64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = text.parse().ok().filter(|_| plain)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1e9")]
    (least..=most).contains(&number).then(|| (number * PARTS).round() as u64)
}

fn show_thousandths(number: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (whole, part) = (number / 1_000, number % 1_000);
    if part == 0 {
        return write!(f, "{whole}");
    }
    let decimals = format!("{part:03}");
    write!(f, "{whole}.{}", decimals.trim_end_matches('0'))
}

/// Events per unit of time, such as `10/s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Thousandths of events.
    amount: u64,
    per: Per,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Per {
    Second,
    Minute,
    Hour,
}

impl Per {
    fn unit(self) -> (&'static str, f64) {
        match self {
            Self::Second => ("s", 1e6),
            Self::Minute => ("m", 60e6),
            Self::Hour => ("h", 3_600e6),
        }
    }
}

impl Rate {
    /// Time between two events, µs.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "at most 1e9")]
    pub fn interval_us(self) -> f64 {
        self.per.unit().1 * PARTS / self.amount as f64
    }

    /// The events of one second, at least 1: the usual burst.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 1e6")]
    pub fn of_a_second(self) -> u32 {
        (1e6 / self.interval_us()).clamp(1.0, f64::from(BURST_MAX)) as u32
    }
}

impl FromStr for Rate {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let (amount, unit) = text.trim().split_once('/').ok_or(LimitError::Rate)?;
        let per = match unit.trim() {
            "s" => Per::Second,
            "m" => Per::Minute,
            "h" => Per::Hour,
            _ => return Err(LimitError::Rate),
        };
        let amount = thousandths(amount.trim(), 1.0 / PARTS, AMOUNT_MAX).filter(|n| *n > 0);
        Ok(Self { amount: amount.ok_or(LimitError::Rate)?, per })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_thousandths(self.amount, f)?;
        write!(f, "/{}", self.per.unit().0)
    }
}

/// The share of a bot relative to 1: 0.01 to 1,000, with three decimals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(u64);

impl Weight {
    /// The weight of every other bot.
    pub const ONE: Self = Self(1_000);

    /// `time` divided by the weight.
    #[must_use]
    pub fn divide(self, time: u128) -> u128 {
        time * u128::from(Self::ONE.0) / u128::from(self.0.max(1))
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self::ONE
    }
}

impl From<u32> for Weight {
    /// The nearest weight.
    fn from(whole: u32) -> Self {
        Self(u64::from(whole.clamp(1, 1_000)) * 1_000)
    }
}

impl TryFrom<f64> for Weight {
    type Error = LimitError;

    fn try_from(number: f64) -> Result<Self, LimitError> {
        // A text has the decimals that its author wrote.
        number.to_string().parse()
    }
}

impl FromStr for Weight {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        thousandths(text.trim(), 0.01, 1_000.0).map(Self).ok_or(LimitError::Weight)
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_thousandths(self.0, f)
    }
}

impl PartialEq<u32> for Weight {
    fn eq(&self, whole: &u32) -> bool {
        self.0 == u64::from(*whole) * 1_000
    }
}

/// Whole weights stay whole numbers in JSON.
impl Serialize for Weight {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1_000) {
            return serializer.serialize_u64(self.0 / 1_000);
        }
        #[expect(clippy::cast_precision_loss, reason = "at most 1e6")]
        serializer.serialize_f64(self.0 as f64 / PARTS)
    }
}

/// The rate that an operator set for one bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BotRate {
    /// No limit, although the pipeline has one.
    Unlimited,
    /// At most this.
    At(Rate),
}

impl From<Rate> for BotRate {
    fn from(rate: Rate) -> Self {
        Self::At(rate)
    }
}

/// The text for no limit.
pub const UNLIMITED: &str = "unlimited";

impl FromStr for BotRate {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        if text.trim() == UNLIMITED { Ok(Self::Unlimited) } else { text.parse().map(Self::At) }
    }
}

impl fmt::Display for BotRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlimited => f.write_str(UNLIMITED),
            Self::At(rate) => rate.fmt(f),
        }
    }
}

impl Serialize for BotRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BotRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What is set for one bot. What is missing is as for every other bot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BotLimits {
    /// Its share.
    pub weight: Option<Weight>,
    /// Its rate.
    pub rate: Option<BotRate>,
    /// Maximum number of its events at once.
    pub burst: Option<u32>,
}

impl BotLimits {
    /// Parses a field of the hash `weight`: a weight, or `weight|rate|burst`, each may be empty.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        fn part<T: FromStr>(text: Option<&str>) -> Result<Option<T>, T::Err> {
            match text.unwrap_or_default() {
                "" => Ok(None),
                text => text.parse().map(Some),
            }
        }
        let mut parts = text.split('|');
        let limits = Self {
            weight: part(parts.next()).ok()?,
            rate: part(parts.next()).ok()?,
            burst: part(parts.next()).ok()?,
        };
        parts.next().is_none().then_some(limits)
    }

    /// These limits; where they set nothing, those of `general`.
    #[must_use]
    pub fn or(self, general: Self) -> Self {
        Self {
            weight: self.weight.or(general.weight),
            rate: self.rate.or(general.rate),
            burst: self.burst.or(general.burst),
        }
    }

    /// The bucket of the bot; `None`: no limit.
    #[must_use]
    pub fn bucket(self) -> Option<Bucket> {
        match self.rate? {
            BotRate::Unlimited => None,
            BotRate::At(rate) => Some(Bucket::new(rate, self.burst)),
        }
    }
}

/// A change of one setting of a bot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Change<T> {
    /// It stays as it is.
    #[default]
    Keep,
    /// It becomes that of other bots.
    Reset,
    /// It becomes this.
    To(T),
}

impl<T> Change<T> {
    /// The same change, to another value.
    pub fn map<U>(self, to: impl FnOnce(T) -> U) -> Change<U> {
        match self {
            Self::Keep => Change::Keep,
            Self::Reset => Change::Reset,
            Self::To(value) => Change::To(to(value)),
        }
    }

    /// The same change, to another value if there is one.
    ///
    /// # Errors
    /// That of `to`.
    pub fn try_map<U, E>(self, to: impl FnOnce(T) -> Result<U, E>) -> Result<Change<U>, E> {
        Ok(match self {
            Self::Keep => Change::Keep,
            Self::Reset => Change::Reset,
            Self::To(value) => Change::To(to(value)?),
        })
    }
}

impl<T> From<Option<T>> for Change<T> {
    fn from(to: Option<T>) -> Self {
        to.map_or(Self::Reset, Self::To)
    }
}

/// A token bucket: how fast it fills, and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// Time per token, µs.
    pub interval_us: f64,
    /// Maximum number of tokens.
    pub burst: u32,
}

impl Bucket {
    /// A bucket of that rate. Without a burst it holds the tokens of one second, at least one.
    #[must_use]
    pub fn new(rate: Rate, burst: Option<u32>) -> Self {
        let interval_us = rate.interval_us();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 1e6")]
        let most = (DEPTH_MAX_US / interval_us).clamp(1.0, f64::from(BURST_MAX)) as u32;
        let burst = burst.unwrap_or_else(|| rate.of_a_second()).clamp(1, most);
        Self { interval_us, burst }
    }

    /// As the scripts calculate: takes up to `want` tokens at `now_us` from a bucket that is full again
    /// at `full_us`. Returns their number, the new time, and after how many µs there is a next token.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times are below 2^53 µs"
    )]
    pub fn take(self, want: u32, now_us: u64, full_us: u64) -> (u32, u64, u64) {
        let Self { interval_us, burst } = self;
        let deepest = now_us + (f64::from(burst) * interval_us).ceil() as u64;
        let full_us = full_us.clamp(now_us, deepest);
        let ahead = (full_us - now_us) as f64;
        let left = (f64::from(burst) - ahead / interval_us).floor().max(0.0) as u32;
        let granted = want.min(left);
        let full_us = full_us + (f64::from(granted) * interval_us).ceil() as u64;
        let next = (full_us - now_us) as f64 - f64::from(burst - 1) * interval_us;
        (granted, full_us, next.ceil().max(0.0) as u64)
    }
}

#[cfg(test)]
mod tests;
