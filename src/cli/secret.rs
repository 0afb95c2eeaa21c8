//! `fairlane secret`.

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::error::CliError;
use super::output::Output;
use crate::config::Config;
use crate::id::BotId;
use crate::notifications;
use crate::outbound::sign::{Purpose, Secret};

const EXAMPLES: &str = "\
Examples:
  fairlane secret --bot shop-7                       for its receiver of pushes
  fairlane secret --bot shop-7 --kind notification   for its receiver of notifications
  fairlane secret --bot shop-7 --json | jq -r '.secrets[0]'

The receiver checks webhook-signature with it. Pushes and notifications have different keys, so
that no notification passes for a push.

Each of callbacks.secrets gives one line, in the same order. Every call carries one signature per
secret: a receiver may check any of them.";

/// Arguments of `fairlane secret`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SecretArgs {
    /// The bot whose callbacks are signed.
    #[arg(long, value_name = "BOT")]
    bot: BotId,
    /// The calls that the key signs.
    #[arg(long, value_name = "KIND", value_enum, default_value = "push")]
    kind: Kind,
    /// Print a JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

/// The kind of a call.
#[derive(Debug, Clone, Copy, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Slices for push handlers.
    Push,
    /// Notifications, and their rechecks.
    Notification,
}

impl Kind {
    const fn purpose(self) -> Purpose {
        match self {
            Self::Push => Purpose::PUSH,
            Self::Notification => notifications::SIGNED,
        }
    }
}

#[derive(Serialize)]
struct Printed<'a> {
    bot: &'a BotId,
    kind: Kind,
    secrets: Vec<String>,
}

/// Prints the keys that sign the callbacks of a bot.
pub(super) fn secret(config: &Config, args: &SecretArgs) -> Result<(), CliError> {
    let SecretArgs { bot, kind, .. } = args;
    let key = |secret: &Secret| secret.key(kind.purpose(), bot).expose();
    let secrets = config.callbacks.secrets.iter().map(key).collect();
    let printed = Printed { bot, kind: *kind, secrets };
    if printed.secrets.is_empty() {
        return Err(CliError::NoSecret);
    }
    Output::new(args.json).show(&printed, |printed| printed.secrets.join("\n"))
}
