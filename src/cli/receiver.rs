//! `fairlane receiver`.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use clap::Args;
use url::Url;

use super::error::CliError;
use super::output::{Output, Tone, plain, print, unread};
use crate::app::AppError;
use crate::config::Config;
use crate::http;
use crate::id::BotId;
use crate::lifecycle::Shutdown;
use crate::outbound::sign::Secret;
use crate::receiver::{self, Behaviour, Told};
use crate::telemetry::harmless_json;

/// Time that calls in flight get to end after the first signal.
const GRACE: Duration = Duration::from_secs(5);
const BACKLOG: u32 = 1_024;

const EXAMPLES: &str = "\
Examples:
  fairlane receiver --bot shop-7                     for notifications of that bot
  fairlane receiver --fail 0.2 --status 503 --retry-after 5s
  fairlane receiver --async http://127.0.0.1:8080 --delay 2s     for a push handler

In fairlane.toml: callbacks.allow_nets = [\"127.0.0.1\"] for notifications, or a push handler's
url = \"http://127.0.0.1:9000/\". Targets for recheck_url: /recheck/ok, /recheck/refused,
/recheck/503 (or any status) and /recheck/hang; /health answers ok.

Signatures are checked with the keys of --secret, and with keys derived from callbacks.secrets:
those of pushes with the key of the bot that the push names, all others with the notification keys
of --bot. A call with a bad signature gets 401. Without keys, nothing is checked.";

/// Arguments of `fairlane receiver`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReceiverArgs {
    /// The listening address; port 0 picks a free one.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// A key as `fairlane secret` prints it. May be repeated.
    #[arg(long, value_name = "WHSEC", value_parser = secret)]
    secret: Vec<Secret>,
    /// Accept notifications of this bot, by its key from callbacks.secrets. May be repeated.
    #[arg(long, value_name = "BOT")]
    bot: Vec<BotId>,
    /// Fail this share of the calls on purpose, from 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    fail: f64,
    /// The status of calls that fail on purpose.
    #[arg(long, value_name = "CODE", default_value = "500", value_parser = status)]
    status: StatusCode,
    /// The header Retry-After of calls that fail on purpose, such as 5s.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    retry_after: Option<Duration>,
    /// Response time of each call, such as 2s.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = humantime::parse_duration)]
    delay: Duration,
    /// Answer pushes with 202, and complete their leases at this Fairlane after --delay.
    #[arg(long = "async", value_name = "URL")]
    complete_at: Option<Url>,
    /// Print the headers too. They may contain tokens.
    #[arg(long)]
    headers: bool,
    /// Print one JSON object per call instead of a line.
    #[arg(long)]
    json: bool,
}

fn secret(text: &str) -> Result<Secret, String> {
    Secret::parse(text).map_err(|error| error.to_string())
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a fraction from 0 to 1".to_owned())
}

fn status(text: &str) -> Result<StatusCode, String> {
    let status = text.parse::<StatusCode>().ok().filter(|status| status.as_u16() >= 300);
    status.ok_or_else(|| "write a status from 300 to 599, such as 503".to_owned())
}

/// Receives until a signal.
pub(super) async fn receiver(config: &Config, args: ReceiverArgs) -> Result<(), CliError> {
    let secrets = &config.callbacks.secrets;
    if !args.bot.is_empty() && secrets.is_empty() {
        return Err(CliError::NoSecret);
    }
    let behaviour = Behaviour {
        keys: args.secret,
        bots: args.bot,
        secrets: secrets.clone(),
        fail: args.fail,
        status: args.status,
        retry_after: args.retry_after,
        delay: args.delay,
        complete_at: args.complete_at,
        headers: args.headers,
    };
    let shutdown = Shutdown::new();
    shutdown.listen_for_signals(Duration::ZERO, GRACE).map_err(CliError::Signals)?;
    let listener = http::bind("--listen", args.listen, BACKLOG).map_err(AppError::from)?;
    let address = listener.local_addr().map_err(CliError::Receiver)?;
    let output = Output::new(args.json);
    if args.json {
        print(&serde_json::json!({"listening": format!("http://{address}")}).to_string())?;
    } else {
        print(&format!("listening on http://{address}"))?;
        if behaviour.keys.is_empty() && behaviour.secrets.is_empty() {
            print(
                "signatures are not checked: there is no --secret, and callbacks.secrets is empty",
            )?;
        }
    }
    let (stop, closed) = (shutdown.soft.clone(), shutdown.soft.clone());
    // Behind `| head`, it would run on unseen.
    shutdown.spawn(async move {
        tokio::select! {
            biased;
            () = closed.cancelled() => {}
            () = unread() => closed.cancel(),
        }
    });
    let json = args.json;
    let tell = move |told: &Told| {
        let line = if json {
            harmless_json(&serde_json::to_string(told).unwrap_or_default()).into_owned()
        } else {
            line(output, told)
        };
        // Stop if standard output cannot be written.
        if print(&line).is_err() {
            stop.cancel();
        }
    };
    let run = receiver::run(listener, behaviour, &shutdown, tell).await;
    shutdown.soft.cancel();
    shutdown.wait().await;
    run.map_err(CliError::Receiver)
}

/// One call as text.
fn line(output: Output, told: &Told) -> String {
    let time = told.time.split('T').nth(1).unwrap_or(&told.time).trim_end_matches('Z');
    let status = told.status.map_or_else(|| "---".to_owned(), |status| status.to_string());
    let tone = match told.status {
        Some(status) if status < 300 => Tone::Good,
        Some(status) if status < 500 => Tone::Warning,
        _ => Tone::Bad,
    };
    let signature = match told.signature {
        "good" => "signed",
        "none" => "UNSIGNED",
        "old" => "OLD",
        "wrong" => "FORGED",
        other => other,
    };
    let seen = if told.again { "again" } else { "new" };
    let status = output.paint(tone, &status);
    let (method, path) = (&told.method, plain(&told.path));
    let mut line = format!("{time:<12}  {status}  {signature:<9}  {seen:<5}  {method} {path}");
    match &told.push {
        Some(push) => {
            let (events, again) = (push.events.len(), push.again);
            let _ = write!(
                line,
                "  bot {} fence {} attempt {}: {events} events, {again} again",
                plain(&push.bot),
                push.fence,
                push.attempt
            );
        }
        None => {
            for text in [&told.id, &told.body].into_iter().filter(|text| !text.is_empty()) {
                let _ = write!(line, "  {}", plain(text));
            }
        }
    }
    for (name, value) in &told.headers {
        let _ = write!(line, "\n              {name}: {}", value.escape_debug());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receiver::ToldPush;

    #[test]
    fn no_caller_controls_the_terminal() {
        let harmful = "\u{7f}\u{9b}2J\u{202e}";
        let push = |bot: &str| ToldPush {
            bot: bot.to_owned(),
            fence: 1,
            attempt: 1,
            events: Vec::new(),
            again: 0,
        };
        let told = |push| Told {
            time: "2026-01-01T00:00:00.000Z".to_owned(),
            method: "POST".to_owned(),
            path: format!("/{harmful}"),
            status: Some(200),
            signature: "good",
            id: harmful.to_owned(),
            again: false,
            push,
            headers: vec![("name".to_owned(), harmful.to_owned())],
            body: harmful.to_owned(),
        };
        for told in [told(Some(push(harmful))), told(None)] {
            let shown = line(Output::new(false), &told);
            assert!(!shown.contains(['\u{7f}', '\u{9b}', '\u{202e}']), "{shown:?}");
            assert!(shown.contains(r"/\u{7f}\u{9b}2J\u{202e}"), "{shown:?}");
        }
    }
}
