//! The documentation is true: its shell blocks run, its links lead to a target, and the tests that
//! it names exist.
//!
//! The shell blocks of a page are one script, which `bash -eu` runs in a temporary directory.
//! Blocks that no test can run are marked as `bash` instead of `sh`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use fairlane::metrics::{Kind, METRICS};

use crate::support::mongo;
use crate::support::process::signal;
use crate::support::receivers::is_there;
use crate::support::redis::free_port;
use crate::support::wait::holds_within;

/// A page that takes longer waits for output that never comes.
const LIMIT: Duration = Duration::from_secs(300);
/// The text of a page that needs MongoDB.
const NEEDS_MONGODB: &str = r#""mongodb":"up""#;
/// The README stays a short introduction.
const README_LINES: usize = 250;
/// A longer table cell is a paragraph.
const CELL_WORDS: usize = 40;

/// Makes a test for each page, with texts that the output of its blocks must contain.
macro_rules! pages {
    ($($test:ident: $page:literal => [$($expected:expr),+ $(,)?];)+) => {
        /// The pages whose shell blocks are run.
        const RUN: &[&str] = &[$($page),+];

        $(
            #[test]
            fn $test() {
                follow($page, &[$($expected),+]);
            }
        )+
    };
}

pages! {
    the_readme_can_be_followed_word_for_word: "README.md" => [
        "published 3 events to fairlane:events",
        "state     paused",
        r#"fairlane_events_total{pipeline="tags",outcome="done"} 6"#,
        "bot-7 order.paid {'price': 12}",
        "bot-7 order.paid { price: 13 }",
    ];
    the_page_on_the_http_api_can_be_followed_word_for_word: "docs/http-api.md" => [
        r#"{"accepted":1}{"accepted":2}{"accepted":1}"#,
        r#"{"accepted":1,"unmatched":["tga.applied"]}"#,
        r#"{"type":"urn:fairlane:problem:invalid-events","title":"Invalid events","status":400"#,
        r#""detail":"nothing was stored: 1 of 2 events cannot be used""#,
        r#""errors":[{"index":1,"field":"botid","detail":"the required attribute \"botid\" is missing"}]"#,
        r#""state":"paused""#,
        r#"{"dead_letters":[]}"#,
        r#"{"accepted":1}{"type":"urn:fairlane:problem:forbidden""#,
        r#""detail":"token \"shop\" has no scope \"read\"""#,
    ];
    the_page_on_push_handlers_can_be_followed_word_for_word: "docs/push-handlers.md" => [
        "{'accepted': 1}",
        r#" {"price":12}"#,
        r#""state": "parked""#,
        r#" {"price":13}"#,
        r#"fairlane_events_total{pipeline="orders",outcome="done"} 3"#,
        r#" {"price":14}"#,
    ];
    the_page_on_counters_can_be_followed_word_for_word: "docs/counters.md" => [
        r#"{"total":1}{"total":6}{"total":6}"#,
        r#"{"totals":{"ad-1":8,"ad-2":0}}"#,
        r#"{"ad":"ad-1","views":8}"#,
        r#"{"totals":{"ad-1":0}}"#,
        "imported 2 lines",
        r#"{"totals":{"ad-1":1200,"ad-2":7}}"#,
        "imported 0 lines, 2 lines imported before",
        r#"{"imported":2,"skipped":0,"next":3}"#,
    ];
    the_page_on_notifications_can_be_followed_word_for_word: "docs/notifications.md" => [
        r#"POST /remind {"text":"Hello, Ann"}"#,
        r#""state":"sent""#,
        r#""cancelled":1"#,
    ];
    the_page_on_automations_can_be_followed_word_for_word: "docs/automations.md" => [
        r#"{"id":"ann","tags":["invited","vip"],"fields":{"age":31,"gender":"female"}"#,
        r#""stats":{"matched":1,"actions":1,"errors":0}"#,
        r#"{"matched":[{"rule":"women-over-30","actions":["set_tag"]}],"errors":[]"#,
        "filter: the filter is not valid CEL: line 1, column 18: unexpected end",
    ];
    the_recipes_can_be_followed_word_for_word: "docs/recipes.md" => [
        "! pipeline orders has 3 dead letters",
        "the receiver answered 500: failed on purpose",
        "put back 3 dead letters of pipeline orders",
        "attempt 1: 4 events, 0 again",
        r#"fairlane_events_total{pipeline="replayed",outcome="done"} 34"#,
        "whsec_WYM0tVDec9oRdBmDbgnsyhyH+mVGhayJv4mQKi1Q9Vk=",
        r#"{"status":"stopping""#,
    ];
    the_page_on_configuration_can_be_followed_word_for_word: "docs/configuration.md" => [
        "ok     pipeline tags           handler log, events tag.*",
        "pipelines.tags.batch",
        "wrong.toml:4: pipelines.tags.handler_timeout is 26s, above shutdown_grace (25s)",
        "exit code 64",
    ];
    the_page_on_operations_can_be_followed_word_for_word: "docs/operations.md" => [
        "bot bot-7 of pipeline tags is paused",
        "the queue of the bot is full (max_queue = 2)",
        "put back 1 dead letter of pipeline tags",
        r#"fairlane_events_total{pipeline="tags",outcome="done"} 3"#,
        "nothing is wrong",
    ];
    the_runbook_can_be_started_word_for_word: "docs/runbook.md" => [
        "no `fairlane serve` runs",
        "0 failures",
    ];
    the_page_on_overload_can_be_followed_word_for_word: "docs/overload.md" => [
        "x-shed-reason: switch",
        r#"{"class":"p3","reason":"switch""#,
    ];
    the_page_on_redis_can_be_followed_word_for_word: "docs/redis.md" => [
        "ok     eviction                noeviction",
        "published 1 event to staging:events",
    ];
    the_page_on_the_edge_can_be_followed_word_for_word: "docs/edge.md" => [
        r#""top_addresses":[{"address":"203.0.113.7""#,
        "access-control-allow-origin: https://shop.example",
        r#"{"status":"stopping""#,
    ];
    the_page_on_kubernetes_can_be_followed_word_for_word: "docs/kubernetes.md" => [
        "ok     auth                    1 token can be read",
        "0 failures",
    ];
    the_page_on_security_can_be_followed_word_for_word: "docs/security.md" => [
        r#"{"accepted":1}"#,
        r#"{"type":"urn:fairlane:problem:unauthorized""#,
        r#""detail":"token \"shop\" has no scope \"read\"""#,
        "whsec_fqRaVx4cXVbksvPOn7y6U0PbiCVkKdPL31wAd09v45o=",
        "url: the address is 127.0.0.1, which is not public",
    ];
    the_page_on_upgrading_can_be_followed_word_for_word: "docs/upgrading.md" => [
        "published 5 events to fairlane:events",
    ];
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"))
}

