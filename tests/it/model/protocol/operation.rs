//! The operations, drawn at random. None of them names a fence, a sequence or a time. The test
//! finds these when it applies the operation, so that a failing sequence stays meaningful when
//! earlier operations are left out.

use proptest::prelude::*;
use proptest::sample::Index;

use crate::model::state_machine::{Bot, Fate, Key, Limits, Stream};

pub(super) const BOTS: u8 = 4;
pub(super) const STREAMS: u8 = 2;
pub(super) const KEYS: u8 = 2;

#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// Time passes, or the clock is set back.
    Pass {
        us: i64,
    },
    /// The settings change.
    Limit(Limits),
    /// A batch of some streams of the bus, each once. Without bots it is a checkpoint.
    Enqueue {
        spans: Vec<(Stream, Chain)>,
        bots: Vec<(Bot, u8)>,
        /// The leases that the copier wants, and the lead of the clock that it saw.
        take: (usize, i64, Option<i64>),
        /// Events that have the name of an earlier one: its place counts from the latest.
        repeats: Vec<(Index, usize)>,
    },
    /// The copier sends a call again.
    SendAgain(Again),
    /// The time for which names are remembered changes.
    Window {
        ms: i64,
    },
    /// The state of the server reaches its disk.
    Save,
    /// The server restarts from its disk.
    LoseTail,
    Push {
        bot: Bot,
        events: u8,
        key: Option<Key>,
    },
    Delay {
        bot: Bot,
        after_ms: i64,
        key: Option<Key>,
    },
    /// The window of an idempotency key ends.
    Forget {
        key: Key,
    },
    Claim {
        max: usize,
        bound: Bound,
        seen: Option<i64>,
        ttl_ms: i64,
        isolate: u32,
        alone: bool,
    },
    Complete(Vec<Ending>),
    Pause(Option<Bot>),
    Resume(Option<Bot>),
    Purge(Bot),
    Revoke(Bot),
    Redrive {
        letter: Index,
        other_bot: bool,
        gone: bool,
    },
    Promote {
        ahead_ms: i64,
        other_bot: bool,
    },
    Recover {
        restarted: bool,
    },
    Weight {
        bot: Bot,
        weight: u32,
    },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Again {
    /// The last call, unchanged: its reply was lost.
    Unchanged,
    /// A call in which repetitions were found, without these.
    Rest,
    /// The next call that a lost tail took: all that was read of the bus.
    Lost,
}

/// The part of a stream that is copied.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chain {
    /// This many next offsets.
    Next(u64),
    /// From before the shard's offset to this many offsets beyond it.
    Again(u64),
    /// A part before it was not copied.
    Ahead,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Bound {
    Any,
    /// Only bots of the quiet class.
    Quiet,
    /// This far from the virtual clock, in µs.
    Clock(i64),
}

/// A completion of one lease.
#[derive(Debug, Clone)]
pub(super) struct Ending {
    /// The index among all leases ever granted, the latest first.
    pub(super) lease: usize,
    pub(super) counting: Counting,
    pub(super) n: u32,
    pub(super) cost: i64,
    pub(super) what: What,
    pub(super) exceptions: Vec<(u32, Exception)>,
    /// Uses the lease of another run with the same fence.
    pub(super) other_run: bool,
    pub(super) lanes: Lanes,
}

