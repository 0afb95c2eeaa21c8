//! `fairlane notifications`: the command line.

use std::path::Path;
use std::time::Duration;

use fairlane::notifications::record::{NewNotification, State, When};

use crate::support::cli::{Ran, run_in};
use crate::support::notification_rig::{Rig, accept, ends, kept, to};
use crate::support::receiver::Receiver;

fn run(dir: &Path, arguments: &[&str]) -> Ran {
    run_in(dir, &[&["notifications"], arguments].concat(), "")
}

#[tokio::test]
async fn an_operator_lists_the_notifications_of_a_bot_cancels_one_and_sends_another_now() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fairlane.toml"), &rig.config).unwrap();
    let later = When::After(Duration::from_secs(3_600));
    let new = NewNotification { when: later, ..to(receiver.url()) };
    let (first, second) = (accept(&instance, &new).await, accept(&instance, &new).await);
    let (first_id, second_id) = (first.to_string(), second.to_string());

    let listed = run(dir.path(), &["list", "shop"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    assert!(listed.out.starts_with("ID "), "{listed:?}");
    for id in [&first_id, &second_id] {
        let line = listed.out.lines().find(|line| line.starts_with(id.as_str())).unwrap();
        assert!(line.contains("in 59m") || line.contains("in 1h"), "{line}");
        assert!(line.contains("scheduled"), "{line}");
    }

    let cancelled = run(dir.path(), &["cancel", &first_id]);
    let said = format!("notification {first_id} is cancelled\n");
    assert_eq!((cancelled.code, cancelled.out), (0, said));
    assert_eq!(kept(&instance, first).await.state, State::Cancelled);
    let sent = run(dir.path(), &["send", &second_id]);
    assert_eq!(sent.code, 0, "{sent:?}");
    assert!(sent.out.contains("is due; it is sent in the order of its bot"), "{sent:?}");
    ends(&instance, second, State::Sent).await;
    assert_eq!(receiver.called(), 1, "the cancelled one is not sent");

    let over = run(dir.path(), &["cancel", &second_id]);
    assert_eq!((over.code, over.out.as_str()), (1, ""), "{over:?}");
    assert!(over.err.contains("sent"), "{over:?}");
    let nothing = run(dir.path(), &["list", "shop"]);
    assert_eq!(nothing.out, "no notification of this bot is scheduled\n", "{nothing:?}");

    let trail = run_in(dir.path(), &["audit", "--bot", "shop"], "");
    for (action, id) in [("cancel notification", &first_id), ("send notification", &second_id)] {
        let noted = |line: &&str| line.contains(action) && line.contains(id.as_str());
        let line = trail.out.lines().find(noted).unwrap();
        assert!(line.contains("cli:") && line.contains("done"), "{line}");
    }
}
