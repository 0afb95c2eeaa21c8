//! The README tells the truth: its shell blocks run, its links lead somewhere, its settings exist.

use std::path::Path;
use std::process::Command;

const README: &str = include_str!("../../README.md");

/// The shell blocks, in order, those marked `no-run` aside.
fn blocks() -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in README.lines() {
        match &mut open {
            Some(block) if line == "```" => {
                blocks.push(std::mem::take(block));
                open = None;
            }
            Some(block) => {
                block.push_str(line);
                block.push('\n');
            }
            None if line == "```sh" => open = Some(String::new()),
            None => {}
        }
    }
    blocks
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

#[test]
fn the_tour_can_be_followed_word_for_word() {
    let blocks = blocks();
    assert!(blocks.len() >= 5, "the tour has {} blocks", blocks.len());
    let directory = tempfile::tempdir().expect("a directory");
    let (metrics, http) = (free_port(), free_port());
    // The tour's own ports may be in use on this machine; everything else runs as it is printed.
    let script = blocks.join("\n").replace("localhost:9464", &format!("localhost:{metrics}"));
    let script = script.replace("localhost:8080", &format!("localhost:{http}"));
    let script = script.replace("9000", &free_port().to_string());
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    std::os::unix::fs::symlink(examples, directory.path().join("examples")).expect("a link");
    let program = Path::new(env!("CARGO_BIN_EXE_fairlane"));
    let path = program.parent().expect("a directory").display();
    let script = format!(
        "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\nPATH={path}:$PATH\n{script}"
    );
    let output = Command::new("bash")
        .args(["-c", &script])
        .current_dir(directory.path())
        .env("FAIRLANE__METRICS__LISTEN", format!("127.0.0.1:{metrics}"))
        .env("FAIRLANE__HTTP__LISTEN", format!("127.0.0.1:{http}"))
        .output()
        .expect("bash runs");
    let shown = format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{shown}");
    for expected in [
        "published 3 events to fairlane:events",
        "paused",
        "fairlane_events_total{pipeline=\"tags\",outcome=\"done\"} 5",
        "{\"accepted\":1}{\"accepted\":2}{\"accepted\":1}",
        r#"{"accepted":1}{"type":"urn:fairlane:problem:forbidden""#,
        r#""detail":"token \"shop\" has no scope \"read\"""#,
        r#"POST /remind {"text":"Hello, Ann"}"#,
    ] {
        assert!(shown.contains(expected), "{expected:?} is missing in:\n{shown}");
    }
}

#[test]
fn every_link_into_the_repository_leads_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut links = 0;
    for part in README.split("](").skip(1) {
        let target = part.split([')', '#']).next().unwrap_or_default();
        if target.is_empty() || target.contains("://") {
            continue;
        }
        assert!(root.join(target).exists(), "README links to {target}, which does not exist");
        links += 1;
    }
    assert!(links > 5, "the links were found");
}

#[test]
fn every_test_that_a_guarantee_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut named = 0;
    for part in README.split("[`").skip(1) {
        let Some((name, rest)) = part.split_once("`](") else { continue };
        let file = rest.split(')').next().unwrap_or_default();
        if Path::new(file).extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = std::fs::read_to_string(root.join(file)).expect(file);
        assert!(text.contains(&format!("fn {name}(")), "{file} has no test {name}");
        named += 1;
    }
    assert!(named >= 8, "the guarantees name {named} tests");
}
