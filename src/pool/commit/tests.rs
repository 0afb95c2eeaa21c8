use super::*;
use crate::id::{PipelineName, Sequence, ShardCount};
use crate::ledger::{Account, Change, Leaving};
use crate::redis::scripts::{Exception, Fate, Mode};

fn bot(number: usize) -> BotId {
    BotId::parse(&format!("bot-{number}")).unwrap()
}

fn shard(index: usize) -> Shard {
    ShardCount::new(8).unwrap().shards().nth(index).unwrap()
}

/// The end of a slice whose events changed this number of accounts.
fn item(shard: Shard, number: usize, accounts: usize) -> Item {
    let mut leaving = Leaving::default();
    for account in 0..accounts {
        let account = Account::from(&*format!("a-{account}"));
        leaving.add(Sequence::new(1), account, Change::Add(1));
    }
    let mut item = Item { shard, ..Item::of(&bot(number)) };
    item.completion.leaving = (accounts > 0).then_some(leaving);
    item
}

fn sizes(waiting: &[Item]) -> Vec<usize> {
    grouped(waiting).iter().map(|(_, group)| group.len()).collect()
}

#[test]
fn a_call_has_at_most_64_completions() {
    let items: Vec<Item> = (0..129).map(|number| item(shard(0), number, 0)).collect();
    assert_eq!(sizes(&items), [64, 64, 1]);
    assert_eq!(sizes(&items[..64]), [64]);
    assert!(grouped(&[]).is_empty());
}

#[test]
fn a_call_has_each_bot_once_and_their_order_stays() {
    let items = [1, 2, 1, 3, 1].map(|number| item(shard(0), number, 0));
    let places: Vec<Vec<usize>> = grouped(&items).into_iter().map(|(_, group)| group).collect();
    assert_eq!(places, [vec![0, 1], vec![2, 3], vec![4]]);
}

#[test]
fn a_call_changes_at_most_500_accounts_unless_one_completion_has_more() {
    let calls = |accounts: &[usize]| {
        let items: Vec<Item> =
            accounts.iter().enumerate().map(|(at, n)| item(shard(0), at, *n)).collect();
        sizes(&items)
    };
    assert_eq!(calls(&[300, 200, 1]), [2, 1]);
    assert_eq!(calls(&[300, 201]), [1, 1]);
    assert_eq!(calls(&[600, 0]), [1, 1]);
    assert_eq!(calls(&[0, 0, 500]), [3]);
}

#[test]
fn a_call_has_at_most_500_exceptions_unless_one_completion_has_more() {
    let calls = |exceptions: &[usize]| {
        let items: Vec<Item> =
            exceptions.iter().enumerate().map(|(at, &n)| buried(at, n)).collect();
        sizes(&items)
    };
    assert_eq!(calls(&[300, 200, 1]), [2, 1]);
    assert_eq!(calls(&[300, 201]), [1, 1]);
    assert_eq!(calls(&[600, 0]), [1, 1]);
    assert_eq!(calls(&[0, 0, 500]), [3]);
}

#[test]
fn a_call_moves_at_most_4_mib_of_events_unless_one_completion_has_more() {
    const MIB: u64 = 1 << 20;
    let calls = |slices: &[(usize, u64)]| {
        let item = |(at, &(events, bytes)): (usize, &(usize, u64))| {
            let mut item = buried(at, events);
            item.completion.bytes = bytes;
            item
        };
        sizes(&slices.iter().enumerate().map(item).collect::<Vec<_>>())
    };
    assert_eq!(calls(&[(1, 3 * MIB), (1, MIB), (1, 1)]), [2, 1]);
    assert_eq!(calls(&[(1, 3 * MIB), (9, MIB + 1)]), [1, 1]);
    assert_eq!(calls(&[(1, 5 * MIB), (1, 1)]), [1, 1]);
    assert_eq!(calls(&[(1, 4 * MIB), (0, 4 * MIB), (0, 9)]), [3], "done events are not read");
}

/// The end of a slice of which this number of events become dead letters.
fn buried(number: usize, events: usize) -> Item {
    let dead = |index| {
        let fate = Fate::Dead { reason: "refused".into(), attempts: 1 };
        Exception { index, fate }
    };
    let mut item = item(shard(0), number, 0);
    item.completion.exceptions = (0..events).map(dead).collect();
    item
}

#[test]
fn each_shard_has_its_own_calls() {
    let items = [(5, 1), (2, 2), (5, 3)].map(|(at, number)| item(shard(at), number, 0));
    assert_eq!(grouped(&items), [(shard(2), vec![1]), (shard(5), vec![0, 2])]);
}

/// What the worker learns.
fn told(item: impl FnOnce(&mut Item), how: impl FnOnce(Item)) -> Option<Committed> {
    let (mut sent, mut verdict) = Item::new(shard(0), Item::of(&bot(1)).completion, Instant::now());
    item(&mut sent);
    how(sent);
    verdict.try_recv().ok()
}

