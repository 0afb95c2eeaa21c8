//! Tests of the rules of the model, each with its own figures.

use super::state_machine::{
    Attempts, Bot, Claim, Completed, Completion, Enqueued, Event, Granted, Mode, Name, Names,
    QUIET, Queued, Repeats, Server, Span, Take,
};

const NOW: i64 = 5_000_000;
const SLICE: i64 = 1_000;
const TTL_MS: i64 = 30;
/// After every deadline of a lease granted at [`NOW`].
const LATER: i64 = NOW + TTL_MS * 1_000;

const ALL: Claim =
    Claim { max: 64, bound: i64::MAX, ttl_ms: TTL_MS, seen: 0, isolate: 2, idle_elsewhere: false };

fn with(events: &[(Bot, Event)]) -> Server {
    let mut server = Server::new(SLICE);
    server.push(NOW, events);
    server
}

fn claim_one(server: &mut Server, now_us: i64) -> Granted {
    let claimed = server.claim(now_us, Claim { max: 1, ..ALL });
    *claimed.granted.first().expect("something is ready")
}

fn complete(server: &mut Server, granted: Granted, n: u32, cost: i64, mode: Mode) -> Completed {
    let Granted { bot, fence, .. } = granted;
    let exceptions = Vec::new();
    let run = server.run;
    let call = Completion { bot, run, fence, before: 0, n, cost, mode, exceptions, aside: None };
    let reply = server.complete(NOW, &call);
    assert_eq!(server.broken_invariant(), None);
    reply
}

#[test]
fn new_bots_are_quiet_in_the_order_of_their_first_event() {
    let server = with(&[(3, 0), (1, 1), (3, 2), (2, 3)]);
    let quiet = NOW - QUIET + 1;
    assert_eq!(server.ctl, [(3, quiet), (1, quiet + 1), (2, quiet + 2)].into());
    let sequences: Vec<u64> = server.queues[&3].iter().map(|&(sequence, _)| sequence).collect();
    assert_eq!(sequences, [5_000_000, 5_000_002]);
}

#[test]
fn draining_and_coming_back_gains_nothing() {
    for (cost, score) in [(SLICE, NOW - QUIET + 1), (SLICE + 1, SLICE + 1)] {
        let mut server = with(&[(1, 0)]);
        let granted = claim_one(&mut server, NOW);
        complete(&mut server, granted, 1, cost, Mode::Release);
        assert_eq!((&server.ctl, &server.fin), (&[].into(), &[(1, cost)].into()));
        server.push(NOW, &[(1, 1)]);
        assert_eq!(server.ctl[&1], score, "after a slice that cost {cost}");
        assert_eq!(claim_one(&mut server, NOW).start, cost);
    }
}

#[test]
fn the_clock_moves_to_the_lowest_busy_start_taken_and_never_back() {
    let mut server = with(&[(0, 0)]);
    server.ctl.extend([(1, 70_000), (2, 90_000)]);
    let claimed = server.claim(NOW, ALL);
    let starts: Vec<i64> = claimed.granted.iter().map(|granted| granted.start).collect();
    assert_eq!((starts, claimed.v), (vec![0, 70_000, 90_000], 70_000));
    assert_eq!(server.claim(NOW, Claim { seen: 80_000, ..ALL }).v, 80_000);
    assert_eq!(server.claim(NOW, ALL).v, 80_000);
}

#[test]
fn a_busy_bot_far_behind_the_clock_starts_at_the_clock() {
    for (score, start) in [(50_000, 50_000), (49_999, 100_000)] {
        let mut server = Server::new(SLICE);
        server.ctl.insert(1, score);
        let claimed = server.claim(NOW, Claim { seen: 100_000, ..ALL });
        assert_eq!((claimed.granted[0].start, claimed.v), (start, 100_000));
    }
}

#[test]
fn a_claim_takes_bots_within_its_bound_and_reports_the_lowest_other() {
    let mut server = with(&[(0, 0)]);
    server.ctl.extend([(1, 500), (2, 700)]);
    let claimed = server.claim(NOW, Claim { bound: 600, ..ALL });
    let fences: Vec<(Bot, u64)> = claimed.granted.iter().map(|g| (g.bot, g.fence)).collect();
    assert_eq!(fences, [(0, 5_000_000), (1, 5_000_001)]);
    assert_eq!((claimed.lowest, claimed.deadline_ms), (Some(700), Some(5_030)));
    server.shard_paused = true;
    assert!(server.claim(NOW, ALL).granted.is_empty());
}