/// What a completion does with lanes, if the case has some.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lanes {
    /// It is for the list of one of the lanes that are set aside, if there is one.
    pub(super) list: Option<Index>,
    /// The fate of the first event of the list.
    pub(super) first: Option<Exception>,
    /// The lanes that fail, a bit each.
    pub(super) fail: u8,
    /// When lanes that fail are due again.
    pub(super) due_ms: i64,
    pub(super) next_ms: i64,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Counting {
    /// At most as many events as the queue has.
    Right,
    /// Possibly more events than the queue has.
    Beyond,
    /// The last completion of this lease, unchanged.
    Repeated,
    /// The counts of the last completion, but with another ending.
    RepeatedOtherwise,
    /// A different `before`.
    Off,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    Keep { ms: i64 },
    Hand { ms: i64, max: u64 },
    Release,
    Park { ms: i64 },
    Fail { ms: i64, isolate: u32 },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Exception {
    Dead { attempts: u32 },
    Later { after_ms: i64 },
}

impl Exception {
    pub(super) fn fate(self, now_ms: i64) -> Fate {
        match self {
            Self::Dead { attempts } => Fate::Dead { attempts },
            Self::Later { after_ms } => Fate::Later { at_ms: now_ms + after_ms },
        }
    }
}

fn millis() -> impl Strategy<Value = i64> {
    prop_oneof![Just(0_i64), Just(1), Just(30), Just(500), Just(3_000)]
}

fn bot() -> impl Strategy<Value = Bot> {
    0..BOTS
}

fn key() -> impl Strategy<Value = Option<Key>> {
    prop::option::weighted(0.3, 0..KEYS)
}

fn limits() -> impl Strategy<Value = Limits> {
    let max_queue = prop_oneof![3 => Just(0_usize), 1 => 1..5_usize];
    let linger_ms = prop_oneof![3 => Just(0_i64), 1 => Just(20_i64)];
    let bytes = || prop_oneof![3 => Just(0_u64), 1 => 10..90_u64];
    let few = || prop_oneof![3 => Just(0_u64), 1 => 1..4_u64];
    // A delayed event has 3 to 7 bytes, and 11 more as a record.
    let few_bytes = prop_oneof![1 => Just(0_u64), 1 => 3..20_u64];
    let quotas = (bytes(), (few(), few_bytes), (few(), bytes()));
    (max_queue, any::<bool>(), 0..6_usize, linger_ms, quotas).prop_map(
        |(max_queue, overflow_dead, dead_max, linger_ms, quotas)| {
            let (queued_bytes, delayed, letters) = quotas;
            Limits { max_queue, overflow_dead, dead_max, linger_ms, queued_bytes, delayed, letters }
        },
    )
}

/// The settings at the start of a case: in half of the cases, there are quotas from the start.
pub(super) fn first_limits() -> impl Strategy<Value = Limits> {
    prop_oneof![Just(Limits { dead_max: 4, ..Limits::default() }), limits()]
}

fn enqueue() -> impl Strategy<Value = Operation> {
    let chain = || {
        prop_oneof![
            8 => (1..4_u64).prop_map(Chain::Next),
            1 => (0..3_u64).prop_map(Chain::Again),
            1 => Just(Chain::Ahead),
        ]
    };
    let one = (0..STREAMS, chain()).prop_map(|span| vec![span]);
    let two = (0..STREAMS, chain(), chain())
        .prop_map(|(stream, first, second)| vec![(stream, first), (STREAMS - 1 - stream, second)]);
    let spans = prop_oneof![2 => one, 1 => two];
    // Each bot once, in any order, some with many events.
    let bots = Just((0..BOTS).collect::<Vec<Bot>>()).prop_shuffle();
    let bots = (bots, prop::collection::vec(1..6_u8, 0..=usize::from(BOTS)))
        .prop_map(|(bots, counts)| bots.into_iter().zip(counts).collect());
    let max = prop_oneof![2 => Just(0_usize), 3 => 1..5_usize];
    let take = (max, prop_oneof![Just(30_i64), Just(3_000)], seen(0.4));
    let place = prop_oneof![3 => 0..4_usize, 1 => 0..60_usize];
    let repeats = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::vec((any::<Index>(), place), 1..6),
    ];
    (spans, bots, take, repeats).prop_map(|(spans, bots, take, repeats)| Operation::Enqueue {
        spans,
        bots,
        take,
        repeats,
    })
}

/// The window of a case. Zero: repetitions are copied.
pub(super) fn window_ms() -> impl Strategy<Value = i64> {
    prop_oneof![2 => Just(0_i64), 1 => Just(1), 3 => Just(30), 1 => Just(500), 2 => Just(3_000)]
}

/// How far the caller's knowledge of the clock is ahead of the shard's.
fn seen(probability: f64) -> impl Strategy<Value = Option<i64>> {
    prop::option::weighted(
        probability,
        prop_oneof![Just(-1_i64), Just(1), Just(9_999), 0..120_000_i64],
    )
}

fn claim() -> impl Strategy<Value = Operation> {
    let max = prop_oneof![1 => Just(0_usize), 3 => Just(1_usize), 3 => 2..6_usize];
    let bound = prop_oneof![
        5 => Just(Bound::Any),
        1 => Just(Bound::Quiet),
        2 => (-60_000..60_000_i64).prop_map(Bound::Clock),
    ];
    let ttl = prop_oneof![Just(30_i64), Just(3_000)];
    (max, bound, seen(0.2), ttl, 1..4_u32, any::<bool>()).prop_map(
        |(max, bound, seen, ttl_ms, isolate, alone)| Operation::Claim {
            max,
            bound,
            seen,
            ttl_ms,
            isolate,
            alone,
        },
    )
}

fn exception() -> impl Strategy<Value = Exception> {
    prop_oneof![
        (0..4_u32).prop_map(|attempts| Exception::Dead { attempts }),
        millis().prop_map(|after_ms| Exception::Later { after_ms }),
    ]
}

