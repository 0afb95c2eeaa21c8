//! A line of limited speed.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::watch;
use tokio::time::Instant;

use super::ProxyMode;

/// One direction of a slow line.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// The time at which all sent bytes have arrived. The connections hold it in turns.
    free_at: tokio::sync::Mutex<Option<Instant>>,
}

/// The number of bytes of a connection that a slow line carries before the next connection's turn.
const PACKET: usize = 1_460;

/// The resolution of timers.
const TICK: Duration = Duration::from_millis(1);

impl Line {
    /// Writes as fast as the mode allows.
    pub(crate) async fn write(
        &self,
        to: &mut OwnedWriteHalf,
        bytes: &[u8],
        mode: &watch::Sender<ProxyMode>,
    ) -> std::io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let now = *mode.borrow();
            let (rate, length) = match now {
                ProxyMode::Rate(rate) => (rate, PACKET),
                // No other connection waits for its turn, and timers are too coarse for smaller
                // packets.
                ProxyMode::RateEach(rate) => {
                    (rate, PACKET.max(usize::try_from(rate / 50).unwrap()))
                }
                _ => return to.write_all(rest).await,
            };
            let (packet, after) = rest.split_at(length.min(rest.len()));
            let took = Duration::from_secs(1) * u32::try_from(packet.len()).unwrap() / rate;
            let mut free_at = self.free_at.lock().await;
            let arrives = free_at.unwrap_or_else(Instant::now).max(Instant::now()) + took;
            *free_at = Some(arrives);
            let coarse = if matches!(now, ProxyMode::RateEach(_)) { TICK } else { Duration::ZERO };
            if arrives.saturating_duration_since(Instant::now()) >= coarse {
                // The sleep is the fault itself.
                tokio::time::sleep_until(arrives).await;
            }
            to.write_all(packet).await?;
            rest = after;
        }
        Ok(())
    }
}
