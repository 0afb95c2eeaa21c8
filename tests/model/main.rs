//! Explores the models of the protocol in large systems, and prints a line per system: what is expected,
//! the system, its faults, states, the longest path, and the seconds. `make model` runs it. Arguments
//! choose the lines that contain all of them. It ends with an error at the first line that is not as
//! expected.
//!
//! The tests explore small systems.

mod exhaustive;
mod lanes;
// The random test compares it with the scripts. Operators' commands and limits are in it too.
#[allow(dead_code, unused_imports, reason = "the random operations need the rest")]
#[path = "../it/model/state_machine/mod.rs"]
mod state_machine;

use std::io::Write as _;

use exhaustive::{Budget, Explored, NOTHING_WRONG, Rule, System, Turns};
use state_machine::{Bot, Stream};

/// Two events of one bot, one of each other.
const FOUR: &[(Stream, Bot)] = &[(0, 0), (0, 0), (0, 1), (0, 2)];
/// The first bot gets its events from two streams.
const TWO_STREAMS: &[(Stream, Bot)] = &[(0, 0), (1, 0), (0, 1), (0, 2)];
const LARGE: &str = "3 consumers, 3 bots, 4 events";

/// The lines to run. All words must be in a line.
struct Table {
    words: Vec<String>,
    lines: usize,
}

impl Table {
    fn line(&mut self, expected: &str, system: &str, faults: &str, run: impl FnOnce() -> Explored) {
        let line = format!("{expected:13}  {system:48}  {faults}");
        if !self.words.iter().all(|word| line.contains(word)) {
            return;
        }
        self.lines += 1;
        print!("{line:104}");
        // A terminal shows what is running.
        let _ = std::io::stdout().flush();
        let Explored { states, depth, time } = run();
        println!(" {states:9} states {depth:3} deep {:6.1} s", time.as_secs_f64());
    }

    fn holds(&mut self, name: &str, system: System) {
        let faults = named(&faults(system.budget));
        self.line("holds", name, &faults, || exhaustive::every_promise_holds(system, threads()));
    }

