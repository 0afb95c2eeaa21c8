//! What is read back from Redis and `MongoDB`: another version, a broken disk or a person may have
//! written it.

use redis::Value;

use super::event::{comes_back_from_a_queue, json};
use crate::automations::decide::Decision;
use crate::automations::profile::{self, Profile};
use crate::automations::subscribers::Kept;
use crate::counters::scripts as counters;
use crate::counters::view;
use crate::event::{Event, Glimpse};
use crate::history;
use crate::id::{BotId, LetterId, Offset, Sequence};
use crate::notifications::record::NotificationId;
use crate::notifications::scripts as notifications;
use crate::presence::Process;
use crate::rate::BotLimits;
use crate::redis::aside::Aside;
use crate::redis::scripts::{self, Attempts, Call};
use crate::trace::TraceContext;
use crate::trail::Action;

/// A record, a reply or a document. The first byte names its kind: `e` the record of an event, `f` the
/// failures of a bot, `p` completed slices of a process, `r` the reply of a script, `d` a document of
/// `MongoDB`, `t` a text of a field.
///
/// # Panics
/// If it panics where it is read, or if what was read changes when it is written again.
pub fn stored(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind {
        b'e' => event_record(rest),
        b'f' => {
            for attempt in history::read_failures(rest) {
                assert!(attempt.end_ms() >= attempt.time_ms);
            }
        }
        b'p' => portion(rest),
        b'r' => {
            if let Ok(value) = redis::parse_redis_value(rest) {
                reply(&value);
            }
        }
        b'd' => document(rest),
        b't' => {
            if let Ok(text) = std::str::from_utf8(rest) {
                field(text);
            }
        }
        _ => {}
    }
}

fn bot() -> BotId {
    BotId::parse("shop").expect("an id")
}

fn event_record(record: &[u8]) {
    let (sequence, glimpse) = (Event::sequence_of(record), Glimpse::read(record));
    let Ok((read, event)) = Event::decode(record, &bot()) else { return };
    if let Some(sequence) = sequence {
        assert_eq!(sequence, read);
    }
    if let Some(glimpse) = glimpse {
        assert_eq!((&*glimpse.id, &*glimpse.kind), (event.id(), event.kind()));
        assert!(event.data().unwrap_or_default().starts_with(&glimpse.data.unwrap_or_default()));
    }
    comes_back_from_a_queue(&event);
    // What the pipelines look for in it.
    let _ = TraceContext::of_event(&event);
    let _ = view::read(&event);
    let mut of_subscriber = Profile::default();
    for change in profile::changes(&event).unwrap_or_default() {
        let _ = of_subscriber.apply(change);
    }
    if of_subscriber.check().is_ok() {
        // Sequences are microseconds, far below the largest whole number of MongoDB.
        let sequence = Some(Sequence::new(read.get() >> 1));
        keeps(&Kept { profile: of_subscriber, sequence, ..Kept::default() });
    }
    assert!(!json(&event).is_empty());
}

fn portion(portion: &[u8]) {
    let all = history::read_whole_portion(portion);
    assert!(all.len() <= history::bots_of_portion(portion).count());
    assert_eq!(history::settled_in(portion).count(), history::bots_of_portion(portion).count());
    for (bot, attempt) in &all {
        let of_bot = history::read_portion(portion, bot);
        assert!(of_bot.contains(attempt));
        let _ = history::bot_of(portion, &attempt.first_id);
    }
}

