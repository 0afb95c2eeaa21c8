//! How fast a stream is read. Run it by hand.

use std::time::{Duration, Instant};

use fairlane::id::Offset;

use super::{config, event, fetch, make, open, settings, source};
use crate::support::nats::{NatsServer, Options};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn reading_speed() {
    const COUNT: usize = 200_000;
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let context = server.jetstream().await;
    let text = event("e", "shop-7", &"x".repeat(100));
    let mut acks = Vec::new();
    for number in 0..COUNT {
        acks.push(
            context.publish(format!("events.{}", number % 100), text.clone().into()).await.unwrap(),
        );
        if acks.len() == 1_000 {
            for ack in acks.drain(..) {
                ack.await.unwrap();
            }
        }
    }
    let source = source(settings(&server));
    for decodes in [false, true] {
        open(&source, Offset::default(), Offset::default()).await;
        let (mut read, began) = (0, Instant::now());
        while read < COUNT {
            read += if decodes {
                fetch(&source, 4_096, Duration::from_secs(1)).await.unwrap().entries.len()
            } else {
                let wait = Duration::from_secs(1);
                fairlane::bus::source::Source::fetch(&source, 4_096, wait).await.unwrap().len()
            };
        }
        #[expect(clippy::cast_precision_loss, reason = "a count")]
        let rate = COUNT as f64 / began.elapsed().as_secs_f64();
        println!("{} bytes, decoded: {decodes}: {rate:.0} entries/s", text.len());
    }
}
