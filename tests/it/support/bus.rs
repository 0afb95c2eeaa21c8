//! The publishers' side of the bus.

use std::path::Path;
use std::time::Duration;

use fairlane::redis::{Link, Target};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::history::{HistoryLog, Record};
use super::redis::RedisBackend;

/// Maximum number of events of one write.
const CHUNK: usize = 1_000;

/// Sends commands to a server or a cluster, which routes them by their keys.
pub(crate) fn wire(server: &impl RedisBackend) -> Link {
    Link::new(Target::new(&server.url()).unwrap(), Vec::new(), 0, Duration::from_secs(60))
}

/// An event in the format of the bus.
#[expect(clippy::needless_pass_by_value, reason = "callers write a number or a text")]
pub(crate) fn event(bot: &str, kind: &str, id: impl ToString) -> String {
    serde_json::json!({
        "specversion": "1.0", "id": id.to_string(), "source": "test", "type": kind, "botid": bot,
    })
    .to_string()
}

/// Puts texts on a bus stream in order.
pub(crate) async fn add<T: AsRef<str>>(server: &impl RedisBackend, stream: &str, events: &[T]) {
    let link = wire(server);
    for chunk in events.chunks(CHUNK) {
        let mut pipe = redis::Pipeline::with_capacity(chunk.len());
        for event in chunk {
            pipe.cmd("XADD").arg(stream).arg("*").arg("event").arg(event.as_ref());
        }
        let added = link.run(&pipe).await.unwrap();
        let refused = added.iter().find(|value| matches!(value, redis::Value::ServerError(_)));
        assert_eq!(refused, None, "nothing is refused");
    }
}

/// Publishes events of several bots in mixed order, the same in every run, and logs the sent
/// events. The id of an event is its position among the events of its bot.
#[derive(Debug)]
pub(crate) struct Publisher {
    log: HistoryLog,
    random: StdRng,
    /// The next position of each bot.
    next: Vec<u32>,
}

/// The name of a bot of a [`Publisher`].
pub(crate) fn bot(number: usize) -> String {
    format!("bot-{number}")
}

impl Publisher {
    pub(crate) fn new(bots: usize, log: &Path) -> Self {
        let log = HistoryLog::append(log).unwrap();
        Self { log, random: StdRng::seed_from_u64(7), next: vec![0; bots] }
    }

    /// Publishes `each` more events for every bot.
    pub(crate) async fn publish(&mut self, server: &impl RedisBackend, stream: &str, each: u32) {
        let add = async |_: &[String], texts: &[String]| add(server, stream, texts).await;
        self.publish_by(each, add).await;
    }

    /// The same by a function that puts events of these bots on a bus, in order.
    pub(crate) async fn publish_by(
        &mut self,
        each: u32,
        mut add: impl AsyncFnMut(&[String], &[String]),
    ) {
        let until: Vec<u32> = self.next.iter().map(|next| next + each).collect();
        let mut open: Vec<usize> = (0..self.next.len()).collect();
        let mut mixed = Vec::new();
        while !open.is_empty() {
            let place = self.random.random_range(0..open.len());
            let number = open[place];
            mixed.push((bot(number), self.next[number]));
            self.next[number] += 1;
            if self.next[number] == until[number] {
                open.swap_remove(place);
            }
        }
        for chunk in mixed.chunks(CHUNK) {
            let texts: Vec<_> =
                chunk.iter().map(|(bot, position)| event(bot, "test.event", position)).collect();
            let bots: Vec<_> = chunk.iter().map(|(bot, _)| bot.clone()).collect();
            add(&bots, &texts).await;
            let sent = chunk.iter().map(|(bot, event)| Record::Sent { bot, event: *event });
            self.log.write(sent).unwrap();
        }
    }

    /// The number of events published so far.
    pub(crate) fn total(&self) -> usize {
        self.next.iter().map(|&next| next as usize).sum()
    }
}