/// Every page, by its path in the repository.
fn pages() -> Vec<String> {
    let mut pages = Vec::new();
    for directory in ["", "docs/"] {
        for entry in fs::read_dir(root().join(directory)).expect("a directory") {
            let name = entry.expect("an entry").file_name().into_string().expect("a name");
            if Path::new(&name).extension().is_some_and(|extension| extension == "md") {
                pages.push(format!("{directory}{name}"));
            }
        }
    }
    pages.sort();
    pages
}

/// The shell blocks of a page, in order.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
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

/// The lines of a page outside its code blocks.
fn prose(text: &str) -> Vec<&str> {
    let mut in_block = false;
    let mut prose = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            prose.push(line);
        }
    }
    prose
}

/// Runs the shell blocks of a page as a reader would, on free ports.
fn follow(page: &str, expected: &[&str]) {
    let script = blocks(&read(page)).join("\n");
    assert!(!script.is_empty(), "{page} has no shell block");
    for interpreter in ["python3", "node", "php", "ruby"] {
        if script.contains(&format!("{interpreter} ")) && !is_there(interpreter) {
            return println!("not shown: there is no {interpreter}");
        }
    }
    let directory = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::symlink(root().join("examples"), directory.path().join("examples"))
        .expect("a link");
    // The ports of the page may be in use on this machine, so they are replaced. Everything else
    // runs as it is printed.
    let (metrics, http) = (free_port(), free_port());
    let script = script.replace("9000", &free_port().to_string());
    let script = script.replace("localhost:9464", &format!("localhost:{metrics}"));
    let script = script.replace("localhost:8080", &format!("localhost:{http}"));
    let program = Path::new(env!("CARGO_BIN_EXE_fairlane"));
    let path = program.parent().expect("a directory").display();
    let script = format!(
        "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\nPATH={path}:$PATH\n{script}"
    );
    let output = tempfile::NamedTempFile::new().expect("a file");
    let mut bash = Command::new("bash");
    bash.args(["-eu", "-c", &script])
        .current_dir(directory.path())
        .env("FAIRLANE__METRICS__LISTEN", format!("127.0.0.1:{metrics}"))
        .env("FAIRLANE__HTTP__LISTEN", format!("127.0.0.1:{http}"))
        .stdin(Stdio::null())
        .stdout(output.as_file().try_clone().expect("a second handle"))
        .stderr(output.as_file().try_clone().expect("a third handle"));
    if script.contains(NEEDS_MONGODB) {
        bash.env("FAIRLANE_MONGOD", mongo::program());
    }
    let mut child = bash.spawn().expect("bash runs");
    let ended = holds_within(LIMIT, || child.try_wait().expect("a child").is_some());
    if !ended {
        // The script stops the processes that it started.
        signal(child.id(), "TERM");
    }
    let status = child.wait().expect("a child");
    let shown = fs::read(output.path()).expect("the output");
    let shown = String::from_utf8_lossy(&shown);
    assert!(ended, "{page} did not end within {LIMIT:?}:\n{shown}");
    assert!(status.success(), "{page}: {status}\n{shown}");
    for text in expected {
        assert!(shown.contains(text), "{page}: {text:?} is missing in:\n{shown}");
    }
}

