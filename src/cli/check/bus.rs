//! The bus streams: do they exist, can they be trimmed, does a process read each one, and which
//! group delays trimming?

use super::{Finding, redis};
use crate::cli::output::{count, number};
use crate::redis::{Server, StreamKind, StreamView};

/// In entries. A group with a larger lag is reported, because it keeps the stream from being
/// trimmed.
const LAG_MAX: u64 = 100_000;

pub(super) async fn check(server: &Server, stream: &str, trim: bool) -> Finding {
    let check = format!("bus {stream}");
    let view = match server.stream(stream).await {
        Ok(view) => view,
        Err(error) => return redis::refused(&check, &error),
    };
    if trim
        && view.kind != StreamKind::Other
        && let Err(error) = server.try_trim(stream).await
    {
        return redis::refused(&check, &error);
    }
    judge(check, &view, trim)
}

fn judge(check: String, view: &StreamView, trim: bool) -> Finding {
    if view.kind == StreamKind::Other {
        return Finding::fail(
            check,
            "the key holds something that is no stream",
            "no event can be published or read",
            "rename that key, or set bus.streams",
        );
    }
    let unread = view.unread.unwrap_or(view.length);
    let found = describe(view, unread);
    if unread > 0 && !view.reader {
        return Finding::warn(
            check,
            found,
            "no process reads it, so nothing is handled",
            "start `fairlane serve` with the role ingest",
        );
    }
    let behind = view.groups.iter().find(|group| group.lag.is_some_and(|lag| lag > LAG_MAX));
    match behind {
        Some(group) if trim => {
            let why =
                format!("entries that {} has not read are kept, and fill the memory", group.name);
            let remedy = format!(
                "find out why its consumers are slow, or delete it: XGROUP DESTROY {} {}",
                view.stream, group.name
            );
            Finding::warn(check, found, why, remedy)
        }
        _ => Finding::ok(check, found),
    }
}

fn describe(view: &StreamView, unread: u64) -> String {
    let mut found = match view.kind {
        StreamKind::Absent => "no event yet".to_owned(),
        _ => format!("{}, {} unread", count(view.length, "event"), number(unread)),
    };
    found.push_str(if view.reader { ", is read" } else { ", no reader now" });
    for group in &view.groups {
        let lag = group.lag.map_or_else(|| "?".to_owned(), number);
        let pending = number(group.pending);
        found.extend(["; group ", &group.name, " (lag ", &lag, ", pending ", &pending, ")"]);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use crate::redis::GroupView;

    fn view() -> StreamView {
        StreamView {
            stream: "s".to_owned(),
            kind: StreamKind::Stream,
            length: 10,
            unread: Some(0),
            unread_since_ms: None,
            reader: true,
            groups: vec![GroupView { name: "g".to_owned(), pending: 1, lag: Some(2) }],
        }
    }

    #[test]
    fn a_stream_that_cannot_be_read_or_trimmed_is_found_out() {
        let lagging = |lag| {
            let groups = vec![GroupView { name: "g".to_owned(), pending: 0, lag }];
            StreamView { groups, ..view() }
        };
        let cases = [
            (view(), true, State::Ok),
            (StreamView { kind: StreamKind::Other, ..view() }, true, State::Fail),
            (StreamView { reader: false, ..view() }, true, State::Ok),
            (StreamView { reader: false, unread: Some(1), ..view() }, true, State::Warn),
            (StreamView { reader: false, unread: None, ..view() }, true, State::Warn),
            (lagging(None), true, State::Ok),
            (lagging(Some(LAG_MAX)), true, State::Ok),
            (lagging(Some(LAG_MAX + 1)), true, State::Warn),
            (lagging(Some(LAG_MAX + 1)), false, State::Ok),
        ];
        for (view, trim, state) in cases {
            let finding = judge("bus s".to_owned(), &view, trim);
            assert_eq!(finding.state, state, "{view:?}");
        }
        let found = judge("bus s".to_owned(), &view(), true).found;
        assert_eq!(found, "10 events, 0 unread, is read; group g (lag 2, pending 1)");
    }
}
