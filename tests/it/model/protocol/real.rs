//! The real side: makes each call on a real server, and reads all data of the shard back into the
//! terms of the model.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fairlane::id::{BotId, Fence, Lane, Offset, PipelineName, Prefix, ShardCount};
use fairlane::quotas::{NO_QUOTAS, Quota, Quotas};
use fairlane::redis::aside::{Aside, Tried, Waiting};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{self as call, Call, Span};
use redis::{Cmd, Value};

use super::copier::Copy;
use super::decode::{self, Decoded, NAMES, STREAM_NAMES};
use super::reference::{Action, SLICE_US, ScriptReply, Step, Verdict};
use crate::model::state_machine::{
    Attempts, Bot, Claim, Claimed, Completion, Enqueued, Event, Fate, Granted, Key, Limits, Mode,
    Pushed, Queued, Refused, Server, Taken, record_size,
};
use crate::support::script_harness::{ScriptHarness, Snapshot};

/// The reason with which handlers refuse events here.
pub(super) const REFUSED: &str = "refused | by the handler";
const IDEMPOTENCY_MS: u64 = 3_600_000;

/// The effect of one step.
pub(super) struct Outcome {
    pub(super) answer: ScriptReply,
    pub(super) published: Vec<String>,
    pub(super) server: Server,
}

pub(super) struct Real {
    harness: ScriptHarness,
    keys: ShardKeys,
    bots: Vec<BotId>,
    /// Only the reply to a claim creates a fence.
    fences: BTreeMap<u64, Fence>,
    /// The ids of the dead letters.
    letters: Vec<Offset>,
    /// What a holder reads.
    queues: BTreeMap<Bot, VecDeque<(u64, Event)>>,
    lists: BTreeMap<(Bot, u8), VecDeque<(u64, Event)>>,
    saved: Option<Snapshot>,
}

impl Real {
    pub(super) fn new(harness: ScriptHarness) -> Self {
        let shard = ShardCount::new(1).unwrap().shards().next().unwrap();
        let keys = ShardKeys::new(&Prefix::default(), &PipelineName::parse("p").unwrap(), shard);
        let bots = NAMES.iter().map(|name| BotId::parse(name).unwrap()).collect();
        let (fences, queues, lists) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { harness, keys, bots, fences, letters: Vec::new(), queues, lists, saved: None }
    }

    /// Removes all data but the scripts.
    pub(super) fn reset(&mut self) {
        redis::cmd("FLUSHALL").exec(self.harness.plain()).unwrap();
        self.fences.clear();
        self.letters.clear();
        self.queues.clear();
        self.lists.clear();
        self.saved = None;
    }

    fn bot(&self, bot: Bot) -> &BotId {
        &self.bots[usize::from(bot)]
    }

    pub(super) fn step(&mut self, step: &Step) -> Outcome {
        let limits = limits(step.limits);
        let keys = self.keys.clone();
        let keys = &keys;
        match &step.action {
            Action::Nothing => self.plain(step, redis::cmd("PING")),
            Action::Forget(key) => {
                self.plain(step, Cmd::del(keys.idempotency(&decode::key_name(*key))))
            }
            Action::Weight(bot, weight) => {
                let bot = self.bot(*bot).as_str();
                let key = &keys.weight;
                let one = *weight == 1;
                let set = if one { Cmd::hdel(key, bot) } else { Cmd::hset(key, bot, weight) };
                self.plain(step, set)
            }
            Action::Enqueue(copy) => self.enqueue(step, copy),
            Action::Push { bot, events, due_ms, key } => {
                self.push(step, (*bot, events), *due_ms, *key)
            }
            Action::Claim(claim) => self.claim(step, *claim),
            Action::Complete(calls) => self.complete(step, calls),
            Action::Pause(bot) => {
                let bot = bot.map(|bot| self.bot(bot).clone());
                self.script(
                    step,
                    &call::Pause { keys, bot: bot.as_ref(), note: "", replaces: false },
                    changed,
                )
            }
            Action::Resume(bot) => {
                let bot = bot.map(|bot| self.bot(bot).clone());
                let slice_us = limits.slice_us;
                self.script(step, &call::Resume { keys, bot: bot.as_ref(), slice_us }, changed)
            }
            Action::Purge(bot) => {
                let bot = &self.bot(*bot).clone();
                self.script(step, &call::Purge { keys, bot }, |n, _| ScriptReply::Purged(n))
            }
            Action::Revoke(bot) => {
                let (bot, slice_us) = (&self.bot(*bot).clone(), limits.slice_us);
                self.script(step, &call::Revoke { keys, bot, slice_us }, changed)
            }
            Action::Redrive(place, bot) => {
                let id = place.map_or(Offset { ms: 1, seq: 1 }, |place| self.letters[place]);
                let (bot, slice_us) = (&self.bot(*bot).clone(), limits.slice_us);
                self.script(
                    step,
                    &call::Redrive { keys, id, bot, slice_us, renews: false },
                    changed,
                )
            }
            Action::Promote(events) => {
                let events: Vec<(String, BotId)> = events
                    .iter()
                    .map(|&(id, bot)| (id.to_string(), self.bot(bot).clone()))
                    .collect();
                let call = call::Promote { keys, slice_us: limits.slice_us, events: &events };
                self.script(step, &call, |reply, _| {
                    ScriptReply::Promoted(reply.moved, reply.next_ms.map(signed))
                })
            }
            Action::Recover(run) => self.recover(step, *run),
            Action::Save => {
                let outcome = self.plain(step, redis::cmd("PING"));
                self.saved = Some(self.harness.save());
                outcome
            }
            Action::LoseTail(run) => {
                self.harness.restore(&self.saved.take().expect("it was saved"));
                self.recover(step, *run)
            }
        }
    }

