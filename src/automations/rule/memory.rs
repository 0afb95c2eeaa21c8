//! The memory that a rule takes in a process that evaluates it.

use super::super::memory::of_json;
use super::{Action, Count, Emit, Notify, Push, Rule, SetField, Tag};
use crate::expression::Filter;

/// The sizes of a rule, of a type pattern, of each `*` in it, and of an action, in bytes: each without
/// the texts and values in it.
const RULE: usize = 512;
const PATTERN: usize = 128;
const STAR: usize = 64;
const ACTION: usize = 256;

impl Rule {
    /// Its approximate size in the memory of a process that evaluates it, in bytes. It is known before the
    /// filter is compiled.
    #[must_use]
    pub fn memory(&self) -> usize {
        let pattern = |text: &String| PATTERN + STAR * text.matches('*').count() + 2 * text.len();
        let on: usize = self.on.iter().map(pattern).sum();
        let filter = self.filter.as_deref().map_or(0, Filter::memory_of);
        let actions: usize = self.actions.iter().map(Action::memory).sum();
        RULE + self.name.len() + on + filter + actions
    }
}

impl Action {
    fn memory(&self) -> usize {
        let inner = match self {
            Self::SetTag(Tag { tag }) | Self::RemoveTag(Tag { tag }) => tag.len(),
            Self::SetField(SetField { field, value }) => field.len() + of_json(value),
            Self::Emit(Emit { kind, data, .. }) => kind.len() + data.as_ref().map_or(0, of_json),
            Self::Notify(notify) => {
                let Notify { url, kind, uid, method, body, recheck_url, headers_from, .. } = notify;
                let texts = [uid, method, recheck_url, headers_from].into_iter().flatten();
                let texts: usize = texts.chain([url, kind]).map(String::len).sum();
                texts + body.as_ref().map_or(0, of_json)
            }
            Self::Count(Count { ad, .. }) => ad.len(),
            Self::Push(Push { url }) => url.len(),
        };
        ACTION + inner
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{NAME_MAX_BYTES, RULES_MAX, RULES_MAX_MEMORY, RULES_MAX_STORED_MEMORY};
    use super::*;

    fn rule(filter: &str, action: &Value) -> Rule {
        let name = "n".repeat(NAME_MAX_BYTES);
        let rule =
            json!({ "name": name, "on": ["order.*"], "filter": filter, "actions": [action] });
        serde_json::from_value(rule).unwrap()
    }

    #[test]
    fn a_bot_has_room_for_a_thousand_usual_rules_and_not_for_a_thousand_huge_filters() {
        let body = json!({ "to": "x".repeat(300), "order": { "id": 1, "lines": [1, 2, 3] } });
        let notify = json!({ "notify": { "url": "https://example.com/x", "body": body } });
        let filter = "'vip' in subscriber.tags && has(subscriber.age) && subscriber.age > 30 && event.data.lines.exists(line, line.price > 10.0 && line.name.startsWith(\"a\"))";
        let usual = [filter; 3].join(" || ");
        let usual = format!("{usual} || event.data.city == 'Berlin' && event.data.n >= 10");
        assert!(usual.len() >= 500, "{} bytes", usual.len());
        assert!(RULES_MAX * rule(&usual, &notify).memory() <= RULES_MAX_MEMORY);
        let long = [&*usual; 2].join(" || ");
        assert!(RULES_MAX * rule(&long, &notify).memory() <= RULES_MAX_STORED_MEMORY);
        let tag = json!({ "set_tag": { "tag": "t" } });
        let huge = format!("event.data.n in [1{}]", ",1".repeat(2_000));
        assert!(RULES_MAX * rule(&huge, &tag).memory() > 4 * RULES_MAX_STORED_MEMORY);
    }

    #[test]
    fn the_memory_of_a_rule_covers_the_values_in_it() {
        let value =
            json!([vec![json!(null); 1_000], vec![json!({ "": 0 }); 100], "x".repeat(1_000)]);
        let least = 1_000 * size_of::<Value>() + 100 * 11 * size_of::<(String, Value)>() + 1_000;
        for action in [
            json!({ "set_field": { "field": "f", "value": value } }),
            json!({ "emit": { "type": "t", "data": value } }),
            json!({ "notify": { "url": "https://example.com/x", "body": value } }),
        ] {
            assert!(rule("true", &action).memory() > least, "{action:.100}");
        }
        let patterns = Rule {
            on: vec!["****".to_owned(); 50],
            ..rule("true", &json!({ "count": { "ad": "a" } }))
        };
        assert!(patterns.memory() > 50 * 6 * size_of::<String>());
    }
}