#[test]
fn an_expired_lease_counts_as_suspect_until_it_was_renewed() {
    let mut server = with(&[(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]);
    claim_one(&mut server, NOW);
    let second = claim_one(&mut server, LATER);
    assert_eq!(second.attempts, Attempts { suspect: 1, isolate: 4, ..Attempts::default() });
    let until_ms = LATER / 1_000 + TTL_MS;
    complete(&mut server, second, 0, 0, Mode::Keep { until_ms });
    let third = claim_one(&mut server, until_ms * 1_000);
    assert_eq!(third.attempts, Attempts { suspect: 1, lost: 1, isolate: 4, failed: 0 });
    complete(&mut server, third, 1, 1, Mode::Release);
    assert_eq!(server.att[&1], Attempts { isolate: 3, ..Attempts::default() });
    let fourth = claim_one(&mut server, LATER);
    complete(&mut server, fourth, 3, 1, Mode::Release);
    assert_eq!(server.att, [].into(), "progress clears it");
}

#[test]
fn a_failure_rests_in_order_and_comes_back_where_it_left() {
    let mut server = with(&[(1, 0), (1, 1)]);
    let granted = claim_one(&mut server, NOW);
    let mode = Mode::Fail { until_ms: 9_000, isolate: 1 };
    assert_eq!(complete(&mut server, granted, 1, 5_000, mode), Completed::Removed(vec![0]));
    assert_eq!(server.att[&1], Attempts { failed: 1, isolate: 1, ..Attempts::default() });
    assert!(server.claim(8_999_999, ALL).granted.is_empty());
    let again = claim_one(&mut server, 9_000_000);
    assert_eq!((again.start, again.attempts.failed), (5_000, 1));
    assert_eq!(server.peek(1, 9), [1]);
}

#[test]
fn so_many_leases_are_handed_over_and_each_is_counted_until_it_ends() {
    let mut server = with(&[(0, 0), (0, 1), (1, 2), (2, 3)]);
    let [first, second, third] = [(); 3].map(|()| claim_one(&mut server, NOW));
    let until_ms = NOW / 1_000 + 50;
    let hand = Mode::Hand { until_ms, max: 2 };
    assert_eq!(complete(&mut server, first, 0, 7, hand), Completed::Removed(vec![]));
    assert_eq!(complete(&mut server, second, 0, 0, hand), Completed::Removed(vec![]));
    assert_eq!(complete(&mut server, second, 0, 0, hand), Completed::Removed(vec![]), "again");
    assert_eq!(complete(&mut server, third, 0, 0, hand), Completed::Full { replay: false });
    assert_eq!((server.open, server.own[&2].confirmed, server.own[&2].handed), (2, true, false));
    assert_eq!(server.busy, [(0, until_ms), (1, until_ms), (2, until_ms)].into());
    // Only a renewal may set an earlier deadline.
    let early = Mode::Hand { until_ms: until_ms - 20, max: 9 };
    complete(&mut server, first, 0, 0, early);
    assert_eq!(server.busy[&0], until_ms);
    complete(&mut server, first, 1, 0, Mode::Keep { until_ms: until_ms - 20 });
    assert_eq!((server.busy[&0], server.own[&0].handed), (until_ms - 20, true));
    complete(&mut server, second, 1, 0, Mode::Release);
    assert_eq!(
        (server.open, complete(&mut server, third, 0, 0, hand)),
        (1, Completed::Removed(vec![]))
    );
    server.revoke(NOW, 2);
    assert_eq!(server.open, 1);
    let again = server.claim(until_ms * 1_000, ALL).granted;
    assert_eq!((again[1].bot, again[1].attempts.lost, server.open), (0, 1, 0), "it ran out");
}

#[test]
fn a_repeated_completion_changes_nothing() {
    let mut server = with(&[(1, 0), (1, 1), (1, 2)]);
    let granted = claim_one(&mut server, NOW);
    let mode = Mode::Keep { until_ms: 9_000 };
    complete(&mut server, granted, 2, 7, mode);
    let before = server.clone();
    assert_eq!(complete(&mut server, granted, 2, 7, mode), Completed::Replay);
    assert_eq!(complete(&mut server, granted, 1, 7, mode), Completed::Bad);
    assert_eq!(server, before);
    let Granted { bot, fence, .. } = granted;
    let (run, exceptions) = (server.run, Vec::new());
    let mode = Mode::Release;
    let release =
        Completion { bot, run, fence, before: 2, n: 1, cost: 7, mode, exceptions, aside: None };
    assert_eq!(server.complete(NOW, &release), Completed::Removed(vec![2]));
    assert_eq!(server.complete(NOW, &release), Completed::Stale);
}

#[test]
fn a_paused_bot_ends_its_lease_and_then_rests() {
    let mut server = with(&[(1, 0), (1, 1)]);
    let granted = claim_one(&mut server, NOW);
    server.pause(1);
    complete(&mut server, granted, 1, 5_000, Mode::Release);
    assert_eq!((&server.ctl, &server.busy), (&[].into(), &[].into()));
    server.resume(NOW, 1);
    assert_eq!(server.ctl, [(1, 5_000)].into());
}

#[test]
fn purge_and_recover_revoke_the_lease() {
    let mut server = with(&[(1, 0)]);
    let granted = claim_one(&mut server, NOW);
    assert_eq!(server.purge(1), [0]);
    assert_eq!(complete(&mut server, granted, 1, 1, Mode::Release), Completed::Stale);

    let mut server = with(&[(1, 0)]);
    server.recover(NOW, 1);
    let granted = claim_one(&mut server, NOW);
    server.recover(NOW, 1);
    assert!(server.own.contains_key(&1), "the same run again");
    server.recover(NOW, 2);
    assert_eq!(complete(&mut server, granted, 1, 1, Mode::Release), Completed::Stale);
    assert_eq!((server.ctl.len(), server.att.len()), (1, 0), "ready again, nobody to blame");
}

#[test]
fn a_batch_is_copied_once_and_a_gap_is_named() {
    let mut server = Server::new(SLICE);
    let one = Queued { appended: 1, ..Queued::default() };
    let none = Take::default();
    let mut enqueue = |spans: &[Span], event| server.enqueue(NOW, spans, &[(1, event)], None, none);
    assert_eq!(enqueue(&[(0, (0, 5))], 0), Enqueued::Stored(one, Vec::new()));
    assert_eq!(enqueue(&[(0, (0, 5))], 0), Enqueued::Dup);
    assert_eq!(enqueue(&[(0, (7, 9))], 1), Enqueued::Gap(vec![5]));
    assert_eq!(enqueue(&[(0, (5, 6)), (1, (1, 2))], 1), Enqueued::Gap(vec![5, 0]));
    assert_eq!(enqueue(&[(0, (5, 6)), (1, (0, 2))], 1), Enqueued::Stored(one, Vec::new()));
    // One stream has the batch and the other one not: nothing is copied.
    assert_eq!(enqueue(&[(0, (5, 6)), (1, (2, 3))], 2), Enqueued::Gap(vec![6, 2]));
    assert_eq!((server.depth, server.offsets), (2, [(0, 6), (1, 2)].into()));
}

#[test]
fn finishes_behind_the_clock_and_of_a_shard_at_rest_are_forgotten() {
    let mut server = Server::new(SLICE);
    server.fin.extend([(1, 100), (2, 101)]);
    server.claim(NOW, Claim { seen: 100, ..ALL });
    assert_eq!(server.fin, [(2, 101)].into());
    server.claim(NOW, Claim { idle_elsewhere: true, ..ALL });
    assert_eq!(server.fin, [].into());
}

#[test]
fn a_name_is_remembered_for_one_to_two_windows() {
    const WINDOW: i64 = 100;
    let mut names = Names::default();
    let mut ask = |ms: i64, name: Name| {
        names.expire(ms * 1_000);
        let repeats = Repeats { window_ms: WINDOW, names: &[name, 77], left_out: &[] };
        names.repeated(ms * 1_000, repeats)
    };
    assert_eq!(ask(0, 1), [0; 0]);
    assert_eq!(ask(100, 1), [0, 1], "both names of the first call");
    // 101 ms after the first name, the names of the window become those before.
    assert_eq!(ask(101, 1), [0, 1]);
    assert_eq!(ask(200, 1), [0, 1]);
    assert_eq!(ask(201, 1), [0; 0], "two windows after it was noted");
    assert_eq!(ask(201, 1), [0, 1]);
}

#[test]
fn a_call_with_a_repetition_notes_nothing_and_leaves_the_position() {
    let mut server = Server::new(SLICE);
    let mut copy = |spans: &[Span], names: &[Name], events: &[(Bot, Event)]| {
        let repeats = Some(Repeats { window_ms: 100, names, left_out: &[] });
        server.enqueue(NOW, spans, events, repeats, Take::default())
    };
    let one = Enqueued::Stored(Queued { appended: 1, ..Queued::default() }, Vec::new());
    assert_eq!(copy(&[(0, (0, 5))], &[1], &[(1, 0)]), one);
    assert_eq!(copy(&[(1, (0, 2))], &[2, 1], &[(1, 1), (1, 2)]), Enqueued::Repeated(vec![1]));
    assert_eq!(copy(&[(0, (7, 9))], &[3], &[(1, 3)]), Enqueued::Gap(vec![5]));
    assert_eq!(copy(&[(0, (0, 5))], &[4], &[(1, 4)]), Enqueued::Dup);
    assert_eq!(server.offsets, [(0, 5)].into());
    assert_eq!(server.names.now.unwrap().names, [1].into());
}