    fn recover(&mut self, step: &Step, run: u32) -> Outcome {
        let (keys, run) = (&self.keys.clone(), &decode::run_id(run));
        let call = call::Recover { keys, run, slice_us: unsigned(SLICE_US) };
        self.script(step, &call, |reply, _| ScriptReply::Recovered(reply))
    }

    fn enqueue(&mut self, step: &Step, copy: &Copy) -> Outcome {
        let Copy { spans, bots, take, .. } = copy;
        let places: Vec<Bot> = bots.iter().map(|(bot, _)| *bot).collect();
        let bytes: Vec<(Bot, Vec<Vec<u8>>)> = bots
            .iter()
            .map(|(bot, events)| (*bot, events.iter().copied().map(decode::encode).collect()))
            .collect();
        let bots = bytes.iter().map(|(bot, events)| {
            (self.bot(*bot).clone(), events.iter().map(Vec::as_slice).collect())
        });
        let call = call::Enqueue {
            keys: &self.keys.clone(),
            spans: spans
                .iter()
                .map(|&(stream, (prev, last))| Span {
                    log: STREAM_NAMES[usize::from(stream)],
                    prev: decode::offset(prev),
                    last: decode::offset(last),
                })
                .collect(),
            repeats: (copy.window_ms > 0).then(|| call::Repeats {
                window_ms: unsigned(copy.window_ms),
                names: copy.names.iter().copied().map(decode::name).collect(),
                left_out: copy.left_out.iter().copied().map(decode::name).collect(),
            }),
            limits: limits(step.limits),
            quotas: &NO_QUOTAS,
            bots: bots.collect(),
            postings: None,
            take: call::Take {
                max: take.max,
                ttl_ms: unsigned(take.ttl_ms),
                seen: unsigned(take.seen),
            },
        };
        let mut fences = Vec::new();
        let outcome = self.script(step, &call, |reply, server| {
            let at = server.stands(spans);
            let mut run = None;
            let (reply, stands) = match reply {
                call::Enqueued::Ok(done, taken) => {
                    run = decode::run(&taken.run);
                    fences.extend(taken.leases.iter().map(|lease| lease.fence));
                    let leases = taken.leases.iter().map(|lease| Taken {
                        granted: Granted {
                            bot: places[lease.place],
                            fence: lease.fence.get(),
                            start: signed(lease.start),
                            attempts: attempts(lease.attempts),
                            weight: weight(lease.own),
                        },
                        before: lease.before,
                        events: lease.events,
                    });
                    (Enqueued::Stored(queued(done), leases.collect()), None)
                }
                call::Enqueued::Duplicate(stands) => (Enqueued::Dup, Some(stands)),
                call::Enqueued::Gap(stands) => (Enqueued::Gap(at.clone()), Some(stands)),
                call::Enqueued::Repeated(places) => (Enqueued::Repeated(places), None),
            };
            if let Some(stands) = stands {
                let told: Vec<Offset> = at.iter().map(|at| decode::offset(*at)).collect();
                assert_eq!(stands, told);
            }
            ScriptReply::Enqueued(reply, at, run)
        });
        self.fences.extend(fences.into_iter().map(|fence| (fence.get(), fence)));
        outcome
    }

