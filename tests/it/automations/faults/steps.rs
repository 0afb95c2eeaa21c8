//! The steps of a slice, and processes that are killed at each.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use fairlane::redis::scripts::{Call as _, Emit};
use redis::Arg;
use tokio::sync::watch;

use super::SUBSCRIBERS;
use crate::support::counter_fleet::Node;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::mongo_proxy::{on, writes_to};
use crate::support::proxy::holds;

/// Kills of each of three processes. On a busy machine, a process may not reach a step in time. Then
/// there are more, up to `KILLS_MAX`.
const KILLS: usize = 14;
const KILLS_MAX: usize = 42;
/// How often each step must be met.
const MEETINGS: u32 = 3;

/// The name by which the script `emit` is called.
pub(super) fn emit() -> Vec<u8> {
    let prefix = fairlane::id::Prefix::default();
    let command = Emit { prefix: &prefix, stream: "s", window_ms: 1, events: &[] }.command();
    let mut arguments = command.args_iter().filter_map(|argument| match argument {
        Arg::Simple(bytes) => Some(bytes.to_vec()),
        _ => None,
    });
    arguments.nth(1).unwrap()
}

/// The steps of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    BeforeTheRead,
    BeforeTheWrite,
    Written,
    BeforeTheActions,
    ActionsDone,
    BeforeTheCompletion,
    Completed,
}

const STEPS: [Step; 7] = [
    Step::BeforeTheRead,
    Step::BeforeTheWrite,
    Step::Written,
    Step::BeforeTheActions,
    Step::ActionsDone,
    Step::BeforeTheCompletion,
    Step::Completed,
];

impl Step {
    fn interceptor(self, node: &Node) -> Interceptor {
        let complete = || holds(["}:later\r\n", "fl:{automations:"]);
        let emitting = || holds([emit()]);
        match self {
            Self::BeforeTheRead => {
                node.mongo.intercept(on("find", SUBSCRIBERS), 1, Interception::HoldCommand)
            }
            Self::BeforeTheWrite => {
                node.mongo.intercept(writes_to(SUBSCRIBERS), 1, Interception::HoldCommand)
            }
            Self::Written => {
                node.mongo.intercept(writes_to(SUBSCRIBERS), 1, Interception::HoldReply)
            }
            Self::BeforeTheActions => {
                node.redis.intercept(emitting(), 1, Interception::HoldCommand)
            }
            Self::ActionsDone => node.redis.intercept(emitting(), 1, Interception::HoldReply),
            Self::BeforeTheCompletion => {
                node.redis.intercept(complete(), 1, Interception::HoldCommand)
            }
            Self::Completed => node.redis.intercept(complete(), 1, Interception::HoldReply),
        }
    }
}

/// How often each step was met, by all processes.
pub(super) type Met = Mutex<BTreeMap<Step, u32>>;

/// The steps that were hardly met yet.
pub(super) fn missing(met: &Met) -> Vec<Step> {
    let met = met.lock().unwrap();
    STEPS.into_iter().filter(|step| met.get(step).is_none_or(|times| *times < MEETINGS)).collect()
}

/// Kills a process at every step in turn, and then at those that were hardly met.
pub(super) async fn kill(
    place: usize,
    mut node: Node,
    met: &Met,
    over: &watch::Sender<u32>,
) -> Node {
    for round in 0..KILLS_MAX {
        let missing = if round < KILLS { STEPS.to_vec() } else { missing(met) };
        if missing.is_empty() {
            break;
        }
        let step = missing[(round + 2 * place) % missing.len()];
        let interceptor = step.interceptor(&node);
        let caught = interceptor.catches(Duration::from_secs(3)).await;
        node.served.kill9();
        // The last command that the process sent arrives after its death, or never.
        if (round + place).is_multiple_of(2) {
            interceptor.release();
        }
        *met.lock().unwrap().entry(step).or_default() += u32::from(caught);
        node.restart().await;
    }
    over.send_modify(|over| *over += 1);
    node
}
