//! Tests with a manual clock: requests start, give up and end in any order.

use proptest::prelude::*;

use super::*;

struct Bench {
    clock: Arc<AtomicU64>,
    admission: Arc<Admission>,
    begun: Vec<(Class, Permit)>,
    places: Vec<Ticket>,
}

fn bench(limit_max: usize) -> Bench {
    let clock = Arc::new(AtomicU64::new(1_000_000));
    let read = Arc::clone(&clock);
    let ticks: Ticks = Arc::new(move || Duration::from_micros(read.load(Ordering::SeqCst)));
    let settings = Settings { limit_max, ..Settings::default() };
    let admission = Admission::new(settings, ticks);
    Bench { clock, admission, begun: Vec::new(), places: Vec::new() }
}

fn ask(class: Class) -> Request {
    Request {
        class,
        operation: Operation(class as u16),
        continues: false,
        caller: 0,
        asks_again: false,
        is_stranger: false,
        deadline: None,
        places: 1,
    }
}

impl Bench {
    fn pass(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap();
        self.clock.fetch_add(micros, Ordering::SeqCst);
    }

    /// Asks for admission; returns the reason of an immediate refusal.
    fn ask(&mut self, ask: &Request) -> Option<Reason> {
        match self.admission.ask(ask) {
            Decision::Begin(permit) => self.begun.push((ask.class, permit)),
            Decision::Wait(place) => self.places.push(place),
            Decision::Shed(reason) => return Some(reason),
        }
        None
    }

    /// Collects the decisions about waiting requests; returns those that were shed.
    fn collect(&mut self) -> Vec<(Class, Reason)> {
        let mut shed = Vec::new();
        for mut place in std::mem::take(&mut self.places) {
            match place.try_answer() {
                None => self.places.push(place),
                Some(Ok(permit)) => self.begun.push((place.ask.class, permit)),
                Some(Err(reason)) => shed.push((place.ask.class, reason)),
            }
        }
        shed
    }

    fn begun(&self, class: Class) -> usize {
        self.begun.iter().filter(|(of, _)| *of == class).count()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Request(Class, bool),
    End(usize, bool),
    Leave(usize),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let class = prop::sample::select(&Class::ALL[..]);
    let step = prop_oneof![
        5 => (class, any::<bool>()).prop_map(|(class, continues)| Step::Request(class, continues)),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, answered)| Step::End(which, answered)),
        1 => any::<usize>().prop_map(Step::Leave),
        2 => (0_u64..30_000).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..400)
}

proptest! {
    #[test]
    fn no_request_is_lost_or_started_beyond_the_limit_and_none_waits_beside_a_free_place(
        limit in 1_usize..12, steps in steps(),
    ) {
        let mut bench = bench(limit);
        for step in steps {
            let bound = bench.admission.room_max.load(Ordering::Relaxed).max(bench.places.len());
            match step {
                Step::Request(class, continues) => {
                    let before = bench.admission.state();
                    let shed = bench.ask(&Request { continues, ..ask(class) });
                    if shed == Some(Reason::Capacity) {
                        let below = &before.waiting[class as usize + 1..];
                        prop_assert!(below.iter().all(|waiting| *waiting == 0),
                            "shed although a lower class waits: {:?}", before);
                    }
                    if class == Class::P0 {
                        prop_assert_eq!(shed, None, "critical ones are never shed below their bound");
                    }
                }
                Step::End(which, answered) if !bench.begun.is_empty() => {
                    let which = which % bench.begun.len();
                    let (_, permit) = bench.begun.swap_remove(which);
                    if answered { permit.answered() } else { drop(permit) }
                }
                Step::Leave(which) if !bench.places.is_empty() => {
                    let which = which % bench.places.len();
                    drop(bench.places.swap_remove(which));
                }
                Step::Pass(micros) => bench.pass(Duration::from_micros(micros)),
                Step::End(..) | Step::Leave(_) => {}
            }
            bench.collect();
            let state = bench.admission.state();
            prop_assert_eq!(state.critical, bench.begun(Class::P0));
            prop_assert_eq!(state.in_flight, bench.begun.len() - state.critical);
            prop_assert!(state.in_flight <= limit, "{:?}", state);
            prop_assert_eq!(state.waiting.iter().sum::<usize>(), bench.places.len());
            prop_assert!(bench.places.len() <= bound, "the room is bounded");
            if let Some(first) = Class::ALL.into_iter().find(|class| state.waiting[*class as usize] > 0) {
                prop_assert!(state.in_flight >= first.rank().allowed(state.limit, limit), "{:?}", state);
            }
        }
        bench.begun.clear();
        bench.collect();
        bench.places.clear();
        bench.begun.clear();
        let state = bench.admission.state();
        prop_assert_eq!((state.in_flight, state.critical, state.waiting), (0, 0, [0; 4]));
    }
}