#[test]
fn a_refusal_after_an_attempt_without_an_answer_says_nothing() {
    let cases = [
        (Verdict::Ok, Committed::Done, Committed::Done),
        (Verdict::Full, Committed::Full, Committed::Full),
        (Verdict::Stale, Committed::Stale, Committed::Unknown),
        (Verdict::Bad, Committed::Stale, Committed::Unknown),
    ];
    for (verdict, first, later) in cases {
        for (unanswered, expected) in [(false, first), (true, later)] {
            let told = told(|item| item.unanswered = unanswered, |item| answer(item, verdict));
            assert_eq!(told, Some(expected), "{verdict:?}, unanswered: {unanswered}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_completion_is_given_up_from_the_end_of_its_lease_on() {
    let in_one_ms = Instant::now() + Duration::from_millis(1);
    for (unanswered, expected) in [(false, Committed::Stale), (true, Committed::Unknown)] {
        let mut kept = Vec::new();
        let late = |item: &mut Item| item.unanswered = unanswered;
        let told = told(late, |item| {
            let open = Item { deadline: in_one_ms, ..Item::of(&bot(2)) };
            kept = vec![item, open];
            give_up_late(&mut kept);
        });
        assert_eq!(told, Some(expected));
        assert_eq!(kept.len(), 1, "the other waits on");
        assert_eq!(kept[0].completion.bot, bot(2));
    }
}

/// With `redis.wait_replicas`, the completion that its worker sends instead may go before it.
#[tokio::test(start_paused = true)]
async fn a_renewal_is_given_up_once_its_worker_waits_no_longer() {
    let deadline = Instant::now() + Duration::from_secs(1);
    let keep = Mode::Keep { ttl_ms: 1_000 };
    for (n, mode, kept) in [(0, keep, false), (1, keep, true), (0, Mode::Release, true)] {
        let completion = Completion { n, mode, ..Item::of(&bot(1)).completion };
        let (item, verdict) = Item::new(shard(0), completion, deadline);
        let mut waiting = vec![item];
        give_up_late(&mut waiting);
        assert_eq!(waiting.len(), 1, "{n} {mode:?}");
        drop(verdict);
        give_up_late(&mut waiting);
        assert_eq!(waiting.len(), usize::from(kept), "{n} {mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn completions_wait_while_copies_follow_each_other_and_the_lease_lasts() {
    let commits = Commits {
        sender: mpsc::channel(1).0,
        shelf: Arc::default(),
        dead_max: 0,
        board: Arc::new(Board::new(ShardCount::new(8).unwrap())),
        metrics: PipelineMetrics::new(&PipelineName::parse("p").unwrap()),
    };
    let copy = || commits.shelf.take_along(std::iter::empty());
    let lasts = |wait: Duration| commits.may_wait(Instant::now() + wait);
    let long = WAIT_MARGIN + Duration::from_millis(1);
    assert!(!lasts(long), "nothing was copied yet");
    copy();
    copy();
    assert!(lasts(long));
    assert!(!lasts(WAIT_MARGIN), "the lease ends too soon");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(!lasts(long), "the copies have ended");
}

#[test]
fn completions_that_could_not_travel_along_go_back_and_are_known_to_be_sent() {
    let shelf = Shelf::default();
    for (is_cut, was_unanswered, unanswered) in
        [(false, false, false), (true, false, true), (false, true, true)]
    {
        let items = vec![Item { unanswered: was_unanswered, ..Item::of(&bot(1)) }];
        drop(Along { shelf: &shelf, items, is_cut });
        let back: Vec<bool> = shelf.take().iter().map(|item| item.unanswered).collect();
        assert_eq!(back, [unanswered], "cut: {is_cut}, before: {was_unanswered}");
    }
}

/// Its worker has ended, and Redis is unavailable: a process that stops does not wait for it.
#[tokio::test]
async fn without_workers_a_completion_that_fails_is_not_sent_again() {
    let queue = Queue::unreachable("p", 8);
    let (metrics, board) = (PipelineMetrics::new(queue.name()), Board::new(queue.shard_count()));
    let (commits, task) = committer(queue, 0, Arc::new(board), metrics);
    let in_an_hour = Instant::now() + Duration::from_secs(3_600);
    commits.commit_unheard(shard(0), Item::of(&bot(1)).completion, in_an_hour);
    drop(commits);
    tokio::time::timeout(Duration::from_secs(30), task).await.unwrap();
}

#[tokio::test]
async fn completions_never_sent_are_stale_when_the_lease_ends_and_the_committer_ends_after_them() {
    let queue = Queue::unreachable("p", 8);
    let (metrics, board) = (PipelineMetrics::new(queue.name()), Board::new(queue.shard_count()));
    let (commits, task) = committer(queue, 0, Arc::new(board), metrics);
    let committing = async {
        let commits = commits;
        let deadline = Instant::now() + Duration::from_millis(200);
        let completion = || Item::of(&bot(1)).completion;
        tokio::join!(
            commits.commit(shard(0), completion(), deadline),
            commits.commit_soon(shard(1), completion(), deadline),
        )
    };
    let (told, ()) =
        tokio::time::timeout(Duration::from_secs(30), async { tokio::join!(committing, task) })
            .await
            .unwrap();
    // Nothing listens there, so it is certain that nothing was committed.
    assert_eq!(told, (Committed::Stale, Committed::Stale));
}
