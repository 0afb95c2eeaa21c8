//! Decides whether a host gets another request now, by the number of concurrent requests, the rate,
//! and a circuit breaker.
//!
//! After five consecutive failures the breaker of a host opens. After its open time one probe is
//! sent; each failed probe doubles the open time. A refused request gets a time to return. These
//! times are spread by the speed of the host, so that ten thousand waiting requests do not return
//! in one burst.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::gauge;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::metrics::BREAKER_OPEN;

/// Number of consecutive failures that open the breaker.
pub(crate) const FAILURES: u32 = 5;
/// The first and the longest time that the breaker is open.
pub(crate) const OPEN_FIRST: Duration = Duration::from_secs(5);
pub(crate) const OPEN_MAX: Duration = Duration::from_secs(60);
/// The shortest time until a refused request returns, and the maximum spread of these times.
const AGAIN_MIN: Duration = Duration::from_millis(50);
const AGAIN_MAX: Duration = Duration::from_secs(30);
/// Hosts without a call for this time are forgotten. With more than `MANY` hosts, the shorter
/// `FORGET_MANY` applies.
const FORGET: Duration = Duration::from_secs(600);
const MANY: usize = 10_000;
const FORGET_MANY: Duration = Duration::from_secs(30);
/// Minimum interval between two searches for such hosts.
const SWEEP: Duration = Duration::from_secs(10);
/// The newest duration has the weight 1/`WEIGHT` in the moving average.
const WEIGHT: u32 = 8;
/// A host may exceed its rate by the requests of this time.
const BURST: Duration = Duration::from_millis(100);
/// Maximum number of hosts with their own series in the metrics; later ones count as `other`.
const NAMED_MAX: usize = 20;

type Host = (String, u16);

/// The breakers of all hosts of a process.
#[derive(Debug)]
pub(crate) struct Breakers {
    max: usize,
    /// The interval between two requests to a host.
    interval: Duration,
    hosts: Mutex<HashMap<Host, HostBreaker>>,
    /// Hosts with their own series in the metrics.
    named: Mutex<HashSet<Host>>,
    /// When unused hosts were last removed.
    swept: Mutex<Option<Instant>>,
}

/// The open circuit breaker of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Breaker {
    /// The host and its port.
    pub host: String,
    /// Number of consecutive failures.
    pub failures: u32,
    /// Seconds until the next probe; 0: now.
    pub seconds: u64,
}

#[derive(Debug)]
struct HostBreaker {
    under_way: usize,
    failures: u32,
    /// The breaker refuses requests until then.
    open_until: Option<Instant>,
    open_for: Duration,
    probing: bool,
    /// The average duration of a request.
    average: Duration,
    /// When the next request would be due if requests were spread evenly over time.
    even: Instant,
    /// When the next refused request may return.
    next: Instant,
    used: Instant,
}

impl HostBreaker {
    fn new(now: Instant) -> Self {
        Self {
            under_way: 0,
            failures: 0,
            open_until: None,
            open_for: Duration::ZERO,
            probing: false,
            average: Duration::from_millis(20),
            even: now,
            next: now,
            used: now,
        }
    }
}

/// The decision on a request.
#[derive(Debug)]
pub(crate) enum Permission {
    /// Send it, and report the result.
    Go(Pass),
    /// The breaker is open; return after this time.
    Open(Duration),
    /// The host has reached its limit of concurrent requests or its rate; return after this time.
    Full(Duration),
}

impl Breakers {
    /// Limits each host to `max` concurrent requests and `rate` per second; 0: no such limit.
    pub(crate) fn new(max: usize, rate: u64) -> Arc<Self> {
        let interval =
            Duration::from_nanos(1_000_000_000_u64.checked_div(rate).unwrap_or_default());
        Arc::new(Self {
            max,
            interval,
            hosts: Mutex::default(),
            named: Mutex::default(),
            swept: Mutex::default(),
        })
    }

