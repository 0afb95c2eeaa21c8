//! Processor time by process and thread, if `/proc` provides it.

use std::time::Duration;

/// The unit of `/proc/…/stat` on every Linux.
const TICK: Duration = Duration::from_millis(10);

/// Processor time of a process so far.
pub(crate) fn of_process(pid: u32) -> Option<Duration> {
    read(&format!("/proc/{pid}/stat"))
}

/// Processor time of the calling thread so far.
pub(crate) fn of_this_thread() -> Option<Duration> {
    read("/proc/thread-self/stat")
}

fn read(path: &str) -> Option<Duration> {
    parse(&std::fs::read_to_string(path).ok()?)
}

/// Fields 14 and 15: user and system. The name in parentheses may contain spaces.
fn parse(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some(TICK * (ticks()?.checked_add(ticks()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_behind_any_name() {
        let line = "7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0\n";
        assert_eq!(parse(line), Some(Duration::from_secs(2)));
        assert_eq!(parse("7 (a) S 1"), None);
    }
}
