//! Carries out the effects of rules. Each effect has a unique name, and happens once despite
//! retries.
//!
//! | effect | protection against repetition |
//! |---|---|
//! | an event on the bus | `lua/emit.lua`: its name beside the stream, for an hour |
//! | a delayed event | the queue's idempotency key, for an hour; then as above, by its id |
//! | a notification, a push | the notification's key, until a week after its end, at least for an hour |
//! | views | the counters' idempotency key, for an hour |
//!
//! The hour counts from the first attempt to the last. Decisions are stored before they are carried
//! out, so effects are repeated only while a slice cannot be completed. A replay is asked for: its
//! effects have names of their own, and happen again.

mod bodies;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use rustc_hash::FxHashMap;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::Instant;

use self::bodies::{sends_event, told, too_large, written};
use super::decide::{DUE, Deed, Effect, Note, emitted, name};
use super::rule::{Delay, Notify, text_of};
use super::stats::RuleNotes;
use crate::bus::Source;
use crate::bus::backlog::{Backlog, Entering};
use crate::bus::source::Outgoing;
use crate::clock::{SharedClock, millis};
use crate::counters::view::AdId;
use crate::counters::{Counters, CountersError};
use crate::event::Event;
use crate::id::Offset;
use crate::notifications::record::{Duplicates, NewNotification, When};
use crate::notifications::{AcceptError, Notifications};
use crate::queue::{PushError, Queue};
use crate::redis::scripts::Emit;
use crate::redis::{Link, RedisError, keys};
use crate::trace::{SliceTrace, TraceContext};

/// How long names are remembered.
const WINDOW: Duration = Duration::from_secs(3_600);
/// Maximum number of events and of bytes per script call.
const EMIT_EVENTS: usize = 100;
const EMIT_BYTES: usize = 256 * 1_024;
/// How long the events of a slice wait until the bus has room for them.
const ROOM_WITHIN: Duration = Duration::from_secs(2);
/// Maximum number of concurrent effects of a slice, without those on the bus.
const AT_ONCE: usize = 16;
/// Default time from the due time until a notification expires.
const EXPIRES_IN: Delay = Delay(Duration::from_secs(24 * 3_600));
/// The type of a push in the statistics of notifications.
const PUSHED: &str = "push";

/// The components that effects need.
pub(crate) struct Effects {
    /// The bus.
    pub(crate) bus: Arc<Link>,
    pub(crate) stream: String,
    /// The bus, if it is not in Redis.
    pub(crate) published: Option<Arc<dyn Source>>,
    /// The events on the bus that are not copied yet.
    pub(crate) backlog: Option<Arc<Backlog>>,
    /// The queues of the rules, for delayed events.
    pub(crate) queue: Queue,
    /// The notifications; `None`: they do not run.
    pub(crate) notifications: Option<Notifications>,
    /// The counters, or why they do not run.
    pub(crate) counters: Result<Counters, String>,
    pub(crate) clock: SharedClock,
    /// The statistics of the rules.
    pub(crate) notes: Arc<RuleNotes>,
}

/// An effect of an event, or a delayed event that is due.
#[derive(Debug)]
pub(crate) enum Task<'a> {
    /// The effect, and the number of events that may follow from those it emits.
    Effect(&'a Event, &'a Effect, u64),
    Due(&'a Event),
}

/// An effect that can never be done: the index of its event, and the note.
pub(crate) type Refused = (usize, Note);

/// An effect that can be retried.
#[derive(Debug)]
pub(crate) struct Failed {
    /// The index of its event.
    pub(crate) at: usize,
    /// Whether the target was unavailable.
    pub(crate) away: bool,
    pub(crate) reason: String,
}

/// The events for the bus.
#[derive(Default)]
struct Batch {
    /// The index of the event that caused the first one.
    at: usize,
    /// Their bot, which is that of the slice.
    bot: String,
    events: Vec<(String, Vec<u8>)>,
    bytes: usize,
}

