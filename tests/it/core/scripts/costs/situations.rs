//! The situations in which the scripts are measured: each is a state of an otherwise empty server,
//! and one call. Events have 100 bytes.

mod products;
mod queues;

use super::stage::{Meter, Stage};

/// Registers the scripts of the products, which otherwise happens at their first call. A new
/// connection loads all registered scripts.
pub(super) fn register() {
    products::register();
}

/// Measures all situations. They start with an empty server and do not depend on each other's
/// order.
pub(super) async fn all<M: Meter>(stage: &mut Stage<M>) {
    queues::bus(stage).await;
    queues::copies(stage).await;
    queues::pushes(stage).await;
    queues::claims(stage).await;
    queues::completions(stage).await;
    queues::failures(stage).await;
    queues::replays(stage).await;
    queues::delays(stage).await;
    products::counters(stage).await;
    products::notifications(stage).await;
    products::waiting_notifications(stage).await;
}