    /// Decides whether a request to `host` may be sent, and reserves its place.
    pub(crate) fn ask(self: &Arc<Self>, host: &str, port: u16, now: Instant) -> Permission {
        let key = (host.to_owned(), port);
        let mut hosts = self.lock();
        if !hosts.contains_key(&key) {
            self.sweep(&mut hosts, now);
        }
        let gate = hosts.entry(key.clone()).or_insert_with(|| HostBreaker::new(now));
        gate.used = now;
        match gate.open_until {
            Some(until) if now < until => {
                return Permission::Open(self.turn_away(gate, until, now));
            }
            Some(_) if gate.probing => {
                return Permission::Open(self.turn_away(gate, now + OPEN_FIRST, now));
            }
            None if gate.under_way >= self.max || gate.even > now + BURST => {
                return Permission::Full(self.turn_away(gate, now, now));
            }
            _ => {}
        }
        gate.even = gate.even.max(now) + self.interval;
        let probes = gate.open_until.is_some();
        gate.probing = probes;
        gate.under_way += 1;
        Permission::Go(Pass { breakers: Arc::clone(self), key, began: now, probes, said: false })
    }

    /// Forgets unused hosts.
    fn sweep(&self, hosts: &mut HashMap<Host, HostBreaker>, now: Instant) {
        {
            let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
            if swept.is_some_and(|swept| now.saturating_duration_since(swept) < SWEEP) {
                return;
            }
            *swept = Some(now);
        }
        let after = if hosts.len() > MANY { FORGET_MANY } else { FORGET };
        let mut forgotten = Vec::new();
        hosts.retain(|host, gate| {
            let used = gate.under_way > 0 || now.saturating_duration_since(gate.used) < after;
            if !used && gate.open_until.is_some() {
                forgotten.push(host.clone());
            }
            used
        });
        for host in forgotten {
            self.show(hosts, &host, false);
        }
    }

    /// The time until a request may return, if the breaker of the host is open. Reserves nothing.
    pub(crate) fn shut(&self, host: &str, port: u16, now: Instant) -> Option<Duration> {
        let mut hosts = self.lock();
        let gate = hosts.get_mut(&(host.to_owned(), port))?;
        let until = gate.open_until?;
        match until.checked_duration_since(now) {
            Some(left) if !left.is_zero() => Some(self.turn_away(gate, until, now)),
            _ if gate.probing => Some(self.turn_away(gate, now + OPEN_FIRST, now)),
            _ => None,
        }
    }

    /// The time until a refused request may return, spread by the speed of the host.
    fn turn_away(&self, gate: &mut HostBreaker, after: Instant, now: Instant) -> Duration {
        let step = gate.average / u32::try_from(self.max).unwrap_or(u32::MAX).max(1);
        let step = step.max(self.interval);
        let earliest = after + AGAIN_MIN;
        gate.next = gate.next.max(earliest).min(earliest + AGAIN_MAX) + step;
        gate.next.saturating_duration_since(now)
    }

    /// The open breakers, those with the largest numbers of failures first.
    pub(crate) fn open(&self, now: Instant) -> Vec<Breaker> {
        let hosts = self.lock();
        let open = hosts.iter().filter_map(|(host, gate)| {
            let until = gate.open_until?;
            let seconds = until.saturating_duration_since(now).as_secs_f64().ceil();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a pause")]
            let seconds = seconds as u64;
            Some(Breaker { host: label(host), failures: gate.failures, seconds })
        });
        let mut open: Vec<Breaker> = open.collect();
        open.sort_by(|a, b| (b.failures, &a.host).cmp(&(a.failures, &b.host)));
        open
    }

    /// Whether a host has its own series in the metrics. Assigns one while some are left.
    fn has_name(&self, host: &Host) -> bool {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.len() < NAMED_MAX {
            named.insert(host.clone());
        }
        named.contains(host)
    }