#[test]
fn every_page_with_shell_blocks_is_run_by_a_test() {
    let run: BTreeSet<&str> = RUN.iter().copied().collect();
    let pages = pages();
    for page in &pages {
        let text = read(page);
        let is_odd = |line: &&str| line.trim_start().starts_with("```sh") && *line != "```sh";
        let odd: Vec<&str> = text.lines().filter(is_odd).collect();
        assert!(odd.is_empty(), "{page}: mark a block that no test can run as bash: {odd:?}");
    }
    let with_blocks = pages.iter().filter(|page| !blocks(&read(page)).is_empty());
    let with_blocks: BTreeSet<&str> = with_blocks.map(String::as_str).collect();
    assert_eq!(run, with_blocks, "tests (left) and pages with shell blocks (right) differ");
}

#[test]
fn the_readme_is_short() {
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines; move something to docs/");
}

#[test]
fn the_summary_lists_every_page_of_the_book_once() {
    let summary = read("docs/SUMMARY.md");
    let listed: Vec<&str> =
        summary.split("](").skip(1).filter_map(|part| part.split(')').next()).collect();
    let pages = pages();
    let there: BTreeSet<&str> = pages
        .iter()
        .filter_map(|page| page.strip_prefix("docs/"))
        .filter(|page| *page != "SUMMARY.md")
        .collect();
    let distinct: BTreeSet<&str> = listed.iter().copied().collect();
    assert_eq!(distinct, there, "the summary (left) and the pages (right) differ");
    assert_eq!(distinct.len(), listed.len(), "a page is listed twice: {listed:?}");
}

/// The anchors that a code host and `mdBook` give to the headings of a page.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// The links of a page into the repository: file and anchor.
fn links(page: &str, text: &str) -> Vec<(PathBuf, String)> {
    let directory = root().join(page).parent().expect("a directory").to_owned();
    let mut links = Vec::new();
    for line in prose(text) {
        for part in line.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { root().join(page) } else { directory.join(file) };
            links.push((path, anchor.to_owned()));
        }
    }
    links
}

#[test]
fn every_link_into_the_repository_leads_somewhere() {
    let mut found = 0;
    for page in pages() {
        for (path, anchor) in links(&page, &read(&page)) {
            assert!(path.exists(), "{page} links to {}, which does not exist", path.display());
            found += 1;
            if !anchor.is_empty() && path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).expect("a page");
                let there = anchors(&text).contains(&anchor);
                assert!(there, "{page} links to #{anchor}, which {} has not", path.display());
            }
        }
    }
    assert!(found > 100, "the links were found: {found}");
}

#[test]
fn every_test_that_a_guarantee_names_exists() {
    let mut named = BTreeSet::new();
    for page in pages() {
        let directory = root().join(&page).parent().expect("a directory").to_owned();
        for part in read(&page).split("[`").skip(1) {
            let Some((name, rest)) = part.split_once("`](") else { continue };
            let file = rest.split(')').next().unwrap_or_default();
            if Path::new(file).extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = fs::read_to_string(directory.join(file))
                .unwrap_or_else(|error| panic!("{page} names {file}: {error}"));
            assert!(text.contains(&format!("fn {name}(")), "{page}: {file} has no test {name}");
            named.insert((page.clone(), name.to_owned()));
        }
    }
    for (page, least) in [("README.md", 8), ("docs/guarantees.md", 20)] {
        let count = named.iter().filter(|(of, _)| of == page).count();
        assert!(count >= least, "{page} names {count} tests");
    }
}

#[test]
fn the_page_of_metrics_has_all_of_them_with_their_help() {
    let rows = METRICS.iter().map(|metric| {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Seconds => "histogram, s",
            Kind::Count => "histogram",
        };
        format!("| `{}` | {kind} | {} |", metric.name, metric.help)
    });
    let text = read("docs/metrics.md");
    let found: Vec<&str> = text.lines().filter(|line| line.starts_with("| `fairlane_")).collect();
    assert_eq!(found, rows.collect::<Vec<_>>());
}

/// A row that goes on in the next line ends its table there.
#[test]
fn every_row_of_a_table_is_one_line() {
    for page in pages() {
        let text = read(&page);
        for line in prose(&text).into_iter().filter(|line| line.starts_with('|')) {
            assert!(line.ends_with('|'), "{page}: {line}");
        }
    }
}

#[test]
fn no_cell_of_a_table_is_a_paragraph() {
    for page in pages() {
        let text = read(&page);
        for line in prose(&text).into_iter().filter(|line| line.starts_with('|')) {
            for cell in line.replace("\\|", "/").split('|') {
                let words = cell.split_whitespace().count();
                assert!(words <= CELL_WORDS, "{page}: a cell of {words} words:{cell}");
            }
        }
    }
}
