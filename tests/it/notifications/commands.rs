//! `fairlane notifications`: the command line.

use std::path::Path;
use std::time::Duration;

use fairlane::notifications::record::{NewNotification, State, When};
use redis::AsyncCommands as _;

use crate::support::cli::{Ran, run_in};
use crate::support::notification_rig::{Rig, accept, ends, kept, to};
use crate::support::receiver::{Receiver, Reply};

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

#[tokio::test]
async fn a_dead_letter_whose_notification_is_gone_is_not_redriven_and_can_be_dropped() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::start(async |_| Reply::new(410, "gone")).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fairlane.toml"), &rig.config).unwrap();
    let new = to(receiver.url());
    let id = accept(&instance, &new).await;
    ends(&instance, id, State::Dead).await;
    let queue = instance.queue("notifications");
    let letter = queue.list_dead_letters(None, &|_| true, None, 1).await.unwrap().letters.remove(0);
    let keys = &queue.shards()[queue.shard_of(&new.bot).index()];
    let () = rig.redis.connection().await.del(keys.notification(id)).await.unwrap();

    let letter = letter.id.to_string();
    let said =
        format!("dead letter {letter} cannot be redriven, because its notification is gone;");
    let client = instance.client();
    let path = format!("/v1/pipelines/notifications/dead/{letter}");
    let refused = client.post(&format!("{path}/redrive")).await;
    assert_eq!((refused.code, refused.problem().as_str()), (404, "no-notification"));
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert_eq!(detail, format!("{said} drop the letter"));
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let path_of_page = format!("/notifications/dead/{letter}/redrive");
    let shown = client.send("POST", &path_of_page, &form, b"").await;
    let shown = String::from_utf8(shown.body).unwrap();
    assert!(shown.contains(&said), "{shown}");
    assert_eq!(client.get(&path).await.code, 200);

    let refused = run_in(dir.path(), &["dead", "redrive", &letter], "");
    assert_eq!((refused.code, refused.out.as_str()), (1, ""), "{refused:?}");
    assert!(refused.err.contains(&said), "{refused:?}");
    assert_eq!(run_in(dir.path(), &["dead", "drop", &letter], "").code, 0);
    assert_eq!(client.get(&path).await.code, 404);
}
