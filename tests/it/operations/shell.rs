//! Shell completions and manual pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::cli::run_in;
use crate::support::receivers::is_there;
use crate::support::served::PROGRAM;

/// What bash offers after these words. The last one may be incomplete.
fn completed(script: &Path, words: &[&str]) -> BTreeSet<String> {
    // The script is called as readline calls it. It comes with bash alone.
    let call = r#"
        source "$1"; shift
        spec=$(complete -p fairlane)
        function=${spec#*-F }; function=${function%% *}
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
        "$function" fairlane "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let Output { status, stdout, stderr } = Command::new("bash")
        .args(["--norc", "--noprofile", "-c", call, "bash"])
        .arg(script)
        .args(words)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.is_empty(), "{status}: {said}");
    String::from_utf8(stdout).unwrap().lines().map(str::to_owned).collect()
}

fn offers(found: &BTreeSet<String>, expected: &[&str]) {
    for word in expected {
        assert!(found.contains(*word), "{word} is missing in {found:?}");
    }
}

#[test]
fn bash_completes_commands_options_and_values() {
    let directory = tempfile::tempdir().unwrap();
    let ran = run_in(directory.path(), &["completions", "bash"], "");
    assert_eq!(ran.code, 0, "{ran:?}");
    let script = directory.path().join("fairlane.bash");
    fs::write(&script, &ran.out).unwrap();

    offers(&completed(&script, &["fairlane", ""]), &["serve", "status", "top", "tail", "man"]);
    let bots = completed(&script, &["fairlane", "bo"]);
    assert_eq!(bots, BTreeSet::from(["bots".to_owned()]));
    offers(&completed(&script, &["fairlane", "bots", ""]), &["list", "attempts", "pause"]);
    offers(&completed(&script, &["fairlane", "tail", "--"]), &["--bot", "--failing", "--json"]);
    let sorts = completed(&script, &["fairlane", "bots", "list", "--sort", ""]);
    assert_eq!(sorts, BTreeSet::from(["age".to_owned(), "depth".to_owned()]));
}

#[test]
fn each_shell_gets_a_script_with_every_command() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = run_in(directory.path(), &["completions", shell], "");
        assert_eq!(ran.code, 0, "{ran:?}");
        for command in ["serve", "attempts", "redrive", "completions"] {
            assert!(ran.out.contains(command), "{shell}: {command} is missing");
        }
    }
    let ran = run_in(directory.path(), &["completions", "tcsh"], "");
    assert!(ran.code == 64 && ran.err.contains("elvish"), "{ran:?}");
}

/// The commands that `--help` of this one lists.
fn subcommands(of: &[String]) -> Vec<String> {
    let output = Command::new(PROGRAM).args(of).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let Some((_, list)) = help.split_once("\nCommands:\n") else { return Vec::new() };
    let list = list.split("\n\n").next().unwrap_or_default();
    let starts = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = starts.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// All commands, as their words.
fn commands(of: &[String]) -> Vec<Vec<String>> {
    let mut all = vec![of.to_vec()];
    for name in subcommands(of) {
        all.extend(commands(&[of, &[name]].concat()));
    }
    all
}

#[test]
fn every_command_has_a_manual_page_that_man_can_show() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("share/man1");
    let ran = run_in(directory.path(), &["man", "--dir", "share/man1"], "");
    assert_eq!(ran.code, 0, "{ran:?}");
    let written: BTreeSet<String> = fs::read_dir(&pages)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let commands = commands(&[]);
    assert!(commands.len() > 30, "{commands:?}");
    let file = |words: &Vec<String>| {
        let mut name = "fairlane".to_owned();
        for word in words {
            name.extend(["-", word]);
        }
        name + ".1"
    };
    let expected: BTreeSet<String> = commands.iter().map(file).collect();
    assert_eq!(written, expected, "pages (left) and commands (right) differ");
    assert!(ran.out.starts_with(&format!("wrote {} pages to ", written.len())), "{ran:?}");
    for page in &written {
        let text = fs::read_to_string(pages.join(page)).unwrap();
        for part in [".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH EXAMPLES"] {
            assert!(text.contains(part), "{page} has no {part}");
        }
    }
    if !is_there("man") || !is_there("groff") {
        return println!("not shown: there is no man");
    }
    for (page, words) in [("fairlane.1", "Examples"), ("fairlane-bots-list.1", "--sort")] {
        let Output { status, stdout, stderr } = Command::new("man")
            .args(["--warnings", "-P", "cat", "-l"])
            .arg(pages.join(page))
            .env("MANWIDTH", "80")
            .env("LC_ALL", "C.UTF-8")
            .output()
            .unwrap();
        let (shown, said) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success() && said.is_empty(), "{page}: {status}: {said}");
        let shown = shown.to_lowercase();
        assert!(shown.contains(&words.to_lowercase()), "{page}: {shown}");
        // Examples keep their lines.
        let example =
            if page == "fairlane.1" { "fairlane check  " } else { "--sort age --limit 10\n" };
        assert!(shown.contains(example), "{page}: {shown}");
    }
}

#[test]
fn the_main_page_is_printed_and_an_unwritable_directory_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let ran = run_in(directory.path(), &["man"], "");
    assert!(ran.code == 0 && ran.out.contains(".TH fairlane 1"), "{ran:?}");
    fs::write(directory.path().join("file"), "").unwrap();
    let ran = run_in(directory.path(), &["man", "--dir", "file"], "");
    assert!(ran.code == 64 && ran.err.contains("file: cannot be written: "), "{ran:?}");
}