fn ending() -> impl Strategy<Value = Ending> {
    let lease = prop_oneof![6 => 0..3_usize, 1 => 0..12_usize];
    let counting = prop_oneof![
        8 => Just(Counting::Right),
        1 => Just(Counting::Beyond),
        2 => Just(Counting::Repeated),
        1 => Just(Counting::RepeatedOtherwise),
        1 => Just(Counting::Off),
    ];
    let cost = prop_oneof![
        Just(0_i64),
        Just(1),
        0..1_000_i64,
        Just(10_000),
        Just(10_001),
        0..40_000_i64,
        Just(60_000_000),
    ];
    let what = prop_oneof![
        3 => millis().prop_map(|ms| What::Keep { ms }),
        3 => (millis(), 0..3_u64).prop_map(|(ms, max)| What::Hand { ms, max }),
        4 => Just(What::Release),
        1 => millis().prop_map(|ms| What::Park { ms }),
        1 => (millis(), 0..3_u32).prop_map(|(ms, isolate)| What::Fail { ms, isolate }),
    ];
    let exceptions = prop_oneof![
        3 => Just(Vec::new()),
        1 => prop::collection::vec((0..4_u32, exception()), 1..4),
    ];
    let n = 0..5_u32;
    let fail = prop_oneof![1 => Just(0_u8), 1 => 0..8_u8];
    let list = (prop::option::of(any::<Index>()), prop::option::weighted(0.3, exception()));
    let lanes =
        (list, fail, millis(), millis()).prop_map(|((list, first), fail, due_ms, next_ms)| Lanes {
            list,
            first,
            fail,
            due_ms,
            next_ms,
        });
    (lease, counting, n, cost, what, exceptions, prop::bool::weighted(0.05), lanes).prop_map(
        |(lease, counting, n, cost, what, exceptions, other_run, lanes)| Ending {
            lease,
            counting,
            n,
            cost,
            what,
            exceptions,
            other_run,
            lanes,
        },
    )
}

fn operator() -> impl Strategy<Value = Operation> {
    let target = || prop::option::weighted(0.85, bot());
    prop_oneof![
        3 => target().prop_map(Operation::Pause),
        5 => target().prop_map(Operation::Resume),
        1 => bot().prop_map(Operation::Purge),
        2 => bot().prop_map(Operation::Revoke),
        4 => (any::<Index>(), prop::bool::weighted(0.1), prop::bool::weighted(0.1))
            .prop_map(|(letter, other_bot, gone)| Operation::Redrive { letter, other_bot, gone }),
        1 => (bot(), 1..4_u32).prop_map(|(bot, weight)| Operation::Weight { bot, weight }),
        1 => limits().prop_map(Operation::Limit),
    ]
}

pub(super) fn any_operation() -> BoxedStrategy<Operation> {
    // Deadlines are met exactly, missed by a microsecond, and exceeded by far.
    let us = prop_oneof![
        Just(1_i64),
        Just(999),
        Just(1_000),
        Just(29_999),
        Just(30_000),
        Just(3_000_000),
        Just(60_000_000),
        Just(-20_000),
    ];
    prop_oneof![
        6 => us.prop_map(|us| Operation::Pass { us }),
        6 => enqueue(),
        3 => (bot(), 1..4_u8, key())
            .prop_map(|(bot, events, key)| Operation::Push { bot, events, key }),
        2 => (bot(), millis(), key())
            .prop_map(|(bot, after_ms, key)| Operation::Delay { bot, after_ms, key }),
        1 => (0..KEYS).prop_map(|key| Operation::Forget { key }),
        9 => claim(),
        9 => prop::collection::vec(ending(), 1..4).prop_map(Operation::Complete),
        2 => (millis(), prop::bool::weighted(0.1))
            .prop_map(|(ahead_ms, other_bot)| Operation::Promote { ahead_ms, other_bot }),
        1 => prop::bool::weighted(0.7).prop_map(|restarted| Operation::Recover { restarted }),
        5 => operator(),
        1 => Just(Operation::SendAgain(Again::Unchanged)),
        1 => Just(Operation::Save),
        1 => Just(Operation::LoseTail),
    ]
    .boxed()
}

/// Operations of a case in which names are remembered.
pub(super) fn any_operation_with_names() -> BoxedStrategy<Operation> {
    prop_oneof![
        30 => any_operation(),
        8 => enqueue(),
        // Just longer than a window, but not than two.
        4 => prop_oneof![Just(31_000_i64), Just(3_001_000)].prop_map(|us| Operation::Pass { us }),
        1 => Just(Operation::SendAgain(Again::Unchanged)),
        1 => window_ms().prop_map(|ms| Operation::Window { ms }),
    ]
    .boxed()
}

/// Operations while the copier has to send a call again: mostly it does so.
pub(super) fn again_or(again: Again, other: BoxedStrategy<Operation>) -> BoxedStrategy<Operation> {
    prop_oneof![2 => Just(Operation::SendAgain(again)), 1 => other].boxed()
}

/// Operations of a case with lanes: more slices and operators, so that lanes fail and more happens to
/// them.
pub(super) fn any_operation_with_lanes() -> BoxedStrategy<Operation> {
    prop_oneof![
        8 => any_operation(),
        1 => claim(),
        2 => prop::collection::vec(ending(), 1..4).prop_map(Operation::Complete),
        2 => operator(),
    ]
    .boxed()
}
