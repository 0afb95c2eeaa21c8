//! What an error of Redis means for Fairlane, and what helps.

use redis::{ErrorKind, ServerErrorKind};

use crate::app::AppError;
use crate::redis::RedisError;

/// What waits while no Redis answers.
const AWAY: &str = "nothing is copied or handled while Redis is unavailable";
const LOADING: &str = "LOADING";

/// The starts of messages of a Redis that runs, what each means, and the remedy.
const REFUSALS: [(&str, &str, &str); 14] = [
    (
        "NOPERM",
        "Fairlane needs this right",
        "give it to the user with ACL SETUSER: docs/redis.md lists the rights that Fairlane needs",
    ),
    ("NOAUTH", "Redis does not know us", "correct user and password in redis.url"),
    ("WRONGPASS", "Redis does not know us", "correct user and password in redis.url"),
    (
        "OOM",
        "new events are refused until there is room",
        "raise maxmemory, or let `fairlane serve` drain the queues",
    ),
    (
        LOADING,
        "nothing is copied or handled until Redis has loaded its data",
        "wait; the log of Redis shows the progress",
    ),
    (
        "BUSY ",
        "Redis runs a slow script, and answers nothing else",
        "wait until it ends; redis-cli SCRIPT KILL ends it if it has written nothing",
    ),
    ("READONLY", "nothing can be copied or handled", "set redis.url to the primary"),
    ("MASTERDOWN", "nothing can be copied or handled", "set redis.url to the primary"),
    (
        "NOREPLICAS",
        "nothing is accepted or handled while Redis has too few replicas",
        "connect its replicas, or lower min-replicas-to-write",
    ),
    (
        "CLUSTERDOWN",
        "while a slot has no primary, the cluster refuses all commands",
        "bring back the node that held it, or see: redis-cli --cluster check HOST:PORT",
    ),
    ("MOVED", MOVES, MOVED),
    ("ASK ", MOVES, MOVED),
    ("TRYAGAIN", MOVES, MOVED),
    (
        "MISCONF",
        "Redis refuses writes that it cannot keep",
        "free space on its disk, and check its log",
    ),
];
const MOVES: &str = "the cluster moves slots to another primary";
const MOVED: &str = "retry; if it stays, see: redis-cli --cluster check HOST:PORT";

/// Why an error matters, and what helps.
pub(super) fn explain(error: &RedisError) -> (&'static str, &'static str) {
    let message = match error {
        RedisError::Connect { source, .. }
            if source.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) =>
        {
            LOADING
        }
        RedisError::Connect { .. } => {
            return (
                AWAY,
                "start that Redis, or correct redis.url (FAIRLANE__REDIS__URL), its user and password",
            );
        }
        RedisError::Unknown { .. } => {
            return (
                AWAY,
                "check that this Redis runs and that redis.url (FAIRLANE__REDIS__URL) names the right one; then see whether it was done, or retry",
            );
        }
        RedisError::Unreplicated { .. } => {
            return (
                "this was done, but a failover may lose it",
                "connect its replicas, or lower redis.wait_replicas",
            );
        }
        RedisError::Partly(source) => return explain(source),
        RedisError::Refused { message, .. } => message.as_str(),
        _ => "",
    };
    if message.contains("sentinels") {
        return ("nothing starts without the primary", "follow the error text");
    }
    let known = REFUSALS.iter().find(|(start, ..)| message.starts_with(start));
    known.map_or(
        ("Fairlane needs this to work", "check the log of that Redis"),
        |(_, why, remedy)| (*why, *remedy),
    )
}

/// Why a process cannot start, and what helps if Redis is the cause.
pub(super) fn of_start(error: &AppError) -> String {
    match error {
        AppError::Store(source) if source.is_passing() => {
            format!("{source}; {}", explain(source).1)
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::CliError;
    use crate::cli::exit::Exit;
    use crate::redis::Unconfirmed;

    const TARGET: &str = "127.0.0.1:6379";

    fn refused(message: &str) -> RedisError {
        let (target, message) = (TARGET.to_owned(), message.to_owned());
        RedisError::Refused { target, command: "redrive", message }
    }

    #[test]
    fn a_redis_that_runs_is_not_to_be_started() {
        let (target, reason) = (TARGET.to_owned(), Unconfirmed::Replaced);
        let unconfirmed = RedisError::Unreplicated { target, wanted: 2, reason };
        for (error, remedy) in [
            (unconfirmed, "lower redis.wait_replicas"),
            (refused("OOM command not allowed"), "raise maxmemory"),
            (
                refused("LOADING Redis is loading the dataset"),
                "the log of Redis shows the progress",
            ),
            (refused("BUSY Redis is busy running a script"), "SCRIPT KILL"),
            (refused("READONLY You can't write"), "set redis.url to the primary"),
            (refused("MASTERDOWN Link with MASTER is down"), "set redis.url to the primary"),
            (refused("NOREPLICAS Not enough good replicas"), "lower min-replicas-to-write"),
            (refused("MISCONF Redis is configured to"), "free space on its disk"),
            (refused("CLUSTERDOWN Hash slot not served"), "bring back the node"),
            (refused("MOVED 1 127.0.0.1:7001"), "retry; if it stays"),
            (refused("ASK 1 127.0.0.1:7001"), "retry; if it stays"),
            (refused("TRYAGAIN Multiple keys"), "retry; if it stays"),
        ] {
            assert!(error.is_passing(), "{error}");
            let error = CliError::from(error);
            assert_eq!(error.exit(), Exit::Unavailable);
            let text = error.to_string();
            assert!(text.contains(remedy) && !text.contains("start that Redis"), "{text}");
        }
    }

    #[test]
    fn a_redis_that_does_not_answer_may_have_done_what_it_was_asked_for() {
        let source = || redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        let connect = || RedisError::Connect { target: TARGET.to_owned(), source: source() };
        // Also at the start of a process, which is where most users meet it.
        for error in [CliError::from(connect()), AppError::from(connect()).into()] {
            assert!(error.to_string().contains("; start that Redis, or correct"), "{error}");
            assert_eq!(error.exit(), Exit::Unavailable);
        }
        let unknown = RedisError::Unknown { target: TARGET.to_owned(), source: source() };
        assert!(
            CliError::from(unknown)
                .to_string()
                .ends_with("; then see whether it was done, or retry")
        );
    }
}
