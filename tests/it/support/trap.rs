//! Traps for single commands on their way through a proxy: each waits for one, and tells the test
//! when it has it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

/// What is done with a command that is caught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deed {
    /// It does not reach the server until it is released, also when its client has died by then.
    HoldCommand,
    /// The server has executed it, and nobody knows until it is released.
    HoldReply,
    /// The server has executed it, and nobody ever knows: the connection ends.
    LoseReply,
    /// Nothing; the trap springs when the reply was handed on.
    Watch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Set,
    Sprung,
    Released,
    /// The held command was executed and answered.
    Answered,
    /// The connection ends.
    Cut,
}

/// A trap as the test sees it. Dropped, it is taken away, and what it holds is cut.
#[derive(Debug)]
pub(crate) struct Trap(Arc<watch::Sender<Stage>>);

impl Trap {
    /// Whether it caught a command within the time.
    pub(crate) async fn springs(&self, within: Duration) -> bool {
        self.reaches(Stage::Sprung, within).await
    }

    pub(crate) fn sprung(&self) -> bool {
        *self.0.borrow() >= Stage::Sprung
    }

    /// Lets go what is held, now or later.
    pub(crate) fn release(&self) {
        self.advance(Stage::Released);
    }

    /// Lets go a held command and waits until the server has answered it. Whether it did in time.
    pub(crate) async fn goes_through(&self, within: Duration) -> bool {
        self.release();
        self.reaches(Stage::Answered, within).await && *self.0.borrow() == Stage::Answered
    }

    async fn reaches(&self, stage: Stage, within: Duration) -> bool {
        let mut stages = self.0.subscribe();
        let reached = stages.wait_for(|now| *now >= stage);
        tokio::time::timeout(within, reached).await.is_ok()
    }

    fn advance(&self, to: Stage) {
        self.0.send_if_modified(|stage| std::mem::replace(stage, to.max(*stage)) < to);
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        self.0.send_if_modified(|stage| {
            let cuts = matches!(stage, Stage::Set | Stage::Sprung);
            if cuts {
                *stage = Stage::Cut;
            }
            cuts
        });
    }
}

/// A command in a trap, as the proxy sees it.
#[derive(Debug, Clone)]
pub(crate) struct Caught {
    pub(crate) deed: Deed,
    stage: Arc<watch::Sender<Stage>>,
}

impl Caught {
    /// Tells the test.
    pub(crate) fn spring(&self) {
        self.stage.send_if_modified(|stage| {
            let was_set = *stage == Stage::Set;
            if was_set {
                *stage = Stage::Sprung;
            }
            was_set
        });
    }

    /// Tells the test and waits for it; whether the connection goes on.
    pub(crate) async fn held(&self) -> bool {
        self.spring();
        // The sender lives in `self`.
        let mut stages = self.stage.subscribe();
        let then = stages.wait_for(|stage| *stage >= Stage::Released).await;
        then.is_ok_and(|stage| *stage != Stage::Cut)
    }

    /// The server answered what was held.
    pub(crate) fn answered(&self) {
        self.stage.send_if_modified(|stage| {
            let was_released = *stage == Stage::Released;
            if was_released {
                *stage = Stage::Answered;
            }
            was_released
        });
    }

    /// Waits for that.
    pub(crate) async fn is_answered(&self) {
        let mut stages = self.stage.subscribe();
        let _ = stages.wait_for(|stage| *stage >= Stage::Answered).await;
    }
}

/// Whether a command is meant.
pub(crate) type Matcher = Box<dyn Fn(&[u8]) -> bool + Send>;

/// The traps of a proxy.
#[derive(Default)]
pub(crate) struct Traps(Mutex<Vec<Waiting>>);

struct Waiting {
    is_meant: Matcher,
    /// How many matching commands are still to be let through.
    after: u32,
    caught: Caught,
}

impl std::fmt::Debug for Traps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traps").finish_non_exhaustive()
    }
}

impl Traps {
    /// Sets a trap for the `nth` (from 1) matching command from now on.
    pub(crate) fn set(&self, is_meant: Matcher, nth: u32, deed: Deed) -> Trap {
        let stage = Arc::new(watch::Sender::new(Stage::Set));
        let caught = Caught { deed, stage: Arc::clone(&stage) };
        self.0.lock().unwrap().push(Waiting { is_meant, after: nth - 1, caught });
        Trap(stage)
    }

    /// The trap that this command walks into. One that another trap caught is not counted.
    pub(crate) fn catch(&self, command: &[u8]) -> Option<Caught> {
        let mut waiting = self.0.lock().unwrap();
        waiting.retain(|trap| *trap.caught.stage.borrow() != Stage::Cut);
        let mut caught = None;
        waiting.retain_mut(|trap| {
            if caught.is_some() || !(trap.is_meant)(command) {
                return true;
            }
            if trap.after > 0 {
                trap.after -= 1;
                return true;
            }
            caught = Some(trap.caught.clone());
            false
        });
        caught
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(word: &'static str) -> Matcher {
        Box::new(move |command| command == word.as_bytes())
    }

    #[tokio::test]
    async fn a_trap_catches_the_nth_that_is_meant_and_tells() {
        let traps = Traps::default();
        let trap = traps.set(says("a"), 2, Deed::HoldCommand);
        for word in ["a", "b", "b"] {
            assert!(traps.catch(word.as_bytes()).is_none());
        }
        let caught = traps.catch(b"a").unwrap();
        assert!(!trap.springs(Duration::ZERO).await);
        caught.spring();
        assert!(trap.sprung() && trap.springs(Duration::ZERO).await);
        assert!(traps.catch(b"a").is_none(), "only one");
        trap.release();
        assert!(caught.held().await);
        caught.answered();
        assert!(trap.goes_through(Duration::ZERO).await);
    }

    #[tokio::test]
    async fn a_dropped_trap_catches_nothing_and_cuts_what_it_holds() {
        let traps = Traps::default();
        drop(traps.set(says("a"), 1, Deed::Watch));
        assert!(traps.catch(b"a").is_none());
        let trap = traps.set(says("a"), 1, Deed::HoldReply);
        let caught = traps.catch(b"a").unwrap();
        drop(trap);
        assert!(!caught.held().await);
    }
}
