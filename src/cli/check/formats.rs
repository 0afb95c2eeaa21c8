//! The formats of the data: what does this version write in another way, and what do older processes
//! not understand then?

use super::Finding;
use super::redis::refused;
use crate::formats::{self, FORMATS, Format, Marks, Upgrade, VERSION};
use crate::mongo::client::Mongo;
use crate::presence::{self, Process};
use crate::products;
use crate::redis::Server;

const CHECK: &str = "format";
const DOCUMENTS: &str = "mongodb format";
/// Maximum number of older processes named in a finding.
const SHOWN: usize = 8;

/// Compares the data in Redis with this program.
pub(super) async fn check(server: &Server) -> Finding {
    let link = server.link();
    let processes = async { presence::look(link, server.time().await?).await };
    let asked = tokio::try_join!(formats::look(link), processes, server.shards());
    match asked {
        Ok((_, _, None)) => Finding::ok(CHECK, "no data yet"),
        Ok((marks, processes, Some(_))) => {
            judge(CHECK, &marks, false, &formats::place(link.prefix()), &older(&processes))
        }
        Err(error) => refused(CHECK, &error),
    }
}

/// Compares the documents in MongoDB with this program.
pub(super) fn judge_documents(marks: &Marks, mongo: &Mongo) -> Finding {
    judge(DOCUMENTS, marks, true, &format!("the collection {FORMATS} at {mongo}"), &[])
}

/// The running processes of other versions.
fn older(processes: &[Process]) -> Vec<String> {
    let others = processes.iter().filter(|process| process.version != VERSION);
    others.map(|Process { host, pid, version, .. }| format!("{version} ({host} {pid})")).collect()
}

fn judge(check: &str, marks: &Marks, documents: bool, place: &str, others: &[String]) -> Finding {
    let all = products::formats().filter(|format| format.documents == documents);
    let all: Vec<&Format> = all.collect();
    if let Err(error) = marks.accept(all.iter().copied(), place) {
        let why =
            "this version would misread the data: `fairlane serve` and other commands refuse it";
        let remedy = "use that version or a later one, or restore a backup";
        return Finding::fail(check, error.to_string(), why, remedy);
    }
    judge_upgrade(check, marks, &all, others)
}

fn judge_upgrade(check: &str, marks: &Marks, all: &[&Format], others: &[String]) -> Finding {
    let last = match &marks.last {
        Some(last) => format!("last started: {last}"),
        None if marks.is_empty() => "no mark, so format 1".to_owned(),
        None => "last started: not known".to_owned(),
    };
    let shown: Vec<_> = others.iter().take(SHOWN).map(String::as_str).collect();
    let running = if shown.is_empty() {
        String::new()
    } else {
        format!("; also running: {}", shown.join(", "))
    };
    let Upgrade { rewritten, misread } = marks.upgrade(all.iter().copied());
    if rewritten.is_empty() {
        let found = format!("{last}; {VERSION} changes no format{running}");
        return Finding::ok(check, found);
    }
    let found = format!("{last}; {VERSION} will write {}{running}", rewritten.join("; "));
    if misread.is_empty() {
        return Finding::ok(check, format!("{found}; earlier versions still read it"));
    }
    let why = format!(
        "processes of earlier versions do not understand this, and will not start again: {}",
        misread.join("; ")
    );
    let remedy = "back up, and replace all processes in one rollout: a way back needs the backup";
    Finding::warn(check, found, why, remedy)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use crate::formats::Change;

    const LATER: Format = Format {
        number: 2,
        oldest_reader: 2,
        changes: &[Change {
            number: 2,
            rewritten: "leases have two fences",
            misread: "leases end early",
        }],
        ..Format::first("queues", "queues")
    };
    const READABLE: Format = Format { oldest_reader: 1, ..LATER };

    #[test]
    fn an_upgrade_tells_what_is_rewritten_and_what_older_processes_do_not_understand() {
        let others = ["0.1.0 (host 7)".to_owned()];
        let found = judge_upgrade(CHECK, &Marks::default(), &[&LATER], &others);
        assert_eq!(found.state, State::Warn);
        let expected = format!(
            "no mark, so format 1; {VERSION} will write queues 2 (now 1): leases have two fences; \
             also running: 0.1.0 (host 7)"
        );
        assert_eq!(found.found, expected);
        let why = found.why.unwrap();
        assert!(why.ends_with("will not start again: leases end early"), "{why}");
    }

    #[test]
    fn a_format_that_earlier_versions_read_is_no_warning() {
        let found = judge_upgrade(CHECK, &Marks::default(), &[&READABLE], &[]);
        assert_eq!(found.state, State::Ok);
        assert!(found.found.ends_with("; earlier versions still read it"), "{}", found.found);
    }

    #[test]
    fn every_format_of_this_version_is_described_and_has_a_kind_of_its_own() {
        let mut kinds = std::collections::BTreeSet::new();
        for format in products::formats() {
            assert!(kinds.insert(format.kind), "{format:?}");
            assert!((1..=format.number).contains(&format.oldest_reader), "{format:?}");
            let numbers: Vec<_> = format.changes.iter().map(|change| change.number).collect();
            assert_eq!(numbers, (2..=format.number).collect::<Vec<_>>(), "{format:?}");
        }
        assert!(kinds.len() >= 9, "{kinds:?}");
    }
}
