//! A host, and a bot at a host.

use tokio::time::Instant;

use super::circuit::{Circuit, FAILURES, Stage};
use crate::id::BotId;
use crate::outbound::places::{Line, Waiting};

/// Number of different bots whose failures open the breaker of a host.
pub(super) const BOTS: usize = 3;
/// Maximum number of concurrent probes of a host, each of another bot.
const PROBES_MAX: usize = 16;

/// A host, for all bots.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) under_way: usize,
    /// When the next request would be due if requests were spread evenly over time.
    pub(super) even: Instant,
    /// The requests of all bots that its places or its rate refused.
    pub(super) waiting: Waiting,
    /// Number of bots with a seat.
    pub(super) bots: usize,
    /// Number of bots whose own breaker is open here.
    pub(super) bots_open: usize,
    /// Whether the metrics show an open breaker.
    pub(super) shown: bool,
    pub(super) circuit: Circuit,
    /// Whether connection errors opened the breaker.
    cut_off: bool,
    /// Number of consecutive connection errors.
    unreached: u32,
    /// Bots with a failure since the last success, up to [`BOTS`].
    failing: Vec<BotId>,
    probing: usize,
    /// The second of the last request, and the number of bots with a request in it and in the one
    /// before.
    second: u64,
    active: [usize; 2],
}

/// A bot at a host.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) under_way: usize,
    /// When its next request would be due if it used its part of the host's rate evenly.
    pub(super) even: Instant,
    pub(super) line: Line,
    pub(super) used: Instant,
    /// Whether connections stay open after a request; `None`: not decided yet.
    pub(super) keeps: Option<bool>,
    pub(super) circuit: Circuit,
    pub(super) probing: bool,
    /// The second of its last request.
    second: u64,
}

/// Why a request passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The breakers are closed.
    Plain,
    /// The breaker of the host is open because of other bots. Its first failure opens that of the
    /// bot.
    Spared,
    /// A probe of the bot's breaker.
    OwnProbe,
    /// A probe of the host's breaker, and of the bot's if that is open.
    HostProbe,
}

impl Way {
    pub(super) fn is_probe(self) -> bool {
        matches!(self, Self::OwnProbe | Self::HostProbe)
    }
}

/// The result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The host answered, and not with a failure of its own.
    Answered,
    /// The host was reached and failed: only the bot's URL may be the cause.
    Failed,
    /// No connection was made: so for every bot.
    Unreached,
}

