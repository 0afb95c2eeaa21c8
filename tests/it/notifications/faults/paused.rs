//! Notifications of a process that stands still while it sends them.

use std::time::Duration;

use fairlane::notifications::record::{NewNotification, State};

use crate::support::notification_rig::{LONG, Rig, accept, ends, to};
use crate::support::receiver::{Receiver, Reply};
use crate::support::wait::eventually;

/// A send belongs to its process for 25 s from its start on, and its last call may take 15 s. So the pause, and
/// with it this test, takes a little more than the 10 s between.
const PAUSE: Duration = Duration::from_millis(10_200);

/// A paused process goes on with the answer that arrived meanwhile, before its timers fire. Here, the receiver
/// holds the only thread instead.
#[tokio::test]
async fn a_process_that_was_paused_during_its_recheck_asks_again_before_it_sends() {
    let rig = Rig::new(&[]);
    let receiver = Receiver::start(async |call| {
        if call.number == 0 {
            std::thread::sleep(PAUSE);
        }
        Reply::new(200, if call.line.contains("/recheck") { "ok" } else { "" })
    })
    .await;
    let instance = rig.start().await;
    let recheck = format!("http://{}/recheck", receiver.address);
    let id = accept(&instance, &NewNotification { recheck, ..to(receiver.url()) }).await;
    let is_sent = || receiver.calls().iter().any(|call| call.line.contains("/hook"));
    // Asks only the receiver: a call to Redis during the pause would be too late.
    eventually(LONG, "it is sent", async || is_sent()).await;
    ends(&instance, id, State::Sent).await;
    let calls = receiver.calls();
    let lines: Vec<&str> = calls.iter().map(|call| call.line.as_str()).collect();
    assert_eq!(
        lines,
        ["GET /recheck HTTP/1.1", "GET /recheck HTTP/1.1", "GET /hook HTTP/1.1"],
        "another process may have sent it, or its recheck may have refused"
    );
    instance.stop().await;
}
