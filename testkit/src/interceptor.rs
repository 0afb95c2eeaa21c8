//! Interceptors of single commands on their way through a proxy. Each waits for one command, and
//! tells the test when it has caught it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

/// The effect on a caught command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interception {
    /// The command reaches the server only after its release, also if its client has ended by then.
    HoldCommand,
    /// The server has executed the command. Its reply reaches the client only after its release.
    HoldReply,
    /// The server has executed the command. Its reply is lost, because the connection ends.
    LoseReply,
    /// No effect. The interceptor tells the test when the reply was handed on.
    Watch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Set,
    Caught,
    Released,
    /// The server executed and answered the held command.
    Answered,
    /// The connection ends.
    Cut,
}

/// An interceptor as the test sees it. When it is dropped, it is removed, and the connection of a
/// held command is cut.
#[derive(Debug)]
pub struct Interceptor(Arc<watch::Sender<Stage>>);

impl Interceptor {
    /// Waits for a command. Returns whether it was caught within the time.
    pub async fn catches(&self, within: Duration) -> bool {
        self.reaches(Stage::Caught, within).await
    }

    pub fn has_caught(&self) -> bool {
        *self.0.borrow() >= Stage::Caught
    }

    /// Releases the command, which may also be caught later.
    pub fn release(&self) {
        self.advance(Stage::Released);
    }

    /// Releases a held command and waits for the server's answer. Returns whether it came in time.
    pub async fn completes(&self, within: Duration) -> bool {
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

impl Drop for Interceptor {
    fn drop(&mut self) {
        self.0.send_if_modified(|stage| {
            let cuts = matches!(stage, Stage::Set | Stage::Caught);
            if cuts {
                *stage = Stage::Cut;
            }
            cuts
        });
    }
}

/// A caught command as the proxy sees it.
#[derive(Debug, Clone)]
pub struct Intercepted {
    pub interception: Interception,
    stage: Arc<watch::Sender<Stage>>,
}

impl Intercepted {
    /// Tells the test that the command was caught.
    pub fn report(&self) {
        self.stage.send_if_modified(|stage| {
            let was_set = *stage == Stage::Set;
            if was_set {
                *stage = Stage::Caught;
            }
            was_set
        });
    }

    /// Tells the test, and waits for the release. Returns whether the connection continues.
    pub async fn held(&self) -> bool {
        self.report();
        // The sender lives in `self`.
        let mut stages = self.stage.subscribe();
        let then = stages.wait_for(|stage| *stage >= Stage::Released).await;
        then.is_ok_and(|stage| *stage != Stage::Cut)
    }

    /// Records that the server answered the held command.
    pub fn answered(&self) {
        self.stage.send_if_modified(|stage| {
            let was_released = *stage == Stage::Released;
            if was_released {
                *stage = Stage::Answered;
            }
            was_released
        });
    }

    /// Waits for the answer of the server.
    pub async fn is_answered(&self) {
        let mut stages = self.stage.subscribe();
        let _ = stages.wait_for(|stage| *stage >= Stage::Answered).await;
    }
}

/// Whether a command matches.
pub type Matcher = Box<dyn Fn(&[u8]) -> bool + Send>;

/// The interceptors of a proxy.
#[derive(Default)]
pub struct Interceptors(Mutex<Vec<Waiting>>);

struct Waiting {
    matches: Matcher,
    /// How many matching commands still pass before one is caught.
    after: u32,
    caught: Intercepted,
}

impl std::fmt::Debug for Interceptors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interceptors").finish_non_exhaustive()
    }
}

impl Interceptors {
    /// Adds an interceptor for the `nth` (from 1) matching command from now on.
    pub fn set(&self, matches: Matcher, nth: u32, interception: Interception) -> Interceptor {
        let stage = Arc::new(watch::Sender::new(Stage::Set));
        let caught = Intercepted { interception, stage: Arc::clone(&stage) };
        self.0.lock().unwrap().push(Waiting { matches, after: nth - 1, caught });
        Interceptor(stage)
    }

    /// The first interceptor that matches this command. The others do not count the command.
    pub fn catch(&self, command: &[u8]) -> Option<Intercepted> {
        let mut waiting = self.0.lock().unwrap();
        waiting.retain(|interceptor| *interceptor.caught.stage.borrow() != Stage::Cut);
        let mut caught = None;
        waiting.retain_mut(|interceptor| {
            if caught.is_some() || !(interceptor.matches)(command) {
                return true;
            }
            if interceptor.after > 0 {
                interceptor.after -= 1;
                return true;
            }
            caught = Some(interceptor.caught.clone());
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
    async fn an_interceptor_catches_the_nth_matching_command_and_tells_the_test() {
        let interceptors = Interceptors::default();
        let interceptor = interceptors.set(says("a"), 2, Interception::HoldCommand);
        for word in ["a", "b", "b"] {
            assert!(interceptors.catch(word.as_bytes()).is_none());
        }
        let caught = interceptors.catch(b"a").unwrap();
        assert!(!interceptor.catches(Duration::ZERO).await);
        caught.report();
        assert!(interceptor.has_caught() && interceptor.catches(Duration::ZERO).await);
        assert!(interceptors.catch(b"a").is_none(), "only one");
        interceptor.release();
        assert!(caught.held().await);
        caught.answered();
        assert!(interceptor.completes(Duration::ZERO).await);
    }

    #[tokio::test]
    async fn a_dropped_interceptor_catches_nothing_and_cuts_the_held_command() {
        let interceptors = Interceptors::default();
        drop(interceptors.set(says("a"), 1, Interception::Watch));
        assert!(interceptors.catch(b"a").is_none());
        let interceptor = interceptors.set(says("a"), 1, Interception::HoldReply);
        let caught = interceptors.catch(b"a").unwrap();
        drop(interceptor);
        assert!(!caught.held().await);
    }
}