impl std::fmt::Debug for Effects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Effects").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Effects {
    /// Carries out the tasks, each with the index of its event. Events go to the bus in order.
    ///
    /// # Errors
    /// The first failure; tasks after it may be done.
    pub(crate) async fn carry_out(
        &self,
        tasks: &[(usize, Task<'_>)],
        trace: Option<&SliceTrace>,
    ) -> Result<Vec<Refused>, Failed> {
        let (now, mut refused) = (self.clock.now(), Vec::new());
        let after = |event| SliceTrace::after(trace, event);
        let (mut batches, mut others) = (Vec::new(), Vec::new());
        let mut texts = FxHashMap::default();
        for (at, task) in tasks {
            match task {
                Task::Due(event) => add(&mut batches, *at, &due(event)),
                Task::Effect(event, effect, share) => match &effect.deed {
                    Deed::Emit { kind, data, delay, applied } => {
                        let what = (&**kind, data.as_ref());
                        match emitted(event, effect, what, (*applied, *share), delay.after(now)) {
                            Err(error) => refused.push((*at, failure(effect, &error))),
                            Ok(new) => {
                                let new = match after(event) {
                                    Some(context) => context.put_into(new),
                                    None => new,
                                };
                                if delay.0.is_zero() {
                                    add(&mut batches, *at, &new);
                                } else {
                                    others.push((*at, Other::Later(effect, new, delay.0)));
                                }
                            }
                        }
                    }
                    deed => {
                        // An event of 1 MiB may have hundreds of effects: it is written once.
                        let text = sends_event(deed)
                            .then(|| texts.entry(*at).or_insert_with(|| written(event)).clone());
                        match text.transpose() {
                            Ok(text) => {
                                others
                                    .push((*at, Other::Effect(event, effect, after(event), text)));
                            }
                            Err(bytes) => refused.push((*at, failure(effect, &too_large(bytes)))),
                        }
                    }
                },
            }
        }
        let emitting = async {
            let until = Instant::now() + ROOM_WITHIN;
            for batch in &batches {
                let mut entering = self.room_for(batch, until).await;
                entering.iter_mut().for_each(Entering::sends);
                match (entering, self.emit(batch).await?) {
                    (Some(entering), Some(last)) => entering.added(last),
                    (Some(entering), None) => entering.failed(),
                    (None, _) => {}
                }
            }
            Ok(())
        };
        let doing = async {
            let each = chains(others).into_iter().map(|chain| self.carry_chain(chain).boxed());
            let mut doing = stream::iter(each.collect::<Vec<_>>()).buffered(AT_ONCE);
            let (mut refused, mut failed) = (Vec::new(), None::<Failed>);
            while let Some((notes, end)) = doing.next().await {
                refused.extend(notes);
                failed = match (failed, end) {
                    (Some(first), Some(second)) if second.at >= first.at => Some(first),
                    (first, second) => second.or(first),
                };
            }
            refused.sort_by_key(|(at, _)| *at);
            failed.map_or(Ok(refused), Err)
        };
        // Wait for all of them: a cancelled one would be repeated without need.
        let (emitted, done) = tokio::join!(emitting, doing);
        match (emitted, done) {
            (Ok(()), Ok(more)) => {
                refused.extend(more);
                Ok(refused)
            }
            (Err(first), Err(second)) if second.at < first.at => Err(second),
            (Err(failed), _) | (Ok(()), Err(failed)) => Err(failed),
        }
    }

    /// Carries out effects one after the other. Returns which can never be done, and the failure that
    /// ended it.
    async fn carry_chain(&self, chain: Vec<(usize, Other<'_>)>) -> (Vec<Refused>, Option<Failed>) {
        let mut refused = Vec::new();
        for (at, other) in chain {
            match self.carry(other).await {
                Ok(None) => {}
                Ok(Some(note)) => refused.push((at, note)),
                Err((away, reason)) => return (refused, Some(Failed { at, away, reason })),
            }
        }
        (refused, None)
    }

    /// Waits until the bus has room for further events of the bot, as a request would: rules that emit much
    /// must not delay the events of other bots. `None`: the events go to the bus all the same.
    async fn room_for(&self, batch: &Batch, until: Instant) -> Option<Entering<'_>> {
        let backlog = self.backlog.as_ref()?;
        let parts = vec![(backlog.sender(('b', &*batch.bot)), batch.events.len() as u64)];
        backlog.enter_until(parts, until).await
    }

    /// Emits events. Returns the last one that is new on the bus.
    async fn emit(&self, batch: &Batch) -> Result<Option<Offset>, Failed> {
        if let Some(published) = &self.published {
            return self.emit_elsewhere(published, batch).await;
        }
        let emit = Emit {
            prefix: self.bus.prefix(),
            stream: &self.stream,
            window_ms: millis(WINDOW),
            events: &batch.events,
        };
        self.bus.call(&emit).await.map_err(|error| {
            let (away, reason) = tried(&error);
            Failed { at: batch.at, away, reason }
        })
    }

    /// Emits to a bus that is not in Redis. An event that was emitted before is left out. One that
    /// was emitted and not noted, because this process was killed in between, is emitted again:
    /// `bus.dedup` drops it.
    async fn emit_elsewhere(
        &self,
        published: &Arc<dyn Source>,
        batch: &Batch,
    ) -> Result<Option<Offset>, Failed> {
        let failed = |away, reason| Failed { at: batch.at, away, reason };
        let in_redis = |error: RedisError| {
            let (away, reason) = tried(&error);
            failed(away, reason)
        };
        let (prefix, bus) = (self.bus.prefix(), published.name());
        let keys: Vec<_> = batch.events.iter().map(|(id, _)| keys::seen(prefix, bus, id)).collect();
        let mut asking = redis::Pipeline::with_capacity(keys.len());
        for key in &keys {
            asking.cmd("EXISTS").arg(key);
        }
        let seen = self.bus.run_checked("EXISTS", &asking).await.map_err(in_redis)?;
        let new = batch.events.iter().zip(&keys).zip(seen);
        let new: Vec<_> = new.filter(|(_, seen)| !matches!(seen, redis::Value::Int(1))).collect();
        if new.is_empty() {
            return Ok(None);
        }
        let events: Vec<_> =
            new.iter().map(|(((_, json), _), _)| Outgoing { json, bot: &batch.bot }).collect();
        let added = published.publish(&events).await;
        let added = added.map_err(|error| failed(error.is_passing(), error.to_string()))?;
        let mut noting = redis::Pipeline::with_capacity(new.len());
        for ((_, key), _) in &new {
            noting.cmd("SET").arg(*key).arg("").arg("PX").arg(millis(WINDOW));
        }
        self.bus.run_checked("SET", &noting).await.map_err(in_redis)?;
        Ok(added.last().copied())
    }

    /// Carries out one effect; returns why it can never be done, if so.
    async fn carry(&self, other: Other<'_>) -> Result<Option<Note>, (bool, String)> {
        match other {
            Other::Later(effect, event, delay) => {
                let event = event.with_extension(DUE, Some(json!(true)));
                let once = Some((event.id(), WINDOW));
                match self.queue.push_later(&event, delay, once).await {
                    Ok(_) => Ok(None),
                    Err(PushError::Redis(error)) => undone(effect, &error),
                    Err(error) => Ok(Some(failure(effect, &error))),
                }
            }
            Other::Effect(event, effect, trace, text) => match &effect.deed {
                Deed::Emit { .. } => Ok(None),
                Deed::Notify(notify) => {
                    let new = notification(event, effect, notify, text.as_deref());
                    self.accept(effect, NewNotification { trace, ..new }).await
                }
                Deed::Push(push) => {
                    let new = pushed(event, effect, &push.url, text.as_deref());
                    self.accept(effect, NewNotification { trace, ..new }).await
                }
                Deed::Count(count) => {
                    let counters = match &self.counters {
                        Ok(counters) => counters,
                        Err(why) => {
                            let why = format!("views are not counted here: {why}");
                            return Ok(Some(failure(effect, &why)));
                        }
                    };
                    let ad = match AdId::parse(&count.ad) {
                        Ok(ad) => ad,
                        Err(error) => return Ok(Some(failure(effect, &error))),
                    };
                    let key = name(event.bot(), event, effect);
                    match counters.view(event.bot(), &ad, count.n, Some(&key)).await {
                        Ok(_) => Ok(None),
                        Err(CountersError::Redis(error)) => undone(effect, &error),
                        Err(hangs) => Err((true, hangs.to_string())),
                    }
                }
            },
        }
    }

    async fn accept(
        &self,
        effect: &Effect,
        new: NewNotification,
    ) -> Result<Option<Note>, (bool, String)> {
        let Some(notifications) = &self.notifications else {
            let why = "notifications do not run here: pipelines.notifications.enabled is false";
            return Ok(Some(failure(effect, &why)));
        };
        match notifications.accept(&new).await {
            Ok(_) => Ok(None),
            Err(AcceptError::Unusable(unusable)) => Ok(Some(failure(effect, &unusable))),
            Err(AcceptError::Store(error)) => undone(effect, &error),
        }
    }
}

/// The effects other than immediate events for the bus.
enum Other<'a> {
    Later(&'a Effect, Event, Duration),
    /// With the JSON of the event, if the effect sends it.
    Effect(&'a Event, &'a Effect, Option<TraceContext>, Option<Arc<RawValue>>),
}

/// The effects, of which those in a chain follow one another: the notifications to a user, because a
/// throttle accepts the first ones.
fn chains<'a>(others: Vec<(usize, Other<'a>)>) -> Vec<Vec<(usize, Other<'a>)>> {
    let mut chains: Vec<Vec<(usize, Other<'a>)>> = Vec::with_capacity(others.len());
    let mut places = FxHashMap::default();
    for (at, other) in others {
        let user = match &other {
            &Other::Effect(event, effect, ..) => match &effect.deed {
                Deed::Notify(notify) => Some(user_of(notify, event)),
                _ => None,
            },
            Other::Later(..) => None,
        };
        let user = user.filter(|user| !user.is_empty());
        let place = user.map(|user| *places.entry(user).or_insert(chains.len()));
        match place.and_then(|place| chains.get_mut(place)) {
            Some(chain) => chain.push((at, other)),
            None => chains.push(vec![(at, other)]),
        }
    }
    chains
}

/// The user of a notification; empty without one.
fn user_of<'a>(notify: &'a Notify, event: &'a Event) -> &'a str {
    notify.uid.as_deref().or(event.subject()).unwrap_or_default()
}

fn add(batches: &mut Vec<Batch>, at: usize, event: &Event) {
    // Strings and JSON values always serialise.
    let json = serde_json::to_vec(event).unwrap_or_default();
    let fits =
        |batch: &Batch| batch.events.len() < EMIT_EVENTS && batch.bytes + json.len() <= EMIT_BYTES;
    if !batches.last().is_some_and(fits) {
        let bot = event.bot().as_str().to_owned();
        batches.push(Batch { at, bot, ..Batch::default() });
    }
    if let Some(batch) = batches.last_mut() {
        batch.bytes += json.len();
        batch.events.push((event.id().to_owned(), json));
    }
}

/// A due event in the form in which it goes to the bus.
fn due(event: &Event) -> Event {
    event.clone().with_extension(DUE, None)
}

fn tried(error: &RedisError) -> (bool, String) {
    (error.is_passing(), error.to_string())
}

/// What an error means for an effect. An attempt later would delay all events of the bot, so what
/// exceeds a quota is not done.
fn undone(effect: &Effect, error: &RedisError) -> Result<Option<Note>, (bool, String)> {
    match error {
        RedisError::Quota(exceeded) => Ok(Some(failure(effect, exceeded))),
        error => Err(tried(error)),
    }
}

fn failure(effect: &Effect, why: &dyn std::fmt::Display) -> Note {
    let why = format!("actions[{}]: {why}", effect.action);
    Note::Failed { rule: Some(effect.rule.clone()), why }
}

fn key(event: &Event, effect: &Effect) -> (String, Duplicates) {
    (format!("automation {}", name(event.bot(), event, effect)), Duplicates::Once)
}

fn notification(
    event: &Event,
    effect: &Effect,
    notify: &Notify,
    text: Option<&RawValue>,
) -> NewNotification {
    let method = notify.method();
    let body = match (&notify.body, text) {
        (Some(body), _) => text_of(body),
        (None, Some(text)) => told(event, &effect.rule, text),
        (None, None) => String::new(),
    };
    NewNotification {
        bot: event.bot().clone(),
        uid: user_of(notify, event).to_owned(),
        kind: notify.kind.clone(),
        when: When::After(notify.delay.0),
        expires_in: notify.expires_in.unwrap_or(EXPIRES_IN).0,
        waits: notify.send_than_online,
        url: notify.url.clone(),
        method,
        body,
        recheck: notify.recheck_url.clone().unwrap_or_default(),
        headers: notify.headers_from.clone().unwrap_or_default(),
        key: Some(key(event, effect)),
        trace: None,
    }
}

fn pushed(event: &Event, effect: &Effect, url: &str, text: Option<&RawValue>) -> NewNotification {
    NewNotification {
        bot: event.bot().clone(),
        // No user, so that no limit per user delays a push.
        uid: String::new(),
        kind: PUSHED.to_owned(),
        when: When::After(Duration::ZERO),
        expires_in: EXPIRES_IN.0,
        waits: false,
        url: url.to_owned(),
        method: "POST".to_owned(),
        body: text.map(|text| text.get().to_owned()).unwrap_or_default(),
        recheck: String::new(),
        headers: String::new(),
        key: Some(key(event, effect)),
        trace: None,
    }
}
