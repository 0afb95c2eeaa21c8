//! Which events of the bus belong to a replay.

use std::fs;
use std::path::Path;

use super::{Rig, STREAM, add, event, ids, json, mixed, replay};

#[tokio::test]
async fn an_event_that_is_not_copied_yet_is_left_alone_and_handled_once() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..10)).await;
    rig.got(20).await;
    instance.stop().await;
    rig.got.lock().unwrap().clear();

    // Nobody reads the bus now.
    add(&rig.server, STREAM, &mixed(&["a", "b"], 10..15)).await;
    let dry = rig.command(&["-p", "work", "--from", "1h", "--dry-run"]);
    assert!(dry.out.contains("20 events of 2 bots would be put"), "{dry:?}");
    assert!(dry.out.contains("left      not queued yet: 10 events of the range"), "{dry:?}");
    let ran = rig.command(&["-p", "work", "--from", "1h", "--yes"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("put 20 events at the end"), "{ran:?}");
    assert!(ran.err.contains("note: not queued yet: 10 events"), "{ran:?}");

    let instance = rig.instance().await;
    rig.got(30).await;
    for bot in ["a", "b"] {
        assert_eq!(rig.ids(bot, true), ids(0..10), "{bot}");
        assert_eq!(rig.ids(bot, false), ids(10..15), "{bot}");
    }
    // By now everything is copied.
    let body = json!({ "from": "1h ago", "to": "2100-01-01T00:00:00Z", "dry_run": true });
    let (code, told) = replay(&instance.client(), &body).await;
    let found = &told["found"];
    assert_eq!((code, &found["events"], &found["not_copied"]), (200, &json!(30), &json!(0)));
    instance.stop().await;
}

/// The counts of the ranges of the stream that Redis read, in their order.
pub(super) async fn counts_of_pages(rig: &Rig) -> Vec<u64> {
    let commands = rig.server.noted().await;
    let pages = commands.iter().filter(|words| {
        let is_page = words.len() == 6 && words[0] == "XRANGE" && words[1] == STREAM;
        // Others look for the next entry of a stream without an end.
        is_page && words[3] != "+"
    });
    pages.map(|page| page[5].parse().unwrap()).collect()
}

/// The entries behind the small ones may have 1 MiB each.
#[tokio::test]
async fn a_replay_reads_few_events_together_although_they_are_small() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..300)).await;
    rig.got(600).await;
    rig.server.note_commands().await;
    let (code, told) = replay(&instance.client(), &json!({ "from": "1h ago" })).await;
    assert_eq!((code, &told["put"], &told["done"]), (200, &json!(600), &json!(true)), "{told}");
    let counts = counts_of_pages(&rig).await;
    assert_eq!(counts.iter().max(), Some(&64), "{counts:?}");
    rig.got(1_200).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_replay_reads_fewer_entries_together_once_they_are_large_although_they_are_no_events() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..50)).await;
    rig.got(100).await;
    instance.stop().await;
    let mut connection = rig.server.connection().await;
    let large = "x".repeat(2_000_000);
    for _ in 0..24 {
        let mut add = redis::cmd("XADD");
        add.arg(&[STREAM, "*", "wrong", &large]);
        let () = add.query_async(&mut connection).await.unwrap();
    }
    rig.server.note_commands().await;
    let ran = rig.command(&["-p", "work", "--from", "1h", "--dry-run"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("100 events of 2 bots would be put"), "{ran:?}");
    assert!(ran.out.contains("124 entries of the bus"), "{ran:?}");
    // The third page has the first large entries.
    let counts = counts_of_pages(&rig).await;
    assert_eq!(counts[..3], [16, 32, 64], "{counts:?}");
    assert!(counts[3] < 16 && counts[4..].iter().all(|count| *count <= 2), "{counts:?}");
}

/// The commands of a block of the recipes, one per element.
fn recipe(heading: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/recipes.md");
    let text = fs::read_to_string(path).unwrap();
    let section = text.split_once(heading).expect("the heading").1;
    let block = section.split_once("```bash\n").unwrap().1.split_once("```").unwrap().0;
    block.replace("\\\n", " ").lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn the_recipe_for_an_hour_of_one_tenant_replays_that_hour_and_that_tenant() {
    /// The start of the hour, ms since 1970.
    const TWO: u64 = 1_795_528_800_000;
    const HOUR: u64 = 3_600_000;
    let rig = Rig::new(&[
        ("pipelines.work.enabled", "false"),
        ("pipelines.other.enabled", "false"),
        ("pipelines.orders.handler", "\"recorder\""),
        ("pipelines.orders.events", "[\"order.*\"]"),
        ("pipelines.orders.start", "\"earliest\""),
        ("pipelines.orders.handler_timeout", "\"5s\""),
        ("bus.trim", "false"),
    ]);
    let mut connection = rig.server.connection().await;
    let times = [TWO - 1, TWO, TWO + 1, TWO + HOUR - 1, TWO + HOUR, TWO + 2 * HOUR];
    for (id, time) in times.into_iter().enumerate() {
        for (seq, bot) in ["shop-7", "shop-8"].into_iter().enumerate() {
            let text = event(bot, "order.paid", id);
            let mut add = redis::cmd("XADD");
            add.arg(STREAM).arg(format!("{time}-{seq}")).arg("event").arg(text);
            let () = add.query_async(&mut connection).await.unwrap();
        }
    }
    let instance = rig.instance().await;
    rig.got(2 * times.len()).await;
    rig.got.lock().unwrap().clear();

    let commands = recipe("### Replay yesterday 14:00–15:00 of one tenant");
    assert_eq!(commands.len(), 2, "{commands:?}");
    let arguments = |command: &str| -> Vec<String> {
        let command = command.strip_prefix("fairlane replay ").expect("a replay");
        command.split_whitespace().map(str::to_owned).collect()
    };
    let run = |command: &str, more: &[&str]| {
        let arguments = arguments(command);
        let all: Vec<&str> =
            arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
        rig.command(&all)
    };
    let dry = run(&commands[0], &[]);
    assert_eq!(dry.code, 0, "{dry:?}");
    assert!(dry.out.contains("3 events of 1 bot would be put"), "{dry:?}");
    assert!(rig.got.lock().unwrap().is_empty(), "the dry run changes nothing");
    // Without a terminal, the command asks for --yes.
    let ran = run(&commands[1], &["--yes"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(
        ran.out.contains("put 3 events at the end of the queues of pipeline orders"),
        "{ran:?}"
    );
    rig.got(3).await;
    assert_eq!((rig.ids("shop-7", true), rig.ids("shop-8", true)), (ids(1..4), Vec::new()));
    instance.stop().await;
}
