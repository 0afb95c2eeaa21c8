//! Who runs a command: the name in the audit trail.

use std::fs::File;
use std::io::Read as _;

use crate::trail::{self, Action, Ring};

use super::error::CliError;
use super::output;
use super::session::Session;

/// Maximum size of the files that are read here.
const FILE_MAX: u64 = 1 << 20;

/// `cli:USER@HOST`. The user is the one who logged in, where the system knows it: it stays the same
/// under `sudo`. It is not proved: who has access to Redis can write any name.
pub(in crate::cli) fn name() -> String {
    let login = text("/proc/self/loginuid").and_then(|text| text.trim().parse().ok());
    // The system says so if nobody logged in.
    let login = login.filter(|&id: &u32| id != u32::MAX);
    let id = login.unwrap_or_else(|| rustix::process::getuid().as_raw());
    let users = text("/etc/passwd").unwrap_or_default();
    let user = user(&users, id).map_or_else(|| format!("uid-{id}"), str::to_owned);
    format!("cli:{user}@{}", gethostname::gethostname().to_string_lossy())
}

/// The name of a user, as `/etc/passwd` has it.
fn user(users: &str, id: u32) -> Option<&str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, found) = (fields.next()?, fields.next()?, fields.next()?);
        (found.parse() == Ok(id)).then_some(name)
    })
}

fn text(path: &str) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(FILE_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The result of an action that may have found nothing to do.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "a result of any type is passed by reference"
)]
pub(in crate::cli) fn changed(changed: &bool) -> String {
    if *changed { "done" } else { "nothing changed" }.to_owned()
}

/// The result of an action on a number of events or dead letters.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "a result of any type is passed by reference"
)]
pub(super) fn number(count: &u64) -> String {
    format!("done: {count}")
}

impl Session {
    /// Does what the operator asks for, and notes it in the audit trail. `told` says with which result.
    /// A trail that cannot be written does not make the action fail: a note on standard error says so.
    pub(super) async fn act<T>(
        &self,
        action: Action,
        work: impl Future<Output = Result<T, CliError>>,
        told: impl FnOnce(&T) -> String,
    ) -> Result<T, CliError> {
        // Boxed, because the futures of commands are large.
        let result = Box::pin(work).await;
        let ended = match &result {
            Ok(value) => told(value),
            Err(error) => format!("failed: {error}"),
        };
        Box::pin(self.note(action, &ended)).await;
        result
    }

    /// Notes an action in the audit trail; one that takes long, when it starts.
    pub(super) async fn note(&self, action: Action, result: &str) {
        let action = action.by(&name(), None).ended(result);
        if let Err(error) = Box::pin(trail::note(self.link(), Ring::Operators, &action)).await {
            output::tell(format_args!("note: the audit trail may lack this action: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_the_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\nbroken\nada:x:1000:1000::/home/ada:/bin/sh\n";
        assert_eq!(user(users, 0), Some("root"));
        assert_eq!(user(users, 1_000), Some("ada"));
        assert_eq!((user(users, 1), user("", 0)), (None, None));
    }

    #[test]
    fn the_name_of_an_operator_has_a_user_and_a_host() {
        let name = name();
        let (user, host) = name.strip_prefix("cli:").unwrap().split_once('@').unwrap();
        assert!(!user.is_empty() && !host.is_empty(), "{name}");
    }
}
