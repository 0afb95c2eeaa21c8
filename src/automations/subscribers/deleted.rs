//! Deleted profiles. The rest of one stays for a day, because it keeps the decisions on the last events.
//! Then MongoDB deletes it.

use std::time::Duration;

use mongodb::bson::doc;
use mongodb::options::IndexOptions;

use super::{Kept, SUBSCRIBERS, SubscriberStore};
use crate::automations::profile::{DELETED, REPLACED, changes_any};
use crate::event::Event;
use crate::mongo::client::MongoError;

/// How long the rest is kept: longer than any event is being handled.
const GONE_FOR: Duration = Duration::from_secs(24 * 3_600);

impl Kept {
    /// Notes whether the profile is deleted after an event that `changed` it or not. Returns whether the
    /// document changes, also if it had no profile before.
    pub(crate) fn note_deletion(&mut self, event: &Event, changed: bool) -> bool {
        let was_gone = self.gone;
        let deletes = matches!(event.kind(), DELETED | REPLACED)
            && changes_any(event)
            && event.subject().is_some();
        self.gone = self.profile.is_empty() && (deletes || was_gone && !changed);
        changed || self.gone && !was_gone && self.sequence.is_some()
    }
}

impl SubscriberStore {
    /// Creates the index by which MongoDB deletes the rests. May be repeated.
    pub(crate) async fn prepare(&self) -> Result<(), MongoError> {
        // An earlier version that writes a profile into the rest leaves `gone` there: such a document
        // stays.
        let rests = doc! { "gone": { "$exists": true }, "tags": [], "fields": {} };
        let options = IndexOptions::builder()
            .name("gone".to_owned())
            .expire_after(GONE_FOR)
            .partial_filter_expression(rests)
            .build();
        self.mongo.index(SUBSCRIBERS, doc! { "gone": 1 }, options).await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::automations::profile::APPLIED;
    use crate::id::{BotId, Sequence};

    fn event(kind: &str) -> Event {
        Event::builder(kind, &BotId::parse("b").unwrap()).subject("u").build().unwrap()
    }

    #[test]
    fn a_profile_is_gone_from_its_deletion_until_an_event_changes_it() {
        let mut kept = Kept { sequence: Some(Sequence::new(1)), ..Kept::default() };
        assert!(!kept.note_deletion(&event("order.paid"), false) && !kept.gone);
        // The document holds decisions only, and ends all the same.
        assert!(kept.note_deletion(&event(DELETED), false) && kept.gone);
        assert!(!kept.note_deletion(&event(DELETED), false) && kept.gone);
        assert!(!kept.note_deletion(&event("order.paid"), false) && kept.gone, "a decision");
        kept.profile.tags.insert("a".to_owned());
        assert!(kept.note_deletion(&event("tag.applied"), true) && !kept.gone);
        // Rules may add to the profile that an event deletes.
        assert!(kept.note_deletion(&event(DELETED), true) && !kept.gone);
        kept.profile.tags.clear();
        assert!(kept.note_deletion(&event("tag.removed"), true) && !kept.gone);
        assert!(kept.note_deletion(&event(REPLACED), true) && kept.gone);
    }

    #[test]
    fn nothing_is_written_for_a_subscriber_without_a_document() {
        let mut kept = Kept::default();
        assert!(!kept.note_deletion(&event(DELETED), false));
    }

    #[test]
    fn an_event_that_deletes_nothing_leaves_no_profile_gone() {
        let mut kept = Kept { sequence: Some(Sequence::new(1)), ..Kept::default() };
        let reported = event(DELETED).with_extension(APPLIED, Some(json!(true)));
        let nameless = Event::builder(DELETED, &BotId::parse("b").unwrap()).build().unwrap();
        for event in [reported, nameless] {
            assert!(!kept.note_deletion(&event, false) && !kept.gone);
        }
    }
}