    /// Updates the metrics after a breaker opened or closed.
    fn show(&self, hosts: &HashMap<Host, HostBreaker>, host: &Host, open: bool) {
        if self.has_name(host) {
            breaker_open(&label(host), usize::from(open));
        } else {
            let others = hosts
                .iter()
                .filter(|(host, gate)| gate.open_until.is_some() && !self.has_name(host));
            breaker_open("other", others.count());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Host, HostBreaker>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said(&self, pass: &Pass, now: Instant, answered: Option<bool>) {
        let mut hosts = self.lock();
        let Some(gate) = hosts.get_mut(&pass.key) else { return };
        gate.under_way = gate.under_way.saturating_sub(1);
        gate.probing &= !pass.probes;
        let Some(answered) = answered else { return };
        let took = now.saturating_duration_since(pass.began);
        gate.average = (gate.average * (WEIGHT - 1) + took) / WEIGHT;
        if answered {
            let was_open = gate.open_until.is_some();
            (gate.failures, gate.open_until, gate.open_for) = (0, None, Duration::ZERO);
            if pass.probes {
                // Requests that already got a late return time keep it; new ones need not wait that
                // long.
                gate.next = now;
            }
            if was_open {
                self.show(&hosts, &pass.key, false);
            }
            return;
        }
        gate.failures += 1;
        // The failure of a request that started before the breaker opened does not prolong the open
        // time.
        let is_open = gate.open_until.is_some_and(|until| now < until);
        if gate.failures >= FAILURES && !is_open {
            gate.open_for = (gate.open_for * 2).clamp(OPEN_FIRST, OPEN_MAX);
            gate.open_until = Some(now + gate.open_for);
            self.show(&hosts, &pass.key, true);
        }
    }
}

/// A host in the usual notation.
fn label((host, port): &Host) -> String {
    format!("{host}:{port}")
}

/// A request that may be sent. If it is dropped without a report, for example after a cancellation,
/// it counts neither as a success nor as a failure.
#[derive(Debug)]
pub(crate) struct Pass {
    breakers: Arc<Breakers>,
    key: Host,
    began: Instant,
    probes: bool,
    said: bool,
}

impl Pass {
    /// Reports the result. `answered` is true if the host answered, and not with a server error.
    pub(crate) fn say(mut self, answered: bool, now: Instant) {
        self.said = true;
        self.breakers.said(&self, now, Some(answered));
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.said {
            self.breakers.said(self, self.began, None);
        }
    }
}

/// Sets the number of open breakers of `host`. The host `other` stands for all hosts without their
/// own series.
#[expect(clippy::cast_precision_loss, reason = "a count of hosts")]
pub(crate) fn breaker_open(host: &str, open: usize) {
    gauge!(BREAKER_OPEN, "host" => host.to_owned()).set(open as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go(breakers: &Arc<Breakers>, now: Instant) -> Pass {
        match breakers.ask("a", 80, now) {
            Permission::Go(pass) => pass,
            other => panic!("{other:?}"),
        }
    }

    fn opened(breakers: &Arc<Breakers>, now: Instant) -> Option<Duration> {
        match breakers.ask("a", 80, now) {
            Permission::Open(after) => Some(after),
            _ => None,
        }
    }

    fn fail(breakers: &Arc<Breakers>, times: u32, now: Instant) {
        for _ in 0..times {
            go(breakers, now).say(false, now);
        }
    }

    #[test]
    fn concurrent_requests_to_a_host_are_limited_and_the_others_are_spread() {
        let (breakers, now) = (Breakers::new(2, 0), Instant::now());
        let passes = [go(&breakers, now), go(&breakers, now)];
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            let Permission::Full(after) = breakers.ask("a", 80, now) else { panic!("a third one") };
            assert!(after > last && after >= AGAIN_MIN);
            last = after;
        }
        assert!(last > Duration::from_secs(1) && last < Duration::from_millis(1_100));
        assert!(matches!(breakers.ask("a", 81, now), Permission::Go(_)), "another one's");
        drop(passes);
        assert!(matches!(breakers.ask("a", 80, now), Permission::Go(_)));
    }

    #[test]
    fn a_host_gets_its_requests_a_second_and_a_burst() {
        let (breakers, begun) = (Breakers::new(1_000, 100), Instant::now());
        let (mut now, mut passed, mut turned_away) = (begun, 0, 0);
        let mut through = Vec::new();
        for _ in 0..5_000 {
            match breakers.ask("a", 80, now) {
                Permission::Go(pass) => {
                    pass.say(true, now);
                    passed += 1;
                    through.push(now);
                }
                Permission::Full(after) => {
                    assert!(after >= AGAIN_MIN);
                    turned_away += 1;
                }
                Permission::Open(after) => panic!("{after:?}"),
            }
            now += Duration::from_millis(1);
        }
        assert_eq!((passed, turned_away), (510, 4_490), "5 s of 100, and a tenth of a second more");
        assert!(through[..11].iter().all(|&at| at < begun + Duration::from_millis(12)));
    }

    #[test]
    fn five_failures_in_a_row_open_the_breaker_and_one_success_between_does_not() {
        let (breakers, now) = (Breakers::new(16, 0), Instant::now());
        fail(&breakers, FAILURES - 1, now);
        go(&breakers, now).say(true, now);
        fail(&breakers, FAILURES - 1, now);
        assert_eq!(breakers.open(now), []);
        fail(&breakers, 1, now);
        let breaker = Breaker { host: "a:80".to_owned(), failures: FAILURES, seconds: 5 };
        assert_eq!(breakers.open(now), [breaker]);
        let after = opened(&breakers, now).unwrap();
        assert!(after >= OPEN_FIRST && after < OPEN_FIRST + Duration::from_secs(1), "{after:?}");
    }

    #[test]
    fn one_request_probes_and_its_result_decides() {
        let (breakers, mut now) = (Breakers::new(16, 0), Instant::now());
        fail(&breakers, FAILURES, now);
        let mut open_for = OPEN_FIRST;
        for _ in 0..6 {
            assert!(opened(&breakers, now + open_for.mul_f64(0.999)).is_some());
            now += open_for;
            let probe = go(&breakers, now);
            assert!(opened(&breakers, now).is_some(), "one at a time");
            probe.say(false, now);
            open_for = (open_for * 2).min(OPEN_MAX);
        }
        assert_eq!(open_for, OPEN_MAX);
        now += OPEN_MAX;
        go(&breakers, now).say(true, now);
        let passes: Vec<Pass> = (0..16).map(|_| go(&breakers, now)).collect();
        drop(passes);
        fail(&breakers, FAILURES, now);
        now += OPEN_FIRST;
        assert!(opened(&breakers, now).is_none(), "it begins with the first pause again");
    }

    #[test]
    fn a_cancelled_request_says_nothing_and_a_cancelled_probe_lets_another_one_try() {
        let (breakers, mut now) = (Breakers::new(1, 0), Instant::now());
        drop(go(&breakers, now));
        fail(&breakers, FAILURES, now);
        now += OPEN_FIRST;
        drop(go(&breakers, now));
        go(&breakers, now).say(true, now);
        assert_eq!(breakers.open(now), []);
    }

    #[test]
    fn those_begun_before_it_opened_do_not_prolong_it() {
        let (breakers, now) = (Breakers::new(16, 0), Instant::now());
        let passes: Vec<Pass> = (0..16).map(|_| go(&breakers, now)).collect();
        for pass in passes {
            pass.say(false, now);
        }
        assert!(opened(&breakers, now + OPEN_FIRST).is_none());
    }

    #[test]
    fn unused_hosts_are_forgotten() {
        let (breakers, mut now) = (Breakers::new(1, 0), Instant::now());
        for port in 0..100 {
            drop(breakers.ask("a", port, now));
        }
        now += FORGET;
        drop(breakers.ask("b", 80, now));
        assert_eq!(breakers.lock().len(), 1);
    }
}
