//! Determines the server for each command of a write.

use std::ops::Range;

use redis::{Arg, Cmd, Pipeline};

use super::slot::slot_of;

/// A destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Destination {
    /// To the primary that holds this slot.
    Slot(u16),
    /// All primaries: the command names no key.
    Everywhere,
}

/// Commands that must go to one server together: a single one, or a transaction from `MULTI` to
/// `EXEC`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) commands: Range<usize>,
    pub(super) place: Destination,
}

/// Divides a write into such units, in order.
pub(super) fn units(pipe: &Pipeline) -> Vec<Unit> {
    let mut units = Vec::with_capacity(pipe.len());
    let mut open: Option<Unit> = None;
    for (at, command) in pipe.cmd_iter().enumerate() {
        let name = argument(command, 0);
        let place = place(command);
        let mut unit = match open.take() {
            None => Unit { commands: at..at + 1, place },
            Some(unit) => {
                let place = if unit.place == Destination::Everywhere { place } else { unit.place };
                Unit { commands: unit.commands.start..at + 1, place }
            }
        };
        let ends = name.eq_ignore_ascii_case(b"EXEC");
        if (unit.commands.len() > 1 && !ends) || name.eq_ignore_ascii_case(b"MULTI") {
            open = Some(unit);
            continue;
        }
        unit.commands.end = at + 1;
        units.push(unit);
    }
    units.extend(open);
    units
}

/// The destination of a command: the slot of its first key.
pub(super) fn place(command: &Cmd) -> Destination {
    let name = argument(command, 0).to_ascii_uppercase();
    let key = match &*name {
        b"PING" | b"INFO" | b"TIME" | b"SCRIPT" | b"CONFIG" | b"SCAN" | b"CLUSTER" | b"CLIENT"
        | b"MULTI" | b"EXEC" | b"ACL" | b"COMMAND" | b"DBSIZE" => None,
        // The SHA, the number of keys, the first key.
        b"EVALSHA" | b"EVAL" => (argument(command, 2) != b"0").then_some(3),
        b"XINFO" | b"XGROUP" | b"OBJECT" | b"MEMORY" => Some(2),
        b"XREAD" | b"XREADGROUP" => command
            .args_iter()
            .position(
                |arg| matches!(arg, Arg::Simple(word) if word.eq_ignore_ascii_case(b"STREAMS")),
            )
            .map(|at| at + 1),
        _ => Some(1),
    };
    let key = key.map(|at| argument(command, at)).filter(|key| !key.is_empty());
    key.map_or(Destination::Everywhere, |key| Destination::Slot(slot_of(key)))
}

fn argument(command: &Cmd, at: usize) -> &[u8] {
    match command.args_iter().nth(at) {
        Some(Arg::Simple(bytes)) => bytes,
        _ => b"",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe(lines: &[&str]) -> Pipeline {
        let mut pipe = Pipeline::new();
        for line in lines {
            let mut words = line.split(' ');
            pipe.cmd(words.next().unwrap());
            for word in words {
                pipe.arg(word);
            }
        }
        pipe
    }

    fn slot(key: &str) -> Destination {
        Destination::Slot(slot_of(key.as_bytes()))
    }

    #[test]
    fn a_command_goes_to_the_slot_of_its_first_key() {
        let cases = [
            ("GET a", slot("a")),
            ("evalsha 00ff 2 {a}x {a}y b", slot("a")),
            ("EVALSHA 00ff 0 b", Destination::Everywhere),
            ("XREAD COUNT 5 BLOCK 100 STREAMS a 0-0", slot("a")),
            ("XINFO STREAM a", slot("a")),
            ("HSETNX fl:{p:1}:hwm s 0-0", slot("p:1")),
            ("PUBLISH a b", slot("a")),
            ("PING", Destination::Everywhere),
            ("INFO memory", Destination::Everywhere),
            ("SCRIPT LOAD x", Destination::Everywhere),
            ("SCAN 0 MATCH x", Destination::Everywhere),
        ];
        for (line, place) in cases {
            assert_eq!(units(&pipe(&[line])), [Unit { commands: 0..1, place }], "{line}");
        }
    }

    #[test]
    fn a_transaction_goes_to_one_place_as_a_whole() {
        let lines = ["GET b", "MULTI", "XADD a * x 1", "XADD a * x 2", "EXEC", "GET c"];
        assert_eq!(
            units(&pipe(&lines)),
            [
                Unit { commands: 0..1, place: slot("b") },
                Unit { commands: 1..5, place: slot("a") },
                Unit { commands: 5..6, place: slot("c") },
            ]
        );
    }
}