    fn breaks(&mut self, name: &str, promises: &[&'static str], system: System, rule: Rule) {
        let found = "mistake found";
        let without = match rule {
            Rule::Recover => "without: leases end with a restart",
            Rule::FenceCheck => "without: compare the fence",
            Rule::RunCheck => "without: compare the run",
            Rule::OneBucket => "without: one bucket for all holders of a bot",
            Rule::TakeAtOnce => "without: look and take tokens in one call",
        };
        let run = || exhaustive::is_broken(promises, system, rule, threads());
        self.line(found, name, without, run);
    }

    fn lanes_hold(&mut self, budget: lanes::Budget) {
        let faults = named(&lane_faults(budget));
        let bot = lanes::Bot { consumers: 3, events: 5, budget, without: None };
        let run = || lanes::every_promise_holds(bot, threads());
        self.line("holds", LANES, &faults, run);
    }

    fn lanes_break(&mut self, promise: &'static str, budget: lanes::Budget, rule: lanes::Rule) {
        let without = match rule {
            lanes::Rule::Follow => "without: later events follow their lane",
            lanes::Rule::Fence => "without: compare the fence",
            lanes::Rule::Forget => "without: an empty lane is forgotten",
        };
        let bot = lanes::Bot { consumers: 3, events: 5, budget, without: None };
        let run = || lanes::is_broken(promise, bot, rule, threads());
        self.line("mistake found", LANES, without, run);
    }
}

const LANES: &str = "lanes: 3 consumers, 3 lanes of a bot, 5 events";

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn named(faults: &[(u8, &str)]) -> String {
    let named = faults.iter().filter(|(count, _)| *count > 0).map(|&(count, name)| match count {
        1 => name.to_owned(),
        _ => format!("{count}x {name}"),
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() { "none".to_owned() } else { named.join(", ") }
}

fn faults(budget: Budget) -> Vec<(u8, &'static str)> {
    vec![
        (budget.freezes, "frozen"),
        (budget.crashes, "crash"),
        (budget.lost_replies, "lost reply"),
        (budget.lost_tails, "lost tail"),
        (budget.failures, "failure"),
        (budget.purges, "purge"),
        (budget.pauses, "pause"),
    ]
}

fn lane_faults(budget: lanes::Budget) -> Vec<(u8, &'static str)> {
    vec![
        (budget.failures, "failure"),
        (budget.freezes, "frozen"),
        (budget.crashes, "crash"),
        (budget.lost_replies, "lost reply"),
        (budget.revokes, "lease broken"),
        (budget.purges, "purge"),
        (budget.pauses, "pause"),
    ]
}

fn main() {
    let mut table = Table { words: std::env::args().skip(1).collect(), lines: 0 };
    protocol(&mut table);
    rates(&mut table);
    lanes(&mut table);
    if table.lines == 0 {
        eprintln!("model: no line contains all of these words");
        std::process::exit(2);
    }
    println!("model: all {} systems ended as expected", table.lines);
}

fn large(budget: Budget) -> System {
    System::new(3, FOUR, budget, Turns::AnyReduced)
}

fn protocol(table: &mut Table) {
    let (frozen, crash) =
        (Budget { freezes: 1, ..NOTHING_WRONG }, Budget { crashes: 1, ..NOTHING_WRONG });
    let tail = Budget { lost_tails: 1, ..NOTHING_WRONG };
    for budget in [
        NOTHING_WRONG,
        Budget { crashes: 1, lost_replies: 1, ..frozen },
        Budget { freezes: 2, ..NOTHING_WRONG },
        Budget { failures: 1, purges: 1, pauses: 1, ..frozen },
        Budget { freezes: 1, ..tail },
        Budget { crashes: 1, ..tail },
        Budget { lost_replies: 1, ..tail },
        Budget { failures: 1, ..tail },
    ] {
        table.holds(LARGE, large(budget));
    }
    let two = "3 consumers, 3 bots, 4 events of 2 streams";
    for budget in [tail, Budget { lost_replies: 1, ..crash }] {
        table.holds(two, System { events: TWO_STREAMS, ..large(budget) });
    }
    let left = ["an event leaves its queue only after its effect", "no event is lost"];
    table.breaks(two, &left, System { events: TWO_STREAMS, ..large(tail) }, Rule::Recover);
    let stale = ["a stale fence commits nothing"];
    table.breaks(LARGE, &stale, large(frozen), Rule::FenceCheck);
    let both = ["a stale fence commits nothing", "no event is lost"];
    table.breaks(LARGE, &both, large(Budget { crashes: 1, ..tail }), Rule::RunCheck);
}

fn rates(table: &mut Table) {
    let frozen = Budget { freezes: 1, ..NOTHING_WRONG };
    let name = "rates: 3 consumers, 3 bots, 4 events, burst";
    for (burst, budget) in [
        (1, frozen),
        (1, Budget { crashes: 1, ..NOTHING_WRONG }),
        (1, Budget { lost_replies: 1, ..NOTHING_WRONG }),
        (2, frozen),
    ] {
        table.holds(&format!("{name} {burst}"), System { burst: Some(burst), ..large(budget) });
    }
    for rule in [Rule::OneBucket, Rule::TakeAtOnce] {
        let system = System { burst: Some(1), ..large(frozen) };
        table.breaks(&format!("{name} 1"), &["no bot exceeds its rate"], system, rule);
    }
}

fn lanes(table: &mut Table) {
    let failing = lanes::Budget { failures: 1, ..lanes::NOTHING_WRONG };
    for budget in [
        lanes::Budget { failures: 3, ..failing },
        lanes::Budget { crashes: 1, freezes: 1, ..failing },
        lanes::Budget { lost_replies: 1, freezes: 1, ..failing },
        lanes::Budget { purges: 1, freezes: 1, pauses: 1, ..failing },
        lanes::Budget { revokes: 1, lost_replies: 1, ..failing },
    ] {
        table.lanes_hold(budget);
    }
    table.lanes_break("first handlings are in order", failing, lanes::Rule::Follow);
    table.lanes_break("a bot with events is in one place", failing, lanes::Rule::Forget);
    let frozen = lanes::Budget { freezes: 1, ..failing };
    table.lanes_break("a stale fence commits nothing", frozen, lanes::Rule::Fence);
}
