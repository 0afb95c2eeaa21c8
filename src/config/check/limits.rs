//! The upper bounds of numbers, for loading and for checking.

pub(in super::super) const BATCH: u64 = 5_000;
pub(in super::super) const WORKERS: u64 = 1_024;
pub(in super::super) const ATTEMPTS: u64 = 1_000_000;
pub(in super::super) const QUEUE: u64 = 1_000_000_000;
pub(in super::super) const DEAD: u64 = 100_000_000;
/// Attempts of a bot that are kept, and their bytes.
pub(in super::super) const HISTORY: u64 = 1_000;
pub(in super::super) const HISTORY_BYTES: (u64, u64) = (1 << 20, 1 << 32);
pub(in super::super) const PER_HOST: u64 = 1_024;
/// Lower and upper bound.
pub(in super::super) const CACHED_ADS: (u64, u64) = (1_000, 10_000_000);
pub(in super::super) const BACKLOG: (u64, u64) = (1, 65_535);
pub(in super::super) const CONNECTIONS: (u64, u64) = (16, 100_000);
pub(in super::super) const IN_FLIGHT: (u64, u64) = (4, 100_000);
pub(in super::super) const QUOTA: (u64, u64) = (0, 1_000_000);
pub(in super::super) const PUBLIC_RATE: (u64, u64) = (1, 1_000_000);
/// 0 stands for the default.
pub(in super::super) const TOKEN_WEIGHT: (u64, u64) = (0, crate::config::WEIGHT_MAX as u64);
/// Events of a bot at once, and slices of a pipeline; 0: the default.
pub(in super::super) const BURST: u64 = crate::rate::BURST_MAX as u64;
pub(in super::super) const TOTAL_CONCURRENCY: u64 = 100_000;
/// Ordering keys of a bot at once: not more than it has lanes.
pub(in super::super) const CONCURRENCY: u64 = crate::id::LANES as u64;
/// What a bot may hold.
pub(in super::super) const HELD: (u64, u64) = (0, 1_000_000_000_000);
/// Spans that wait for the collector.
pub(in super::super) const SPANS: (u64, u64) = (16, 1_000_000);
pub(in super::super) const HOST_RATE: (u64, u64) = (0, 1_000_000);