impl Host {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            under_way: 0,
            even: now,
            waiting: Waiting::new(now),
            bots: 0,
            bots_open: 0,
            shown: false,
            circuit: Circuit::default(),
            cut_off: false,
            unreached: 0,
            failing: Vec::new(),
            probing: 0,
            second: 0,
            active: [0; 2],
        }
    }

    /// Notes a request of `seat` in `second`; returns the number of bots that call the host now.
    pub(super) fn count(&mut self, seat: &mut Seat, second: u64) -> usize {
        if self.second != second {
            let before = if self.second + 1 == second { self.active[1] } else { 0 };
            (self.second, self.active) = (second, [before, 0]);
        }
        if seat.second != second {
            seat.second = second;
            self.active[1] += 1;
        }
        self.active[0].max(self.active[1])
    }

    /// Whether the breakers let a request of `seat` pass, or when they will.
    pub(super) fn way(&self, seat: &Seat, now: Instant) -> Result<Way, Option<Instant>> {
        let own = match seat.circuit.stage(now) {
            Stage::Open(until) => return Err(Some(until)),
            Stage::HalfOpen => true,
            Stage::Closed => false,
        };
        let host = self.circuit.stage(now);
        if host != Stage::Closed && !self.cut_off && !own && seat.circuit.failures == 0 {
            return Ok(Way::Spared);
        }
        match host {
            Stage::Open(until) => Err(Some(until)),
            Stage::Closed if !own => Ok(Way::Plain),
            _ if seat.probing => Err(None),
            Stage::Closed => Ok(Way::OwnProbe),
            Stage::HalfOpen if self.probing >= PROBES_MAX => Err(None),
            Stage::HalfOpen => Ok(Way::HostProbe),
        }
    }

    /// A request of `seat` starts; `again`: it was refused before.
    pub(super) fn start(&mut self, seat: &mut Seat, way: Way, again: bool, now: Instant) {
        self.under_way += 1;
        seat.under_way += 1;
        seat.line.started(again, now);
        if again {
            self.waiting.remove(now);
        }
        if way.is_probe() {
            seat.probing = true;
        }
        if way == Way::HostProbe {
            self.probing += 1;
        }
    }

    /// A request of `seat` ended.
    pub(super) fn end(&mut self, seat: &mut Seat, way: Way) {
        self.under_way = self.under_way.saturating_sub(1);
        seat.under_way = seat.under_way.saturating_sub(1);
        if way.is_probe() {
            seat.probing = false;
        }
        if way == Way::HostProbe {
            self.probing = self.probing.saturating_sub(1);
        }
    }

    /// A request of `bot` ended with `outcome`.
    pub(super) fn learn(
        &mut self,
        (bot, seat): (&BotId, &mut Seat),
        way: Way,
        outcome: Outcome,
        now: Instant,
    ) {
        match outcome {
            Outcome::Answered => {
                self.set_open(seat, Circuit::close);
                self.close();
                if way.is_probe() {
                    // Requests that already got a late time to return keep it; new ones need not
                    // wait that long.
                    seat.line.clear(now);
                }
            }
            Outcome::Failed => {
                let others_fail = self.circuit.is_open() && !self.cut_off;
                let doubted = others_fail && matches!(way, Way::Spared | Way::HostProbe);
                let bound = if doubted { 1 } else { FAILURES };
                seat.circuit.failures += 1;
                if seat.circuit.failures >= bound {
                    self.set_open(seat, |circuit| circuit.open(now));
                }
                if self.cut_off && way == Way::HostProbe {
                    self.close();
                }
                self.unreached = 0;
                self.circuit.failures += 1;
                if self.failing.len() < BOTS && !self.failing.contains(bot) {
                    self.failing.push(bot.clone());
                }
                if self.failing.len() >= BOTS && self.circuit.failures >= FAILURES {
                    self.open(false, now);
                }
            }
            Outcome::Unreached => {
                self.unreached += 1;
                self.circuit.failures += 1;
                if self.unreached >= FAILURES || way == Way::HostProbe {
                    self.open(true, now);
                }
            }
        }
    }

    fn open(&mut self, cut_off: bool, now: Instant) {
        if matches!(self.circuit.stage(now), Stage::Open(_)) {
            return;
        }
        self.circuit.open(now);
        self.cut_off = cut_off;
        // So many different bots must fail again before it opens again.
        self.failing.clear();
    }

    fn close(&mut self) {
        self.circuit.close();
        (self.cut_off, self.unreached) = (false, 0);
        self.failing.clear();
    }

    fn set_open(&mut self, seat: &mut Seat, change: impl FnOnce(&mut Circuit)) {
        let was_open = seat.circuit.is_open();
        change(&mut seat.circuit);
        match (was_open, seat.circuit.is_open()) {
            (false, true) => self.bots_open += 1,
            (true, false) => self.bots_open = self.bots_open.saturating_sub(1),
            _ => {}
        }
    }

    /// Whether a breaker is open here: that of the host, or that of a bot.
    pub(super) fn is_open(&self) -> bool {
        self.circuit.is_open() || self.bots_open > 0
    }
}

impl Seat {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            under_way: 0,
            even: now,
            line: Line::new(now),
            used: now,
            keeps: None,
            circuit: Circuit::default(),
            probing: false,
            second: 0,
        }
    }
}
