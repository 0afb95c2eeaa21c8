use std::sync::atomic::AtomicUsize;

use futures_util::future::BoxFuture;

use super::super::source::{Fetched, Opened, Outgoing, Progress, Released, Standing};
use super::*;
use crate::clock::SystemClock;
use crate::queue::Queue;
use crate::trace::Tracer;

/// A bus that panics each time it is asked for its logs.
#[derive(Debug, Default)]
struct Loud(AtomicUsize);

impl Source for Loud {
    fn name(&self) -> &'static str {
        "loud"
    }

    fn topics(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("as it should")
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

#[tokio::test(start_paused = true)]
async fn sessions_that_panic_follow_each_other_after_pauses_that_grow_and_operators_see_it() {
    let source = Arc::new(Loud::default());
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
        tokio::time::sleep(Duration::from_secs(30)).await;
        shutdown.soft.cancel();
    };
    join(Box::pin(run(reading, shutdown.clone())), stop).await;
    let asked = source.0.load(Ordering::Relaxed);
    // After 0, 250 and 750 ms, 1.75 and 3.75 s, and then every 4 s.
    assert_eq!(asked, 11);
    assert!(meter.state().failing.unwrap().reason.contains("panicked"));
}
