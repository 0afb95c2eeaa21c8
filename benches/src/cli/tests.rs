//! The help has examples, and every documented command is accepted.

use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;

use super::*;

/// How a documented command starts.
const COMMAND: &str = "fairlane-bench ";

#[test]
fn the_command_line_is_free_of_contradictions() {
    Cli::command().debug_assert();
}

#[test]
fn the_help_of_every_scenario_has_examples_that_are_accepted() {
    fn visit(command: &clap::Command, path: &str) {
        let path = format!("{path} {}", command.get_name());
        let help = command.clone().render_long_help().to_string();
        assert!(help.contains("Examples:"), "{path} has no examples");
        let example = help.split("Examples:").nth(1).unwrap_or_default();
        assert!(example.contains(path.trim()), "the examples of {path} show something else");
        // Unformatted: a narrow terminal would break the lines.
        let written = command.get_after_help().expect("examples").to_string();
        for words in commands(&written) {
            accepted(&path, &words);
        }
        for command in command.get_subcommands() {
            if command.get_name() != "help" && !command.is_hide_set() {
                visit(command, &path);
            }
        }
    }
    visit(&Cli::command(), "");
}

#[test]
fn every_documented_command_is_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = 0;
    for page in pages(&root).into_iter().chain(pages(&root.join("docs"))) {
        let text = fs::read_to_string(&page).expect("a page");
        for words in commands(&text) {
            accepted(&page.display().to_string(), &words);
            found += 1;
        }
    }
    assert!(found > 15, "only {found} commands");
}

#[test]
fn the_makefile_names_a_scenario() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let makefile = fs::read_to_string(root.join("Makefile")).expect("the Makefile");
    let scenario = makefile.lines().find_map(|line| line.strip_prefix("SCENARIO ?= "));
    accepted("Makefile", &[scenario.expect("a scenario").to_owned()]);
}

fn pages(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
}

fn accepted(place: &str, words: &[String]) {
    let words = words.iter().map(String::as_str);
    let parsed = Cli::try_parse_from(std::iter::once("fairlane-bench").chain(words.clone()));
    if let Err(error) = parsed {
        panic!("{place}: {:?}: {error}", words.collect::<Vec<_>>());
    }
}

/// The arguments of every command in a text. A command is on a separate line, which may continue
/// after a `\`, or between backticks.
fn commands(text: &str) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let mut commands = Vec::new();
    for line in text.lines() {
        let own = line.trim_start();
        // Variables for one command stand before it.
        let own = own
            .strip_prefix("FAIRLANE_MONGOD=")
            .map_or(own, |rest| rest.split_once(' ').map_or(rest, |(_, command)| command));
        let inline = line.split('`').skip(1).step_by(2);
        for command in std::iter::once(own).chain(inline) {
            if let Some(arguments) = command.strip_prefix(COMMAND) {
                commands.push(words(arguments));
            }
        }
    }
    commands
}

/// The words of a shell command with single quotes. Placeholders become legal values.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for c in command.chars() {
        match c {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            c => words.last_mut().expect("there is a first").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    let legal = |word: String| match word.as_str() {
        "URL" => "http://127.0.0.1:8080".to_owned(),
        _ => word.replace('…', "pipelines"),
    };
    words.into_iter().map(legal).collect()
}
