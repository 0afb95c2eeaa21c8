//! Pauses and resumes what the operator has confirmed.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::state::{Answer, Command};
use crate::cli::output::plain;
use crate::cli::session::Session;

/// Time limit of a command, so that the operator learns soon that Redis does not answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Carries out commands, one after the other, and tells how each ended.
pub(super) async fn run(
    session: &Session,
    mut commands: mpsc::Receiver<Command>,
    told: mpsc::Sender<Answer>,
) {
    while let Some(command) = commands.recv().await {
        if told.send(act(session, &command).await).await.is_err() {
            return;
        }
    }
}

async fn act(session: &Session, command: &Command) -> Answer {
    let Command { pause, pipeline, bot } = command;
    let queue = session.queue(pipeline);
    let change = async {
        if *pause { queue.pause(bot.as_ref()).await } else { queue.resume(bot.as_ref()).await }
    };
    let what = match bot {
        Some(bot) => format!("bot {} of pipeline {pipeline}", plain(bot.as_str())),
        None => format!("pipeline {pipeline}"),
    };
    match timeout(LIMIT, change).await {
        Ok(Ok(changed)) => {
            let ended = match (pause, changed) {
                (true, true) => "is paused",
                (true, false) => "was paused already",
                (false, true) => "goes on",
                (false, false) => "was not paused",
            };
            Ok(format!("{what} {ended}"))
        }
        Ok(Err(error)) => Err(format!("{what}: {error}")),
        Err(_) => {
            Err(format!("{what}: no answer within {} s; it may be changed or not", LIMIT.as_secs()))
        }
    }
}