/// Reads a reply as that of each script.
fn reply(value: &Value) {
    fn read<C: Call>(value: &Value) {
        if let Err(error) = C::reply(value.clone()) {
            assert!(!error.to_string().is_empty());
        }
    }
    let _ = scripts::exceeded(value);
    for read in [
        read::<scripts::Act>,
        read::<scripts::Advance>,
        read::<scripts::Arrived>,
        read::<scripts::Audit>,
        read::<scripts::Beat>,
        read::<scripts::Budget>,
        read::<scripts::Claim>,
        read::<scripts::Complete>,
        read::<scripts::DropLetters>,
        read::<scripts::Emit>,
        read::<scripts::Enqueue>,
        read::<scripts::Heads>,
        read::<scripts::FindDue>,
        read::<scripts::Hold>,
        read::<scripts::Letters>,
        read::<scripts::Note>,
        read::<scripts::Pause>,
        read::<scripts::Peek>,
        read::<scripts::Permit>,
        read::<scripts::Present>,
        read::<scripts::Promote>,
        read::<scripts::Push>,
        read::<scripts::ReadSlice>,
        read::<scripts::Readers>,
        read::<scripts::Reconcile>,
        read::<scripts::Record>,
        read::<scripts::Recount>,
        read::<scripts::Replay>,
        read::<scripts::Resume>,
        read::<scripts::Set>,
        read::<scripts::Trim>,
        read::<counters::Import>,
        read::<counters::IncrementIfExists>,
        read::<counters::Replace>,
        read::<counters::Upsert>,
        read::<notifications::Amend>,
        read::<notifications::Begin>,
        read::<notifications::Finish>,
        read::<notifications::Forget>,
        read::<notifications::Release>,
        read::<notifications::Restore>,
        read::<notifications::Schedule>,
    ] {
        read(value);
    }
    if let Ok(portion) = scripts::Letters::reply(value.clone()) {
        portion.letters.into_iter().for_each(crate::queue::fuzzing::letter);
    }
    crate::bus::redis_stream::fuzz(value.clone());
}

fn document(bytes: &[u8]) {
    let Ok(document) = mongodb::bson::RawDocumentBuf::from_bytes(bytes.to_vec()) else { return };
    crate::automations::store::fuzz(&document);
    crate::counters::store::fuzz(&document);
    if let Some(kept) = crate::automations::subscribers::fuzz(&document) {
        keeps(&kept);
    }
}

/// The state of a subscriber is read as it was written.
fn keeps(kept: &Kept) {
    let names = kept.profile.fields.keys().chain(&kept.profile.tags);
    if names.into_iter().any(|name| name.contains('\0')) {
        return;
    }
    let mut expected = kept.clone();
    crate::automations::subscribers::as_stored(&mut expected.profile);
    let written = crate::automations::subscribers::written(&bot(), kept);
    assert_eq!(crate::automations::subscribers::fuzz(&written), Some(expected));
}

/// Reads a text as that of each kind of field.
fn field(text: &str) {
    if let Some(attempts) = Attempts::parse(text) {
        let _ = (attempts.counted(), attempts.are_noted(), attempts.vanished());
    }
    if let Some(aside) = Aside::parse(text) {
        assert_eq!(Aside::parse(&aside.to_string()), Some(aside));
    }
    if let Some(limits) = BotLimits::parse(text)
        && let Some(bucket) = limits.bucket()
    {
        let _ = bucket.take(5, 1_760_000_000_000_000, 0);
    }
    if let Ok(id) = text.parse::<LetterId>() {
        assert_eq!(id.to_string().parse::<LetterId>().ok(), Some(id));
    }
    if let Ok(offset) = text.parse::<Offset>() {
        assert_eq!(offset.to_string().parse::<Offset>().ok(), Some(offset));
    }
    if let Ok(id) = text.parse::<NotificationId>() {
        assert_eq!(id.to_string(), text);
        let _ = id.message();
    }
    if let Some(context) = TraceContext::from_text(text) {
        assert_eq!(TraceContext::from_text(&context.to_text()), Some(context));
    }
    if let Ok(decision) = serde_json::from_str::<Decision>(text) {
        let written = serde_json::to_string(&decision).expect("decisions are values of JSON");
        assert_eq!(serde_json::from_str::<Decision>(&written).ok(), Some(decision));
    }
    if let Ok(action) = serde_json::from_str::<Action>(text) {
        let written = serde_json::to_string(&action).expect("actions are values of JSON");
        assert_eq!(serde_json::from_str::<Action>(&written).ok(), Some(action));
    }
    let _ = serde_json::from_str::<Process>(text);
    let _ = serde_json::from_str::<crate::replay::Run>(text);
    crate::queue::fuzzing::note(text);
}
