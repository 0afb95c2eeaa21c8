//! The steps of a slice, and processes that are killed at each.

use std::time::Duration;

use fairlane::redis::scripts::{Call as _, Emit};
use redis::Arg;

use super::SUBSCRIBERS;
use crate::support::counter_fleet::Node;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::kills::{Kill, Kills};
use crate::support::mongo_proxy::{on, writes_to};
use crate::support::proxy::holds;

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

pub(super) const STEPS: [Step; 7] = [
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

/// Kills a process at every step.
pub(super) async fn kill(place: usize, mut node: Node, kills: &Kills<Step>) -> Node {
    let mut round = 0;
    while let Some(Kill { step, arrives }) = kills.next(place, round) {
        let interceptor = step.interceptor(&node);
        let caught = interceptor.catches(Duration::from_secs(3)).await;
        node.served.kill9();
        if arrives {
            interceptor.release();
        }
        kills.note(step, caught);
        node.restart().await;
        round += 1;
    }
    node
}
