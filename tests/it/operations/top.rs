//! `fairlane top` in a real terminal, beside a real instance.

use std::path::Path;

use crate::support::cli::run_in;
use crate::support::process::signal;
use crate::support::push::Push;
use crate::support::receiver::{Call, Reply};
use crate::support::served::PROGRAM;
use crate::support::terminal::Terminal;

async fn answer(_: Call) -> Reply {
    Reply::new(500, "oops")
}

/// A pipeline whose bot `shop-7` has a queued event that fails.
async fn failing() -> Push {
    let hour = "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }";
    let push = Push::new(&[("pipelines.test.backoff", hour)], answer).await;
    push.publish("shop-7", 0..1).await;
    push
}

/// Runs it in a shell that shows its exit code, and whether the modes of the terminal are as before.
fn run(directory: &Path, config: &str, env: &[(&str, &str)]) -> Terminal {
    std::fs::write(directory.join("fairlane.toml"), config).unwrap();
    let script = format!(
        "stty -g > before; {PROGRAM} top --interval 500ms; echo exit $?; stty -g > after; cmp before after && echo as before"
    );
    Terminal::run(directory, &script, env)
}

/// Waits until it has ended and the terminal is as before.
async fn restored(terminal: &Terminal) {
    terminal.until("as before").await;
    assert!(terminal.text().contains("exit 0"), "{}", terminal.text());
    assert!(!terminal.is_taken() && !terminal.hides_cursor(), "{}", terminal.text());
}

/// The process id of `fairlane` below the shell.
fn child_of(shell: u32) -> u32 {
    let children = format!("/proc/{shell}/task/{shell}/children");
    let children = std::fs::read_to_string(children).unwrap();
    children.split_whitespace().next().expect("it runs").parse().unwrap()
}

fn has_row(shown: &str, start: &str, text: &str) -> bool {
    shown.lines().any(|line| line.starts_with(start) && line.contains(text))
}

#[tokio::test]
async fn it_shows_a_failing_bot_pauses_a_pipeline_by_key_and_restores_the_terminal() {
    let push = failing().await;
    let served = push.serve().await;
    let directory = tempfile::tempdir().unwrap();
    let terminal = run(directory.path(), &push.config, &[]);
    terminal
        .until_that("the bot with its reason", |shown| {
            has_row(shown, "shop-7", "the receiver answered")
        })
        .await;
    terminal.until("!! pipeline test fails for shop-7").await;
    assert!(terminal.is_taken() && terminal.hides_cursor());
    assert!(terminal.has_colours());
    let shown = terminal.text();
    assert!(has_row(&shown, "test ", "running"), "{shown}");

    terminal.keys("p");
    terminal.until("Pause pipeline test?").await;
    terminal.keys("y");
    terminal.until("pipeline test is paused").await;
    terminal.until_that("the state", |shown| has_row(shown, "test ", "paused")).await;
    let listed = run_in(directory.path(), &["pipelines", "list"], "");
    assert!(has_row(&listed.out, "test ", "paused"), "{listed:?}");

    // The next pane: the bot.
    terminal.keys("\tp");
    terminal.until("Pause bot shop-7 of pipeline test?").await;
    terminal.keys("n");
    terminal.until_that("the question is gone", |shown| !shown.contains("Pause bot")).await;

    terminal.resize(40, 120);
    let reason = "the receiver answered 500";
    terminal.until_that("more of the reason", |shown| has_row(shown, "shop-7", reason)).await;
    terminal.keys("q");
    restored(&terminal).await;
    drop(served);
}

#[tokio::test]
async fn without_redis_it_says_so_keeps_the_figures_and_reacts_to_keys() {
    let push = failing().await;
    let served = push.serve().await;
    let directory = tempfile::tempdir().unwrap();
    let terminal = run(directory.path(), &push.config, &[("NO_COLOR", "1")]);
    terminal.until("shop-7").await;
    push.server.sigstop();
    terminal.until("Redis does not answer for ").await;
    let shown = terminal.text();
    assert!(shown.contains("by name, old") && shown.contains("shop-7"), "{shown}");
    assert!(!terminal.has_colours());
    terminal.keys("?");
    terminal.until("pause or resume the row").await;
    terminal.keys("x");
    push.server.sigcont();
    terminal.until_that("it answers again", |shown| !shown.contains(", old")).await;
    // Ctrl-C
    terminal.keys("\u{3}");
    restored(&terminal).await;
    drop(served);
}

#[tokio::test]
async fn sigterm_ends_it_and_restores_the_terminal() {
    let push = failing().await;
    let directory = tempfile::tempdir().unwrap();
    let terminal = run(directory.path(), &push.config, &[]);
    terminal.until("Pipelines (").await;
    signal(child_of(terminal.id()), "TERM");
    restored(&terminal).await;
}

#[tokio::test]
async fn without_a_terminal_it_names_the_command_for_scripts() {
    let directory = tempfile::tempdir().unwrap();
    let ran = run_in(directory.path(), &["top"], "");
    assert_eq!((ran.code, ran.out.as_str()), (64, ""), "{ran:?}");
    assert!(ran.err.contains("needs a terminal; `fairlane status`"), "{ran:?}");
    let mut left = std::fs::read_dir(directory.path()).unwrap();
    assert!(left.next().is_none(), "it starts no private Redis");
}