    fn push(
        &mut self,
        step: &Step,
        (bot, events): (Bot, &[Event]),
        due_ms: Option<i64>,
        key: Option<Key>,
    ) -> Outcome {
        // With a key, the script gets the delay and reads the clock.
        let after = due_ms.map(|due_ms| step.now_us / 1_000 - due_ms);
        let after = after.filter(|after| key.is_some() && *after < 0);
        let key = key.map(decode::key_name);
        let events: Vec<Vec<u8>> = events.iter().map(|&event| decode::encode(event)).collect();
        let call = call::Push {
            keys: &self.keys.clone(),
            limits: limits(step.limits),
            bot: &self.bot(bot).clone(),
            events: &events,
            due_ms: after.or(due_ms).unwrap_or(0),
            idempotency: key.as_deref().map(|key| (key, IDEMPOTENCY_MS)),
        };
        self.script(step, &call, |reply, _| {
            let (sequence, duplicate) = (reply.sequence.get(), reply.duplicate);
            ScriptReply::Pushed(Pushed { queued: queued(reply.queued), sequence, duplicate })
        })
    }

    fn claim(&mut self, step: &Step, claim: Claim) -> Outcome {
        let keys = &self.keys.clone();
        let call = call::Claim {
            keys,
            max: claim.max,
            bound: (claim.bound != i64::MAX).then_some(claim.bound),
            ttl_ms: unsigned(claim.ttl_ms),
            seen: unsigned(claim.seen),
            slice_us: unsigned(SLICE_US),
            alone: claim.idle_elsewhere,
            isolate: claim.isolate,
        };
        let mut fences = Vec::new();
        let outcome = self.script(step, &call, |reply, server| {
            fences.extend(reply.leases.iter().map(|grant| grant.fence));
            assert_eq!(signed(reply.now_us), step.now_us);
            for grant in &reply.leases {
                let bot = decode::bot(grant.bot.as_str());
                let lanes = server.aside.get(&bot);
                let lanes = lanes.map_or_else(Aside::default, |lanes| aside(lanes));
                let first = server.redriven.contains(&bot).then_some(Tried::Queue);
                assert_eq!(grant.aside, lanes.trying(first));
            }
            let granted = reply.leases.iter().map(|grant| Granted {
                bot: decode::bot(grant.bot.as_str()),
                fence: grant.fence.get(),
                start: signed(grant.start),
                attempts: attempts(grant.attempts),
                weight: weight(grant.own),
            });
            let claimed = Claimed {
                granted: granted.collect(),
                v: signed(reply.clock),
                lowest: reply.low,
                deadline_ms: reply.deadline_ms.map(signed),
                ready: usize::try_from(reply.ready).unwrap(),
                vanished: reply.vanished,
            };
            ScriptReply::Claimed(claimed, decode::run(&reply.run))
        });
        self.fences.extend(fences.into_iter().map(|fence| (fence.get(), fence)));
        outcome
    }

    fn complete(&mut self, step: &Step, calls: &[Completion]) -> Outcome {
        let keys = &self.keys.clone();
        let items: Vec<call::Completion> =
            calls.iter().map(|call| self.item(step.now_us / 1_000, call)).collect();
        let dead_max = step.limits.dead_max as u64;
        let quotas = &quotas(step.limits);
        let call = call::Complete { keys, dead_max, quotas, ledger: false, items: &items };
        self.script(step, &call, |reply, _| ScriptReply::Completed {
            verdicts: reply
                .verdicts
                .into_iter()
                .map(|verdict| match verdict {
                    call::Verdict::Ok => Verdict::Ok,
                    call::Verdict::Stale => Verdict::Stale,
                    call::Verdict::Bad => Verdict::Bad,
                    call::Verdict::Full => Verdict::Full,
                })
                .collect(),
            v: signed(reply.clock),
            lowest: reply.low,
            deadline_ms: reply.deadline_ms.map(signed),
            letters_removed: reply.letters_removed,
        })
    }

