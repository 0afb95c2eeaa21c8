//! `fairlane man`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::error::CliError;
use super::output::{count, print};

const EXAMPLES: &str = "\
Examples:
  fairlane man | man -l -                       read the page of fairlane itself
  fairlane man --dir ~/.local/share/man/man1    then: man fairlane-bots-list
  sudo fairlane man --dir /usr/local/share/man/man1";
const MANUAL: &str = "Fairlane";

/// Arguments of `fairlane man`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ManArgs {
    /// Write the pages of all commands into this directory, which is created if necessary. Without
    /// it, the page of `fairlane` itself is printed.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the main page, or writes all of them.
pub(super) fn man(args: &ManArgs) -> Result<(), CliError> {
    let mut command = super::command().disable_help_subcommand(true);
    command.build();
    let Some(dir) = &args.dir else {
        let (_, page) = page(&command).map_err(CliError::Output)?;
        return print(&String::from_utf8_lossy(&page));
    };
    let not_written = |path: &Path| {
        let name = path.display().to_string();
        move |source| CliError::NotWritten { name, source }
    };
    fs::create_dir_all(dir).map_err(not_written(dir))?;
    let mut pages = Vec::new();
    collect(&command, &mut pages).map_err(CliError::Output)?;
    for (name, page) in &pages {
        let path = dir.join(name);
        fs::write(&path, page).map_err(not_written(&path))?;
    }
    let written = count(pages.len() as u64, "page");
    print(&format!("wrote {written} to {}", dir.display()))
}

/// A page with the name of its file.
type Page = (String, Vec<u8>);

/// Adds the pages of a command and of its subcommands.
fn collect(command: &Command, pages: &mut Vec<Page>) -> io::Result<()> {
    pages.push(page(command)?);
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        collect(command, pages)?;
    }
    Ok(())
}

fn page(command: &Command) -> io::Result<Page> {
    let source = format!("{} {}", super::NAME, env!("CARGO_PKG_VERSION"));
    // An empty date would be left out, and the next parts would take its place.
    let man = Man::new(command.clone()).date(" ").source(source).manual(MANUAL);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(help) = command.get_after_help() {
        examples(&help.to_string()).to_writer(&mut page)?;
    }
    Ok((man.get_filename(), page))
}

/// The text after the help: examples keep their lines, other paragraphs are filled.
fn examples(help: &str) -> Roff {
    let mut roff = Roff::default();
    let mut has_notes = false;
    for paragraph in help.split("\n\n") {
        let mut lines = paragraph.lines();
        if let Some(lines) = paragraph.strip_prefix("Examples:\n") {
            roff.control("SH", ["EXAMPLES"]).control("nf", []);
            for line in lines.lines() {
                roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
            }
            roff.control("fi", []);
        } else if lines.next().is_some() {
            if has_notes {
                roff.control("PP", []);
            } else {
                roff.control("SH", ["NOTES"]);
                has_notes = true;
            }
            roff.text([roman(paragraph.replace('\n', " "))]);
        }
    }
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines_and_notes_are_filled() {
        let page = examples("Examples:\n  a  b\n  .c\n\nOne\nnote.\n\nAnother.").to_roff();
        assert_eq!(
            page,
            ".SH EXAMPLES\n.nf\na  b\n\\&.c\n.fi\n.SH NOTES\nOne note.\n.PP\nAnother.\n"
        );
    }
}