#[test]
fn a_higher_class_takes_the_place_of_a_lower_one_that_waits_and_starts_first() {
    let mut bench = bench(1);
    assert_eq!(bench.ask(&ask(Class::P2)), None);
    for _ in 0..16 {
        assert_eq!(bench.ask(&ask(Class::P3)), None, "it waits");
    }
    assert_eq!(bench.ask(&ask(Class::P3)), Some(Reason::Capacity), "the room is full");
    assert_eq!(bench.ask(&ask(Class::P1)), None, "but not for it");
    assert_eq!(bench.collect(), [(Class::P3, Reason::Displaced)]);
    bench.begun.clear();
    bench.collect();
    assert_eq!(bench.begun(Class::P1), 1);
}

#[test]
fn a_request_that_cannot_be_answered_in_time_is_not_started() {
    let mut bench = bench(100);
    for _ in 0..20 {
        bench.ask(&ask(Class::P1));
        bench.pass(Duration::from_millis(10));
        bench.begun.drain(..).for_each(|(_, permit)| permit.answered());
    }
    assert_eq!(bench.admission.median(Operation(1)), Duration::from_millis(10));
    let within = |bench: &Bench, ms| {
        let deadline = Some(bench.admission.now() + Duration::from_millis(ms));
        Request { deadline, ..ask(Class::P1) }
    };
    let (early, late) = (within(&bench, 9), within(&bench, 11));
    assert_eq!(bench.ask(&early), None, "now and then it is tried all the same");
    assert_eq!(bench.ask(&early), Some(Reason::Deadline));
    assert_eq!(bench.ask(&late), None);
}

#[test]
fn a_deadline_is_looked_at_again_after_waiting() {
    let mut bench = bench(1);
    bench.ask(&ask(Class::P1));
    let deadline = Some(bench.admission.now() + Duration::from_millis(5));
    bench.ask(&Request { deadline, ..ask(Class::P1) });
    bench.pass(Duration::from_millis(6));
    bench.begun.clear();
    assert_eq!(bench.collect(), [(Class::P1, Reason::Deadline)]);
    assert_eq!(bench.admission.state().in_flight, 0);
}

#[test]
fn in_shadow_everything_is_let_through_and_the_switches_work_immediately() {
    let mut bench = bench(1);
    let with = |mode| Settings { modes: [mode; 4], limit_max: 1 };
    bench.admission.apply(with(Mode::Shadow));
    for _ in 0..100 {
        assert_eq!(bench.ask(&ask(Class::P3)), None);
    }
    assert_eq!((bench.begun.len(), bench.places.len()), (100, 0));
    bench.admission.apply(with(Mode::Refuse));
    assert_eq!(bench.ask(&ask(Class::P1)), Some(Reason::Switch));
    bench.admission.apply(with(Mode::Off));
    assert_eq!(bench.ask(&ask(Class::P1)), None);
    assert_eq!(bench.admission.state().in_flight, 101);
    bench.begun.clear();
    assert_eq!(bench.admission.state().in_flight, 0);
}

