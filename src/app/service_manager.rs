//! What a process reports to systemd, if systemd started it with `Type=notify`.
//!
//! 1. `READY=1` when the configuration is valid, Redis has answered and the ports are open. It does
//!    not wait until `/readyz` answers 200: with a full Redis that would last until operators have
//!    drained it, and systemd would kill the process meanwhile.
//! 2. `WATCHDOG=1`, as long as the runtime runs tasks, also during the stop.
//! 3. `STOPPING=1` when the stop starts.
//!
//! Without systemd, nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

use crate::lifecycle::Shutdown;

/// Reports per period of the watchdog. A single late report does not end the process.
const REPORTS: u32 = 3;

/// Reports that the process is ready, and then its progress until it ends.
///
/// # Panics
/// Outside a tokio runtime.
pub(super) fn report(shutdown: &Shutdown) {
    send(&NotifyState::Ready);
    if let Some(period) = sd_notify::watchdog_enabled().filter(|period| !period.is_zero()) {
        #[expect(
            clippy::disallowed_methods,
            reason = "systemd must hear of the process until it ends"
        )]
        drop(tokio::spawn(progress(period / REPORTS)));
    }
    let leaving = shutdown.leaving.clone();
    shutdown.spawn(async move {
        leaving.cancelled().await;
        send(&NotifyState::Stopping);
    });
}

/// Reports progress at this interval, without an end.
async fn progress(interval: Duration) {
    loop {
        send(&NotifyState::Watchdog);
        tokio::time::sleep(interval).await;
    }
}

fn send(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        warn!(%error, %state, "cannot report to systemd");
    }
}
