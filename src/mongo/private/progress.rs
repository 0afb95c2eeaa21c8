//! The progress of a starting server.

use tokio::time::Instant;

use crate::private::{Home, TELL};

/// When a starting server last made progress. Before it listens, it recovers its data, and writes to its
/// log. After that, it also writes about each probe.
pub(super) struct Progress {
    logged: u64,
    pub(super) at: Instant,
    /// When the log of this process last had a line about it, or the start began.
    told: Instant,
}

impl Progress {
    pub(super) fn of(home: &Home) -> Self {
        let now = Instant::now();
        Self { logged: home.logged(), at: now, told: now }
    }

    /// Called while the server does not listen.
    pub(super) fn look(&mut self, home: &Home) {
        let logged = home.logged();
        if logged == self.logged {
            return;
        }
        (self.logged, self.at) = (logged, Instant::now());
        if self.told.elapsed() >= TELL {
            self.told = self.at;
            let log = home.log.display();
            tracing::info!("waiting for the private MongoDB: it recovers its data; see {log}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_recovers_its_data_is_told_of_every_ten_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::create(dir.path(), "mongodb").unwrap();
        let mut progress = Progress::of(&home);
        let mut told = Vec::new();
        for second in 1..=25 {
            tokio::time::advance(Duration::from_secs(1)).await;
            home.open_log().unwrap().write_all(b"recovering\n").unwrap();
            progress.look(&home);
            assert_eq!(progress.at, Instant::now());
            if progress.told == progress.at {
                told.push(second);
            }
        }
        assert_eq!(told, [10, 20]);
        tokio::time::advance(TELL).await;
        progress.look(&home);
        assert_eq!((progress.at.elapsed(), progress.told.elapsed().as_secs()), (TELL, 15));
    }
}