#[test]
fn a_heavy_caller_gives_way_and_the_others_do_not_notice() {
    let mut bench = bench(16);
    let (mut served, mut shed) = ([0; 2], [0; 2]);
    for round in 0..3_000_u64 {
        // Every 10 ms, 20 callers send one request each and one sends 20. There is room for 25.
        let mut callers: Vec<u64> = (2..22).collect();
        callers.extend([1; 20]);
        let offset = (round % 41) as usize % callers.len();
        callers.rotate_left(offset);
        for caller in callers {
            let counted = round >= 300;
            match bench.admission.ask(&Request { caller, ..ask(Class::P2) }) {
                Decision::Begin(permit) => {
                    bench.begun.push((Class::P2, permit));
                    served[usize::from(caller > 1)] += u64::from(counted);
                }
                Decision::Wait(place) => bench.places.push(place),
                Decision::Shed(_) => shed[usize::from(caller > 1)] += u64::from(counted),
            }
            bench.pass(Duration::from_micros(250));
            // A request ends every 400 µs.
            if bench.clock.load(Ordering::SeqCst) % 2_000 < 1_250 && !bench.begun.is_empty() {
                drop(bench.begun.remove(0));
            }
            for place in std::mem::take(&mut bench.places) {
                let (caller, mut place) = (place.ask.caller, place);
                match place.try_answer() {
                    None if place.is_over() => {
                        shed[usize::from(caller > 1)] += u64::from(counted);
                    }
                    None => bench.places.push(place),
                    Some(Ok(permit)) => {
                        bench.begun.push((Class::P2, permit));
                        served[usize::from(caller > 1)] += u64::from(counted);
                    }
                    Some(Err(_)) => shed[usize::from(caller > 1)] += u64::from(counted),
                }
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let share = |index: usize| shed[index] as f64 / (shed[index] + served[index]) as f64;
    assert!(share(1) < 0.01, "of the others' {:.3} was shed: {served:?} {shed:?}", share(1));
    assert!(share(0) > 0.3, "of the heavy one's {:.3}: {served:?} {shed:?}", share(0));
}

#[test]
fn a_stranger_starts_only_where_a_place_is_free_and_displaces_no_caller() {
    let mut bench = bench(16);
    let stranger = Request { is_stranger: true, ..ask(Class::P1) };
    assert_eq!(bench.ask(&stranger), None, "nothing else is in flight");
    while bench.places.is_empty() {
        assert_eq!(bench.ask(&ask(Class::P3)), None);
    }
    for _ in 0..5_000 {
        assert_eq!(bench.ask(&stranger), Some(Reason::Capacity));
    }
    assert_eq!(bench.collect(), [], "who waits goes on waiting");
    assert_eq!(bench.ask(&ask(Class::P1)), None, "a caller has the places above");
    assert_eq!(bench.begun(Class::P1), 2);
}

#[test]
fn a_large_request_counts_as_several_and_leaves_room_for_the_others() {
    let mut bench = bench(16);
    let large = Request { places: 1_000, ..ask(Class::P2) };
    assert_eq!(bench.ask(&large), None);
    // Its class may use 14 places; one request gets at most half of them.
    assert_eq!(bench.admission.state().in_flight, 7);
    assert_eq!(bench.ask(&Request { places: 3, ..ask(Class::P2) }), None);
    assert_eq!(bench.admission.state().in_flight, 10);
    for _ in 0..6 {
        assert_eq!(bench.ask(&ask(Class::P1)), None);
    }
    assert_eq!((bench.begun(Class::P1), bench.places.len()), (6, 0), "the first class has room");
    assert_eq!(bench.ask(&large), None);
    assert_eq!(bench.places.len(), 1, "there is none for another");
    bench.begun.clear();
    assert_eq!(bench.collect(), []);
    assert_eq!(bench.admission.state().in_flight, 7, "it has what it needs once the others ended");
    bench.begun.clear();
    assert_eq!(bench.admission.state().in_flight, 0);

    // A request that gave up while waiting holds no place.
    for _ in 0..16 {
        assert_eq!(bench.ask(&ask(Class::P1)), None);
    }
    let _ = bench.ask(&large);
    for place in &mut bench.places {
        place.told.close();
    }
    bench.begun.clear();
    bench.places.clear();
    assert_eq!(bench.admission.state().in_flight, 0);

    let Decision::Begin(mut permit) = bench.admission.ask(&ask(Class::P2)) else {
        panic!("no room")
    };
    permit.grow(5);
    permit.grow(2);
    assert_eq!(bench.admission.state().in_flight, 5);
    drop(permit);
    assert_eq!(bench.admission.state().in_flight, 0);
}

#[test]
fn critical_requests_are_bounded_and_their_end_makes_room() {
    let mut bench = bench(4);
    for _ in 0..CRITICAL_MAX {
        assert_eq!(bench.ask(&ask(Class::P0)), None);
    }
    assert_eq!(bench.ask(&ask(Class::P0)), Some(Reason::Critical));
    assert_eq!(bench.admission.state().critical, CRITICAL_MAX);
    for mode in [Mode::Shadow, Mode::Off] {
        bench.admission.apply(Settings { modes: [mode; 4], limit_max: 4 });
        assert_eq!(bench.ask(&ask(Class::P0)), None, "{mode:?}");
    }
    let state = bench.admission.state();
    assert_eq!((state.critical, state.in_flight), (CRITICAL_MAX + 2, 0));
    bench.begun.clear();
    assert_eq!(bench.admission.state().critical, 0);
}

#[test]
fn a_deadline_that_is_reached_or_within_the_usual_time_is_too_short() {
    let mut bench = bench(4);
    let now = bench.admission.now();
    let within = |us| Request { deadline: Some(now + Duration::from_micros(us)), ..ask(Class::P1) };
    assert_eq!(bench.ask(&within(0)), Some(Reason::Deadline));
    bench.admission.medians[usize::from(ask(Class::P1).operation.0)]
        .store(5_000, Ordering::Relaxed);
    assert_eq!(bench.ask(&within(5_000)), None, "one is tried");
    assert_eq!(bench.ask(&within(5_000)), Some(Reason::Deadline));
    assert_eq!(bench.ask(&within(5_001)), None);
}

#[test]
fn a_lower_maximum_holds_for_the_next_request_and_a_lack_of_places_is_noted() {
    let mut bench = bench(40);
    bench.admission.apply(Settings { limit_max: 2, ..Settings::default() });
    for is_bound in [false, false, true] {
        bench.ask(&ask(Class::P1));
        assert_eq!(bench.admission.is_bound.load(Ordering::Relaxed), is_bound);
    }
    assert_eq!((bench.begun(Class::P1), bench.places.len()), (2, 1));
    for (reason, lately) in [(Reason::Capacity, 1), (Reason::Quota, 1), (Reason::Share, 2)] {
        bench.admission.refused(Class::P2, reason);
        assert_eq!(bench.admission.shed_lately.load(Ordering::Relaxed), lately, "{reason:?}");
    }
}

#[test]
fn a_probe_leaves_the_first_class_its_places() {
    let mut bench = bench(8);
    bench.admission.limit_low.store(1, Ordering::SeqCst);
    for class in [Class::P2, Class::P2, Class::P1, Class::P1, Class::P1] {
        bench.ask(&ask(class));
    }
    assert_eq!((bench.begun(Class::P2), bench.begun(Class::P1)), (1, 3));
}

#[test]
fn the_verdict_on_a_window_takes_effect() {
    let mut bench = bench(1_000);
    let first = bench.admission.state().limit;
    // Nothing is known of the latency without load, so the first full window begins a probe.
    bench.admission.is_bound.store(true, Ordering::Relaxed);
    while bench.admission.state().limit == first {
        bench.ask(&ask(Class::P1));
        bench.pass(Duration::from_micros(100));
        bench.begun.pop().unwrap().1.answered();
    }
    let (limit, limit_low) = (first / 4, 4);
    assert_eq!(bench.admission.state().limit, limit);
    assert_eq!(bench.admission.limit_low.load(Ordering::SeqCst), limit_low);
    let room = bench.admission.room_max.load(Ordering::Relaxed);
    assert!((490..=510).contains(&room), "as many as are answered within 50 ms: {room}");
    assert_eq!(bench.admission.median(ask(Class::P1).operation), Duration::from_micros(100));
    assert!(!bench.admission.is_bound.load(Ordering::Relaxed), "the next window begins");
}

#[test]
fn a_waiting_request_is_over_after_its_time_and_is_told_so() {
    let mut bench = bench(1);
    bench.ask(&ask(Class::P2));
    bench.ask(&ask(Class::P2));
    let patience = bench.places[0].patience();
    assert_eq!(patience, Duration::from_millis(20));
    bench.pass(patience);
    assert!(!bench.places[0].is_over());
    bench.pass(Duration::from_micros(1));
    assert!(bench.places[0].is_over());
    bench.begun.clear();
    assert_eq!(bench.collect(), [(Class::P2, Reason::Wait)]);
    assert_eq!(bench.admission.counts().of(Class::P2, Reason::Wait), 1);
}

/// Caller 1 sends much more than the others.
fn with_a_heavy_caller(limit_max: usize) -> Bench {
    let bench = bench(limit_max);
    for caller in [1, 2] {
        bench.admission.shares.note(caller, bench.admission.now());
    }
    bench.pass(Duration::from_secs(1));
    for _ in 0..40 {
        bench.admission.shares.note(1, bench.admission.now());
    }
    bench
}

#[test]
fn a_heavy_caller_that_waited_too_long_is_told_its_share() {
    let mut bench = with_a_heavy_caller(4);
    for _ in 0..8 {
        bench.ask(&ask(Class::P1));
    }
    assert_eq!((bench.begun(Class::P1), bench.places.len()), (4, 4));
    bench.ask(&Request { caller: 1, ..ask(Class::P1) });
    bench.pass(Duration::from_millis(200));
    bench.begun.clear();
    let shed = bench.collect();
    assert_eq!(shed.iter().filter(|(_, reason)| *reason == Reason::Share).count(), 1, "{shed:?}");
}

#[test]
fn a_heavy_caller_of_the_lowest_class_is_behind_quiet_ones_of_it_and_is_told_its_share() {
    let mut bench = with_a_heavy_caller(16);
    let heavy = Request { caller: 1, ..ask(Class::P3) };
    let quiet = ask(Class::P3);
    let allowed = |rank: Rank| rank.allowed(16, 16);
    assert!(allowed(Rank::Last) < allowed(Rank::P3));
    for _ in 0..allowed(Rank::P3) {
        assert_eq!(bench.ask(&ask(Class::P3)), None);
    }
    // The room for waiting requests is full of the heavy caller's.
    let room = bench.admission.room_max.load(Ordering::Relaxed);
    for _ in 0..room {
        assert_eq!(bench.ask(&heavy), None, "it waits");
    }
    assert_eq!(bench.admission.state().waiting, [0, 0, 0, room]);
    assert_eq!(bench.ask(&heavy), Some(Reason::Share));
    assert_eq!(bench.ask(&quiet), None, "one of the heavy caller gives way");
    assert_eq!(bench.collect(), [(Class::P3, Reason::Share)]);
    let started = bench.begun.len();
    drop(bench.begun.pop());
    assert_eq!(bench.collect(), []);
    assert_eq!(bench.begun.len(), started, "one has started");
    let waiting = bench.places.iter().map(|place| place.ask.caller);
    assert!(waiting.eq(std::iter::repeat_n(1, room - 1)), "it is the quiet one");
    drop(bench.begun.pop());
    assert_eq!(bench.collect(), []);
    assert_eq!(bench.ask(&quiet), None);
    assert_eq!(bench.begun.len(), started, "a quiet one finds a place beside those that wait");
    bench.pass(Duration::from_millis(50));
    bench.begun.clear();
    assert!(bench.collect().iter().all(|(_, reason)| *reason == Reason::Share));
}

#[test]
fn a_request_that_starts_at_its_deadline_is_too_late() {
    for (left_us, is_late) in [(0, true), (1, false)] {
        let mut bench = bench(1);
        bench.ask(&ask(Class::P1));
        let deadline = bench.admission.now() + Duration::from_micros(5_000 + left_us);
        bench.ask(&Request { deadline: Some(deadline), ..ask(Class::P1) });
        bench.pass(Duration::from_millis(5));
        bench.begun.clear();
        let shed = bench.collect();
        assert_eq!(shed == [(Class::P1, Reason::Deadline)], is_late, "{shed:?}");
        assert_eq!(bench.admission.state().in_flight, usize::from(!is_late));
    }
}

#[test]
fn the_first_class_waits_50_ms_under_lasting_overload_and_the_lower_ones_1_ms() {
    let times = |rank: Rank| (rank.target().as_millis(), rank.interval().as_millis());
    assert_eq!(Rank::ALL.map(times), [(50, 100), (50, 100), (1, 20), (1, 20), (1, 20)]);
}

#[test]
fn capacity_is_short_if_a_quarter_or_less_is_free_or_a_request_waits() {
    let mut bench = bench(8);
    bench.admission.limit.store(8, Ordering::SeqCst);
    for in_flight in 0..8 {
        assert_eq!(bench.admission.is_tight(), in_flight >= 6, "{in_flight} of 8");
        assert_eq!(bench.ask(&ask(Class::P1)), None);
    }
    bench.ask(&ask(Class::P1));
    assert_eq!(bench.places.len(), 1, "one waits");
    bench.admission.limit.store(80, Ordering::SeqCst);
    assert!(bench.admission.is_tight());
    bench.places.clear();
    assert!(!bench.admission.is_tight(), "10 % are in use");
}
