//! Pauses and resumes what the operator has confirmed.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::state::{Answer, Command};
use crate::cli::operator;
use crate::cli::output::plain;
use crate::cli::session::Session;
use crate::queue::PauseNote;
use crate::trail::{self, Action, Ring};

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
        if *pause {
            queue.pause_noting(bot.as_ref(), &PauseNote::new(&operator::name(), None)).await
        } else {
            queue.resume(bot.as_ref()).await
        }
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
            let action = Action::new(if *pause { "pause" } else { "resume" });
            let action = action.in_pipeline(pipeline).of_bot(bot.as_ref());
            let action = action.by(&operator::name(), None).ended(&operator::changed(&changed));
            let noted = Box::pin(trail::note(session.link(), Ring::Operators, &action)).await;
            let lacks = if noted.is_ok() { "" } else { "; the audit trail may lack it" };
            Ok(format!("{what} {ended}{lacks}"))
        }
        Ok(Err(error)) => Err(format!("{what}: {error}")),
        Err(_) => {
            Err(format!("{what}: no answer within {} s; it may be changed or not", LIMIT.as_secs()))
        }
    }
}