    fn item(&self, now_ms: i64, call: &Completion) -> call::Completion {
        let ms = |until_ms: i64| unsigned(until_ms - now_ms);
        let exceptions = call.exceptions.iter().map(|&(index, fate)| call::Exception {
            index: index as usize,
            fate: match fate {
                Fate::Dead { attempts } => call::Fate::Dead { reason: REFUSED.into(), attempts },
                Fate::Later { at_ms } => call::Fate::Later { at_ms: unsigned(at_ms) },
                Fate::Lane(number) => call::Fate::Lane(lane(number)),
            },
        });
        let run = call.run.map_or_else(String::new, |run| decode::run_id(run)[..8].to_owned());
        let list = call.aside.as_ref().and_then(|change| change.list);
        let events = match list {
            None => self.queues.get(&call.bot),
            Some(lane) => self.lists.get(&(call.bot, lane)),
        };
        call::Completion {
            bot: self.bot(call.bot).clone(),
            run: Arc::from(run),
            fence: self.fences[&call.fence],
            before: call.before as usize,
            n: call.n as usize,
            bytes: events.map_or(0, |queue| {
                let taken = queue.iter().take(call.n as usize);
                taken.map(|&(_, event)| record_size(event)).sum()
            }),
            mode: match call.mode {
                Mode::Keep { until_ms } => call::Mode::Keep { ttl_ms: ms(until_ms) },
                Mode::Hand { until_ms, max } => call::Mode::Hand { ttl_ms: ms(until_ms), max },
                Mode::Release => call::Mode::Release,
                Mode::Park { until_ms } => call::Mode::Park { ms: ms(until_ms) },
                Mode::Fail { until_ms, isolate } => call::Mode::Fail { ms: ms(until_ms), isolate },
            },
            cost: unsigned(call.cost),
            exceptions: exceptions.collect(),
            leaving: None,
            aside: call.aside.as_ref().map(|change| call::AsideChange {
                aside: aside(&change.lanes),
                next_ms: unsigned(change.next_ms),
                list: change.list.map(lane),
            }),
        }
    }

    fn script<C: Call>(
        &mut self,
        step: &Step,
        call: &C,
        read: impl FnOnce(C::Reply, &Server) -> ScriptReply,
    ) -> Outcome {
        let command = self.harness.command(call);
        let (value, published, server) = self.send(step, command);
        let answer = match call::exceeded(&value) {
            Some(e) => ScriptReply::Refused(Refused(e.name, e.held, e.limit)),
            None => read(C::reply(value).unwrap(), &server),
        };
        Outcome { answer, published, server }
    }

    fn plain(&mut self, step: &Step, command: Cmd) -> Outcome {
        let (_, published, server) = self.send(step, command);
        Outcome { answer: ScriptReply::Nothing, published, server }
    }

    fn send(&mut self, step: &Step, command: Cmd) -> (Value, Vec<String>, Server) {
        let look = decode::look(&self.keys, &self.bots);
        let (reply, published, values) = self.harness.run(step.now_us, command, &look).unwrap();
        let Decoded { mut server, letters } = decode::decode(&self.keys, values);
        (server.slice_us, server.limits) = (SLICE_US, step.limits);
        self.letters = letters;
        self.queues.clone_from(&server.queues);
        self.lists.clone_from(&server.lists);
        (reply, published, server)
    }
}

fn lane(number: u8) -> Lane {
    Lane::from_digits(&number.to_string()).unwrap()
}

/// The lanes that are set aside, as a worker writes them.
fn aside(lanes: &[(u8, i64)]) -> Aside {
    let mut aside = if lanes.is_empty() { Aside::default() } else { Aside::of(7) };
    for &(number, due_ms) in lanes {
        aside.set(Waiting { lane: lane(number), due_ms: unsigned(due_ms), attempts: 1, alone: 2 });
    }
    aside
}

fn attempts(attempts: call::Attempts) -> Attempts {
    let call::Attempts { suspect, lost, failed, isolate } = attempts;
    Attempts { suspect, lost, failed, isolate }
}

fn changed(changed: bool, _: &Server) -> ScriptReply {
    ScriptReply::Changed(changed)
}

fn limits(limits: Limits) -> call::Limits {
    call::Limits {
        slice_us: unsigned(SLICE_US),
        linger_ms: unsigned(limits.linger_ms),
        max_queue: limits.max_queue as u64,
        overflow_dead: limits.overflow_dead,
        dead_max: limits.dead_max as u64,
        quota: quota(limits),
    }
}

fn quota(limits: Limits) -> Quota {
    Quota {
        queued_bytes: limits.queued_bytes,
        delayed_events: limits.delayed.0,
        delayed_bytes: limits.delayed.1,
        dead_letters: limits.letters.0,
        dead_bytes: limits.letters.1,
        ..Quota::NONE
    }
}

fn quotas(limits: Limits) -> Quotas {
    Quotas::new(quota(limits), BTreeMap::new(), 100)
}

fn queued(queued: call::Queued) -> Queued {
    let call::Queued {
        appended,
        dead,
        dropped,
        letters_removed,
        over_quota,
        letters_over_quota,
        ..
    } = queued;
    Queued { appended, dead, dropped, letters_removed, over_quota, letters_over_quota }
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap()
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap()
}

/// The model has whole weights, and no rates.
fn weight(own: fairlane::rate::BotLimits) -> u32 {
    own.weight.unwrap_or_default().to_string().parse().unwrap()
}
