//! The metric of the findings. One process at a time reads them: the one that samples the queues.
//! Without scrapes, none does.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::http::Problems;
use crate::lifecycle::Shutdown;
use crate::metrics;
use crate::problems::{Code, Viewer, find};
use crate::queue::sample::Activity;

/// Interval of looking whether the findings are wanted.
const LOOK: Duration = Duration::from_millis(500);
/// Interval of reading them.
const EVERY: Duration = Duration::from_secs(2);
/// Metrics that were scraped within this time are scraped again. Prometheus forgets a series that it
/// did not scrape for longer.
const SCRAPED: Duration = Duration::from_secs(300);

/// Reports the findings until the soft stop.
pub(super) async fn watch(problems: Arc<Problems>, activity: Arc<Activity>, shutdown: Shutdown) {
    let mut shown: BTreeSet<_> = Code::ALL.iter().map(|&code| (code, None)).collect();
    // Each series exists from the start, at 0.
    for (code, pipeline) in &shown {
        metrics::problem(code.as_str(), code.severity().as_str(), pipeline.as_ref(), false);
    }
    let mut due = Instant::now();
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = sleep(LOOK) => {}
        }
        let now = Instant::now();
        if now < due {
            continue;
        }
        due = now + EVERY;
        let mut found = BTreeSet::new();
        if activity.is_sampled_here() && metrics::was_scraped(SCRAPED) {
            let facts = problems.facts().await;
            if !facts.not_seen.is_empty() && facts.redis.error.is_none() {
                // The next look may find the reason.
                due = Instant::now();
            }
            let findings = find(&facts, Viewer::All);
            found.extend(findings.into_iter().map(|found| (found.code, found.pipeline)));
        }
        for (code, pipeline) in shown.difference(&found) {
            metrics::problem(code.as_str(), code.severity().as_str(), pipeline.as_ref(), false);
        }
        for (code, pipeline) in &found {
            metrics::problem(code.as_str(), code.severity().as_str(), pipeline.as_ref(), true);
        }
        shown = found;
    }
    // After a reload, another instance of the process shows them, if they are still found.
    for (code, pipeline) in &shown {
        metrics::problem(code.as_str(), code.severity().as_str(), pipeline.as_ref(), false);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_scrape_every_two_minutes_finds_what_was_read_meanwhile() {
        drop(metrics::render());
        advance(Duration::from_secs(120)).await;
        assert!(metrics::was_scraped(SCRAPED));
    }
}
