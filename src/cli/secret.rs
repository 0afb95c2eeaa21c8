//! `fairlane secret`.

use clap::Args;
use serde::Serialize;

use super::error::CliError;
use super::output::Output;
use crate::config::Config;
use crate::id::BotId;

const EXAMPLES: &str = "\
Examples:
  fairlane secret --bot shop-7             the receiver checks webhook-signature with it
  fairlane secret --bot shop-7 --json | jq -r '.secrets[0]'

Each of callbacks.secrets gives one line, in the same order. Every call carries one signature per
secret: a receiver may check any of them.";

/// Arguments of `fairlane secret`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SecretArgs {
    /// The bot whose callbacks are signed.
    #[arg(long, value_name = "BOT")]
    bot: BotId,
    /// Print a JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Secrets<'a> {
    bot: &'a BotId,
    secrets: Vec<String>,
}

/// Prints the keys that sign the callbacks of a bot.
pub(super) fn secret(config: &Config, args: &SecretArgs) -> Result<(), CliError> {
    let keys = config.callbacks.secrets.iter().map(|secret| secret.of_bot(&args.bot).expose());
    let secrets = Secrets { bot: &args.bot, secrets: keys.collect() };
    if secrets.secrets.is_empty() {
        return Err(CliError::NoSecret);
    }
    Output::new(args.json).show(&secrets, |secrets| secrets.secrets.join("\n"))
}
