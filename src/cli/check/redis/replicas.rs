//! The replicas of a server: are there as many as the settings of both sides ask for?

use super::{Exit, Finding};
use crate::cli::output::{bytes, duration};
use crate::redis::{RedisError, Replication};

/// A replica confirms every second. One that was not heard for this long is a warning.
const SILENT_SECONDS: u64 = 10;

/// `wanted`: `redis.wait_replicas`. `min_to_write`: the setting of the server, or why it may not be
/// read.
pub(super) fn check(
    check: String,
    found: &Replication,
    wanted: u64,
    min_to_write: Result<Option<String>, RedisError>,
) -> Finding {
    let Replication { replicas, lag_seconds, lag_bytes } = *found;
    let min = min_to_write.ok().flatten().and_then(|min| min.parse::<u64>().ok()).unwrap_or(0);
    let mut shown = match replicas {
        0 => "none".to_owned(),
        1 => format!("1 in step, {} behind", bytes(lag_bytes)),
        many => format!("{many} in step, the last one {} behind", bytes(lag_bytes)),
    };
    if wanted > 0 {
        shown = format!("{shown}; redis.wait_replicas is {wanted}");
    }
    if min > 0 {
        shown = format!("{shown}; min-replicas-to-write is {min}");
    }
    if replicas < min {
        let why = "Redis refuses all writes, so nothing is accepted or handled";
        let remedy = "connect its replicas, or lower min-replicas-to-write";
        return Finding::fail(check, shown, why, remedy).exits(Exit::Unavailable);
    }
    if replicas < wanted {
        let why = "nothing is accepted, copied or completed";
        let remedy = "connect its replicas, or lower redis.wait_replicas";
        return Finding::fail(check, shown, why, remedy).exits(Exit::Unavailable);
    }
    if lag_seconds >= SILENT_SECONDS {
        let shown = format!("{shown}; one was not heard for {}", duration(lag_seconds * 1_000));
        let why = "a failover to it loses what it lacks";
        return Finding::warn(check, shown, why, "see whether it runs, and its network");
    }
    if wanted > 0 && replicas == wanted {
        let why = "without one of them, nothing is accepted, copied or completed";
        let remedy = "connect one more replica than redis.wait_replicas";
        return Finding::warn(check, shown, why, remedy);
    }
    Finding::ok(check, shown)
}

/// `agree`: how many of the sentinels name the same primary.
pub(super) fn check_sentinels(agree: usize, all: usize) -> Finding {
    let found = format!("{agree} of {all} name this primary");
    if agree == all && all > 2 {
        return Finding::ok("sentinels", found);
    }
    let (why, remedy) = if agree < all {
        ("with too few sentinels there is no failover", "start the others, or correct redis.url")
    } else {
        ("the loss of one may prevent a failover", "name at least three in redis.url")
    };
    Finding::warn("sentinels", found, why, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(replicas: u64, lag_seconds: u64, wanted: u64, min: &str) -> String {
        let found = Replication { replicas, lag_seconds, lag_bytes: 100 };
        let min = Ok(Some(min.to_owned()));
        format!("{:?}", check("replicas".to_owned(), &found, wanted, min))
    }

    #[test]
    fn too_few_replicas_fail_and_just_enough_are_a_warning() {
        let cases = [
            (0, 0, 0, "0", "none"),
            (2, 1, 1, "0", "2 in step, the last one 100 B behind; redis.wait_replicas is 1"),
            (1, 0, 1, "0", "one more replica"),
            (1, 0, 2, "0", "lower redis.wait_replicas"),
            (1, 0, 1, "2", "lower min-replicas-to-write"),
            (1, 10, 0, "0", "not heard for"),
        ];
        for (replicas, lag, wanted, min, text) in cases {
            let found = checked(replicas, lag, wanted, min);
            assert!(found.contains(text), "{text}: {found}");
        }
    }
}
