use std::sync::atomic::AtomicUsize;

use futures_util::future::BoxFuture;

use super::super::source::{Fetched, Opened, Outgoing, Progress, Released, Standing};
use super::*;
use crate::clock::SystemClock;
use crate::queue::Queue;
use crate::trace::Tracer;

/// A bus that panics the first times it is asked for its logs, and then has none.
#[derive(Debug)]
struct Loud {
    asked: AtomicUsize,
    panics: usize,
}

impl Source for Loud {
    fn name(&self) -> &'static str {
        "loud"
    }

    fn topics(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
        let before = self.asked.fetch_add(1, Ordering::Relaxed);
        assert!(before >= self.panics, "as it should");
        async { Ok(Vec::new()) }.boxed()
    }

    fn open<'a>(&'a self, _: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>> {
        unreachable!("it has no logs")
    }

    fn fetch(&self, _: usize, _: Duration) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>> {
        unreachable!("it has no logs")
    }

    fn release<'a>(&'a self, _: &'a [Progress]) -> BoxFuture<'a, Result<Vec<Released>, BusError>> {
        unreachable!("it has no logs")
    }

    fn publish<'a>(
        &'a self,
        _: &'a [Outgoing<'a>],
    ) -> BoxFuture<'a, Result<Vec<Offset>, BusError>> {
        unreachable!("no event is published")
    }
}

/// Reads it for some seconds; returns how often it was asked, and what operators see then.
async fn reads(panics: usize, seconds: u64) -> (usize, Option<String>) {
    let source = Arc::new(Loud { asked: AtomicUsize::new(0), panics });
    let meter = Arc::new(BusMeter::new("loud"));
    let fanout = Fanout::new(Vec::new(), Arc::default(), Tracer::default(), Duration::ZERO);
    let reading = Reading {
        source: Arc::clone(&source) as Arc<dyn Source>,
        fanout: Arc::new(fanout),
        link: Arc::clone(Queue::unreachable("p", 1).link()),
        clock: Arc::new(SystemClock),
        backlog: None,
        partition_wait: None,
        meter: Some(Arc::clone(&meter)),
    };
    let shutdown = Shutdown::new();
    let stop = async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        shutdown.soft.cancel();
    };
    join(Box::pin(run(reading, shutdown.clone())), stop).await;
    let failing = meter.state().failing;
    (source.asked.load(Ordering::Relaxed), failing.map(|failing| failing.reason))
}

#[tokio::test(start_paused = true)]
async fn sessions_that_panic_follow_each_other_after_pauses_that_grow_and_operators_see_it() {
    let (asked, failing) = reads(usize::MAX, 30).await;
    // After 0, 250 and 750 ms, 1.75 and 3.75 s, and then every 4 s.
    assert_eq!(asked, 11);
    assert!(failing.unwrap().contains("panicked"));
}

#[tokio::test(start_paused = true)]
async fn operators_see_for_a_while_why_a_share_was_given_up_also_if_others_read_the_bus() {
    let (asked, failing) = reads(1, 30).await;
    assert!(asked > 1 && failing.unwrap().contains("panicked"), "the others may be trying too");
    assert_eq!(reads(1, 40).await.1, None, "others read it since");
}
