use super::*;

fn board(shards: u16) -> Board {
    let board = Board::new(ShardCount::new(shards).unwrap());
    for ask in board.next_round(1_000, 0) {
        board.claimed(ask.shard, &empty());
    }
    board
}

fn empty() -> Claimed {
    Claimed {
        clock: 0,
        low: None,
        deadline_ms: None,
        now_us: 1_000_000,
        ready: 0,
        vanished: 0,
        run: "run".into(),
        leases: Vec::new(),
    }
}

fn shard(index: u16) -> Shard {
    ShardCount::new(1_024).unwrap().shards().nth(index.into()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_lowest_score_is_claimed_first_and_bounded_by_the_next() {
    let board = board(4);
    for (index, score) in [(0, 500), (1, 300), (2, 900)] {
        board.heard(shard(index), score);
    }
    let asks = board.next_round(8, 10);
    assert_eq!(asks.len(), 1);
    assert_eq!((asks[0].shard, asks[0].max, asks[0].bound), (shard(1), 8, Some(510)));
    assert!(!asks[0].alone);
}

#[tokio::test(start_paused = true)]
async fn a_claims_reply_does_not_overwrite_a_score_published_meanwhile() {
    let board = board(1);
    board.heard(shard(0), 500);
    assert_eq!(board.next_round(1, 0).len(), 1);
    board.heard(shard(0), -7);
    board.claimed(shard(0), &empty());
    let asks = board.next_round(1, 0);
    assert_eq!(asks.len(), 1, "the published score is still known");
}

#[tokio::test(start_paused = true)]
async fn nor_a_deadline_nor_that_something_was_missed() {
    let board = board(2);
    board.heard(shard(0), 500);
    board.heard(shard(1), 500);
    assert_eq!(board.next_round(64, 0).len(), 2);
    board.heard_deadline(shard(0), 1_200);
    board.claimed(shard(0), &empty());
    tokio::time::advance(Duration::from_millis(202)).await;
    assert_eq!(board.next_round(1, 0)[0].shard, shard(0), "the lingering bot is looked for");
    board.look_everywhere();
    board.claimed(shard(1), &empty());
    assert_eq!(board.next_round(1, 0)[0].shard, shard(1), "the shard is looked at again");
}

#[tokio::test(start_paused = true)]
async fn nothing_known_means_no_claim_until_the_scan_a_minute_later() {
    let board = board(4);
    assert_eq!(board.next_round(8, 0), []);
    let wait = board.next_look() - Instant::now();
    assert!((48..=72).contains(&wait.as_secs()), "{wait:?}");
    tokio::time::advance(Duration::from_secs(73)).await;
    assert_eq!(board.next_round(8, 0).len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_shard_with_a_lease_is_looked_at_when_the_lease_ends() {
    let board = board(2);
    let mut reply = empty();
    reply.deadline_ms = Some(1_500);
    board.heard(shard(1), 1);
    board.next_round(1, 0);
    board.claimed(shard(1), &reply);
    assert_eq!(board.next_round(1, 0), []);
    tokio::time::advance(Duration::from_millis(502)).await;
    let asks = board.next_round(1, 0);
    assert_eq!(asks.len(), 1);
    assert!(asks[0].alone, "only this shard has anything");
}

#[tokio::test(start_paused = true)]
async fn more_room_claims_from_more_shards_and_never_more_than_the_room() {
    let board = board(16);
    for index in 0..16 {
        board.heard(shard(index), i64::from(index));
    }
    let asks = board.next_round(100, 0);
    assert_eq!(asks.len(), 4);
    assert_eq!(asks.iter().map(|ask| ask.max).sum::<usize>(), 100);
    assert!(asks.iter().all(|ask| ask.bound == Some(4)));
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_an_answer_limits_no_other() {
    let board = board(2);
    board.heard(shard(0), 1);
    board.heard(shard(1), 500);
    assert_eq!(board.next_round(1, 0)[0].bound, Some(500));
    let asks = board.next_round(1, 0);
    assert_eq!((asks[0].shard, asks[0].bound), (shard(1), None));
}

fn completed() -> Completed {
    Completed {
        clock: 0,
        low: None,
        deadline_ms: None,
        letters_removed: 0,
        letters_over_quota: 0,
        verdicts: Vec::new(),
    }
}

fn is_woken(board: &Board) -> bool {
    futures_util::FutureExt::now_or_never(board.changed().notified()).is_some()
}

#[tokio::test(start_paused = true)]
async fn known_scores_get_the_room_before_shards_that_are_only_scanned() {
    let board = board(2);
    board.heard(shard(1), 5);
    board.leased(shard(0), Duration::ZERO);
    let asks = board.next_round(CLAIM_MAX + 1, 10);
    let found: Vec<_> = asks.iter().map(|ask| (ask.shard, ask.max, ask.bound)).collect();
    // What the scan finds must not pass the known score.
    assert_eq!(found, [(shard(1), CLAIM_MAX, None), (shard(0), 1, Some(15))]);
}

#[tokio::test(start_paused = true)]
async fn all_scans_that_are_due_are_sent_and_with_room_the_lowest_scores_too() {
    let board = board(4);
    for index in 0..4 {
        board.heard(shard(index), 10 - i64::from(index));
    }
    board.leased(shard(0), Duration::ZERO);
    board.leased(shard(1), Duration::ZERO);
    let shards = |asks: Vec<Ask>| asks.iter().map(|ask| ask.shard).collect::<Vec<_>>();
    assert_eq!(shards(board.next_round(1, 0)), [shard(1), shard(0)], "two are due");
    assert_eq!(shards(board.next_round(CLAIM_MAX + 1, 0)), [shard(3), shard(2)]);
    assert_eq!(board.next_round(0, 0), []);
}

#[tokio::test(start_paused = true)]
async fn everything_that_may_make_a_bot_ready_wakes_the_dispatcher() {
    let board = board(2);
    let deadline = |deadline_ms| Completed { deadline_ms: Some(deadline_ms), ..completed() };
    let news: [(&str, &dyn Fn(), bool); 9] = [
        ("nothing", &|| {}, false),
        ("a score", &|| board.heard(shard(0), 1), true),
        ("a deadline", &|| board.heard_deadline(shard(0), 2_000), true),
        ("lost messages", &|| board.look_everywhere(), true),
        ("a completion", &|| board.completed(shard(0), &completed()), false),
        (
            "its bot is ready",
            &|| board.completed(shard(0), &Completed { low: Some(3), ..completed() }),
            true,
        ),
        ("a later deadline", &|| board.completed(shard(0), &deadline(2_001)), false),
        ("the same", &|| board.completed(shard(0), &deadline(2_000)), false),
        ("an earlier one", &|| board.completed(shard(0), &deadline(1_999)), true),
    ];
    for (name, happens, wakes) in news {
        happens();
        assert_eq!(is_woken(&board), wakes, "{name}");
    }
    assert_eq!(board.next_deadline(), Some(Instant::now() + Duration::from_secs(1)));
}

#[tokio::test(start_paused = true)]
async fn ready_bots_are_those_of_the_last_replies_or_one_where_a_score_is_known() {
    let board = board(3);
    assert_eq!(board.ready(), 0);
    board.claimed(shard(0), &Claimed { ready: 7, low: Some(1), ..empty() });
    board.heard(shard(1), 5);
    assert_eq!(board.ready(), 8);
}

#[tokio::test(start_paused = true)]
async fn the_virtual_clock_never_goes_back() {
    let board = board(2);
    let mut clocks = Vec::new();
    for clock in [9, 4, 12] {
        board.claimed(shard(0), &Claimed { clock, ..empty() });
        clocks.push(board.clock());
    }
    for clock in [11, 15] {
        board.completed(shard(1), &Completed { clock, ..completed() });
        clocks.push(board.clock());
    }
    assert_eq!(clocks, [9, 9, 12, 12, 15]);
    board.heard(shard(0), 1);
    assert_eq!(board.next_round(1, 0)[0].seen, 15);
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_a_copy_is_looked_at_when_it_ends_and_not_before() {
    let board = board(2);
    let ends = Instant::now() + Duration::from_secs(5);
    board.leased(shard(1), Duration::from_secs(5));
    board.leased(shard(1), Duration::from_secs(9));
    assert_eq!((board.next_deadline(), board.next_look()), (Some(ends), ends));
    tokio::time::advance(Duration::from_millis(4_999)).await;
    assert!(!board.has_work());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(board.has_work());
    assert_eq!(board.next_round(1, 0)[0].shard, shard(1));
    assert!(!board.has_work(), "the claim is under way");
}

#[tokio::test(start_paused = true)]
async fn active_shards_are_scanned_every_second_unless_their_bots_wait_for_tokens() {
    let parked = Claimed { deadline_ms: Some(3_600_000), ..empty() };
    let ready = Claimed { low: Some(1), ready: 1, ..parked.clone() };
    for (patient, reply, seconds) in
        [(false, &parked, 1.0), (true, &parked, 10.0), (true, &ready, 1.0), (false, &ready, 1.0)]
    {
        let board = Board::new(ShardCount::new(1).unwrap()).patient(patient);
        board.next_round(1, 0);
        board.claimed(shard(0), reply);
        let wait = (board.next_look() - Instant::now()).as_secs_f64();
        assert!((0.8 * seconds..1.2 * seconds).contains(&wait), "{patient} {reply:?}: {wait}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_claim_without_a_reply_the_shard_is_looked_at_after_a_moment() {
    let board = board(1);
    board.heard(shard(0), 5);
    board.heard_deadline(shard(0), 9_000);
    board.next_round(1, 0);
    assert_eq!(board.next_look(), Instant::now() + SCAN_ACTIVE, "every shard has a claim");
    board.failed(shard(0));
    assert!(!board.has_work(), "the claim may have taken it");
    assert_eq!((board.next_deadline(), board.next_look()), (None, Instant::now() + SCAN_FAILED));
    tokio::time::advance(SCAN_FAILED).await;
    assert_eq!(board.next_round(1, 0).len(), 1);
    board.heard(shard(0), 7);
    board.failed(shard(0));
    assert!(board.has_work(), "a score that was published meanwhile counts");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_of_the_server_is_met_a_millisecond_later_by_this_clock() {
    let board = board(1);
    board.claimed(shard(0), &Claimed { deadline_ms: Some(1_500), ..empty() });
    let at = Instant::now() + Duration::from_millis(501);
    assert_eq!(board.next_deadline(), Some(at));
    tokio::time::advance(Duration::from_millis(501)).await;
    assert_eq!(board.next_round(1, 0).len(), 1);
    let unknown = Board::new(ShardCount::new(1).unwrap());
    unknown.heard_deadline(shard(0), 9_000);
    assert_eq!(unknown.next_deadline(), Some(Instant::now()), "the server's clock is not known");
}

#[tokio::test(start_paused = true)]
async fn a_bot_that_is_ready_after_its_completion_is_claimed_next() {
    let board = board(2);
    board.completed(shard(1), &Completed { low: Some(3), ..completed() });
    board.completed(shard(1), &Completed { low: Some(9), ..completed() });
    let asks = board.next_round(1, 0);
    assert_eq!(asks.iter().map(|ask| ask.shard).collect::<Vec<_>>(), [shard(1)]);
    board.heard(shard(0), 20);
    assert_eq!(board.next_round(1, 0)[0].bound, None, "the claim under way does not count");
}
