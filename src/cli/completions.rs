//! `fairlane completions`.

use clap::Args;
use clap_complete::Shell;

use super::error::CliError;
use super::output::print;

const EXAMPLES: &str = "\
Examples:
  source <(fairlane completions bash)      this shell only
  fairlane completions bash > ~/.local/share/bash-completion/completions/fairlane
  fairlane completions zsh > ~/.zfunc/_fairlane      with fpath+=(~/.zfunc) before compinit
  fairlane completions fish > ~/.config/fish/completions/fairlane.fish";

/// Arguments of `fairlane completions`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script of a shell.
pub(super) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), super::NAME, &mut script);
    print(&String::from_utf8_lossy(&script))
}
