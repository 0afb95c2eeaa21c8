//! Reads rules from their documents.

use mongodb::bson::{RawDocument, RawDocumentBuf};
use tracing::warn;

use super::{AUTOMATIONS, Stored, Subscribing};
use crate::automations::rule::Rule;
use crate::id::{BotId, RuleId};
use crate::telemetry::OncePerMinute;

/// A rule; `None` for a document that is not a valid rule.
pub(super) fn stored(document: &RawDocumentBuf) -> Option<Stored> {
    let read = || {
        let rule = Rule {
            name: document.get_str("name").ok()?.to_owned(),
            on: texts(document)?,
            filter: document.get_str("filter").ok().map(str::to_owned),
            actions: serde_json::from_str(document.get_str("actions").ok()?).ok()?,
            enabled: document.get_bool("enabled").ok()?,
        };
        let id = RuleId::parse(document.get_str("id").ok()?).ok()?;
        Some(Stored { id, rule, version: document.get_str("v").ok()?.to_owned() })
    };
    read().or_else(|| misread(document))
}

/// Skips a document that is not a rule, so that the other rules still work.
fn misread<T>(document: &RawDocumentBuf) -> Option<T> {
    static MISREAD: OncePerMinute = OncePerMinute::new();
    if let Some(suppressed) = MISREAD.take() {
        let id = document.get_str("_id").unwrap_or("?");
        warn!(
            id,
            suppressed, "skipped a document of the collection {AUTOMATIONS} that is not a rule"
        );
    }
    None
}

/// The fan-out's part of a rule. An unreadable rule may concern every event of its bot.
pub(super) fn subscribing(document: &RawDocumentBuf) -> Option<Subscribing> {
    let bot = document.get_str("bot").ok().and_then(|bot| BotId::parse(bot).ok());
    let Some(bot) = bot else { return misread(document) };
    let read = texts(document).zip(document.get_bool("enabled").ok());
    let (on, enabled) = read.unwrap_or_else(|| (vec!["*".to_owned()], true));
    Some(Subscribing { bot, on, enabled })
}

fn texts(document: &RawDocument) -> Option<Vec<String>> {
    let list = document.get_array("on").ok()?;
    list.into_iter().map(|text| Some(text.ok()?.as_str()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use mongodb::bson::{DateTime, doc};
    use serde_json::json;

    use super::*;

    /// A document as the first version wrote it. Every later version must read it.
    #[test]
    fn a_stored_rule_is_still_read_and_one_that_cannot_be_read_concerns_everything() {
        let actions = r#"[{"set_tag":{"tag":"vip"}},{"emit":{"type":"vip.made","delay":"10m"}}]"#;
        let sample = doc! {
            "_id": "b\u{1f}welcome", "bot": "b", "id": "welcome", "name": "Welcome",
            "on": ["tag.applied", "order.*"], "enabled": true,
            "filter": "subscriber.age > 30", "v": "0198c0de", "actions": actions,
            "bytes": 180_i64, "changed": DateTime::from_millis(1_760_000_000_000),
        };
        let found = stored(&RawDocumentBuf::try_from(&sample).unwrap()).unwrap();
        assert_eq!((found.id.as_str(), &*found.version), ("welcome", "0198c0de"));
        let rule = json!({
            "name": "Welcome", "on": ["tag.applied", "order.*"], "enabled": true,
            "filter": "subscriber.age > 30",
            "actions": serde_json::from_str::<serde_json::Value>(actions).unwrap(),
        });
        assert_eq!(found.rule, serde_json::from_value(rule).unwrap());

        let mut spoilt = sample;
        spoilt.remove("on");
        let spoilt = RawDocumentBuf::try_from(&spoilt).unwrap();
        assert_eq!(stored(&spoilt), None);
        let everything = Subscribing {
            bot: BotId::parse("b").unwrap(),
            on: vec!["*".to_owned()],
            enabled: true,
        };
        assert_eq!(subscribing(&spoilt), Some(everything));
    }
}
