//! The document of a subscriber, to and from the form of MongoDB.

use mongodb::bson::raw::CStr;
use mongodb::bson::{
    DateTime, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr, rawdoc,
};
use serde_json::{Number, Value as Json};

use super::{Kept, Next};
use crate::automations::profile::Profile;
use crate::id::{BotId, Sequence};

/// Separates the parts of a document's id. Ids of bots cannot contain it.
const SEPARATOR: char = '\u{1f}';
/// The character that follows.
const PAST_SEPARATOR: char = '\u{20}';

/// One write of a document.
#[derive(Debug, Clone)]
pub(super) enum Write {
    /// The first state. The server refuses it if the document exists.
    Insert(RawDocumentBuf),
    /// The statement with the next state. It changes nothing if the document has another state by
    /// now.
    Update(RawDocumentBuf),
}

pub(super) fn id_of(bot: &BotId, subscriber: &str) -> String {
    format!("{bot}{SEPARATOR}{subscriber}")
}

/// The ids of all documents of a bot: from the first, and below the second.
pub(super) fn ids_of(bot: &BotId) -> (String, String) {
    (format!("{bot}{SEPARATOR}"), format!("{bot}{PAST_SEPARATOR}"))
}

impl Write {
    pub(super) fn new(bot: &BotId, next: &Next) -> Self {
        let id = id_of(bot, &next.subscriber);
        let Kept { profile, sequence, decided, gone } = &next.kept;
        let decided: RawArrayBuf = decided
            .iter()
            .map(|(sequence, text)| rawdoc! { "s": number(*sequence), "d": text.as_str() })
            .collect();
        let state = sequence.map_or(0, number);
        let Some(after) = next.after else {
            let mut document = rawdoc! {
                "_id": id, "bot": bot.as_str(), "id": next.subscriber.as_str(),
                "s": state, "decided": decided,
            };
            append(&mut document, profile);
            if *gone {
                document.append(cstr!("gone"), RawBson::DateTime(DateTime::now()));
            }
            return Self::Insert(document);
        };
        let mut set = rawdoc! { "s": state, "decided": decided };
        // An action that changes no profile writes neither tags nor fields.
        if next.changed {
            append(&mut set, profile);
        }
        // Values of these names are stored as they are, also if names in them begin with `$`.
        let mut update = rawdoc! { "$set": set };
        if *gone {
            update.append(cstr!("$currentDate"), rawdoc! { "gone": true });
        } else if next.changed {
            update.append(cstr!("$unset"), rawdoc! { "gone": "" });
        }
        Self::Update(rawdoc! { "q": { "_id": id, "s": number(after) }, "u": update })
    }

    pub(super) fn bytes(&self) -> usize {
        let (Self::Insert(document) | Self::Update(document)) = self;
        document.as_bytes().len()
    }
}

fn number(sequence: Sequence) -> i64 {
    i64::try_from(sequence.get()).unwrap_or(i64::MAX)
}

fn append(document: &mut RawDocumentBuf, profile: &Profile) {
    let tags: RawArrayBuf = profile.tags.iter().map(String::as_str).collect();
    document.append(cstr!("tags"), tags);
    document.append(cstr!("fields"), object(profile.fields.iter()));
}

fn object<'a>(members: impl Iterator<Item = (&'a String, &'a Json)>) -> RawDocumentBuf {
    let mut object = RawDocumentBuf::new();
    for (name, value) in members {
        // Profiles contain no names that documents must not.
        let name = <&CStr>::try_from(&**name).expect("names without NUL always encode");
        object.append(name, bson(value));
    }
    object
}

/// JSON in the form of MongoDB. Whole numbers beyond 64 bits become fractions.
fn bson(value: &Json) -> RawBson {
    match value {
        Json::Null => RawBson::Null,
        Json::Bool(value) => RawBson::Boolean(*value),
        Json::Number(number) => number
            .as_i64()
            .map_or_else(|| RawBson::Double(number.as_f64().unwrap_or_default()), RawBson::Int64),
        Json::String(text) => RawBson::String(text.clone()),
        Json::Array(list) => RawBson::Array(list.iter().map(bson).collect()),
        Json::Object(map) => RawBson::Document(object(map.iter())),
    }
}

/// Gives the numbers of a profile the form in which they are read back.
pub(crate) fn as_stored(profile: &mut Profile) {
    fn change(value: &mut Json) {
        match value {
            Json::Number(number) if !number.is_i64() && !number.is_f64() => {
                if let Some(stored) = number.as_f64().and_then(Number::from_f64) {
                    *number = stored;
                }
            }
            Json::Array(list) => list.iter_mut().for_each(change),
            Json::Object(map) => map.values_mut().for_each(change),
            _ => {}
        }
    }
    profile.fields.values_mut().for_each(change);
}

/// The state in a document; `None` if it is not one.
pub(super) fn kept(document: &RawDocument) -> Option<Kept> {
    let mut kept = without_decisions(document)?;
    for decided in document.get_array("decided").ok()? {
        let decided = decided.ok()?.as_document()?;
        let text = decided.get_str("d").ok()?.to_owned();
        kept.decided.push((sequence(decided)?, text));
    }
    Some(kept)
}

/// The same without the decisions. The document may lack them.
pub(super) fn without_decisions(document: &RawDocument) -> Option<Kept> {
    let mut kept = Kept::default();
    for tag in document.get_array("tags").ok()? {
        kept.profile.tags.insert(tag.ok()?.as_str()?.to_owned());
    }
    for field in document.get_document("fields").ok()? {
        let (name, value) = field.ok()?;
        kept.profile.fields.insert(name.as_str().to_owned(), json(value)?);
    }
    kept.sequence = Some(sequence(document)?);
    kept.gone = kept.profile.is_empty() && document.get("gone").ok()?.is_some();
    Some(kept)
}

/// For [`crate::fuzzing`]: the document of this state.
#[cfg(any(test, fuzzing))]
pub(crate) fn written(bot: &BotId, kept: &Kept) -> RawDocumentBuf {
    let subscriber = "ann".to_owned();
    let next = Next { subscriber, after: None, changed: true, kept: kept.clone() };
    let (Write::Insert(document) | Write::Update(document)) = Write::new(bot, &next);
    document
}

/// The sequence in a document.
pub(super) fn sequence(document: &RawDocument) -> Option<Sequence> {
    u64::try_from(document.get_i64("s").ok()?).ok().map(Sequence::new)
}

/// The stored value as JSON; also accepts values edited by hand.
fn json(value: RawBsonRef<'_>) -> Option<Json> {
    Some(match value {
        RawBsonRef::Null => Json::Null,
        RawBsonRef::Boolean(value) => Json::Bool(value),
        RawBsonRef::Int32(number) => Json::from(number),
        RawBsonRef::Int64(number) => Json::from(number),
        RawBsonRef::Double(number) => Json::from(number),
        RawBsonRef::String(text) => Json::String(text.to_owned()),
        RawBsonRef::DateTime(time) => Json::String(time.try_to_rfc3339_string().ok()?),
        RawBsonRef::ObjectId(id) => Json::String(id.to_hex()),
        RawBsonRef::Array(list) => {
            let list = list.into_iter().map(|value| json(value.ok()?));
            Json::Array(list.collect::<Option<_>>()?)
        }
        RawBsonRef::Document(map) => {
            let map = map.into_iter().map(|member| {
                let (name, value) = member.ok()?;
                Some((name.as_str().to_owned(), json(value)?))
            });
            Json::Object(map.collect::<Option<_>>()?)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use mongodb::bson::{Document, deserialize_from_slice, doc};
    use serde_json::json;

    use super::*;

    fn full() -> Kept {
        let fields = json!({
            "a.b": 1, "big": i64::MAX, "half": 0.5, "no": null, "yes": true,
            "$list": [1, "x", { "$set": { "a": 1 } }],
        });
        let mut kept = Kept { sequence: Some(Sequence::new(7)), ..Kept::default() };
        kept.profile.tags.extend(["x".to_owned(), "y".to_owned()]);
        kept.profile.fields = serde_json::from_value(fields).unwrap();
        kept.decided.push((Sequence::new(6), "{}".to_owned()));
        kept
    }

    fn written(after: Option<u64>, changed: bool) -> Write {
        let (after, subscriber) = (after.map(Sequence::new), "u".to_owned());
        let next = Next { subscriber, after, changed, kept: full() };
        Write::new(&BotId::parse("b").unwrap(), &next)
    }

    fn read(document: &RawDocument) -> Document {
        deserialize_from_slice(document.as_bytes()).unwrap()
    }

    #[test]
    fn a_profile_is_read_back_as_it_was_written() {
        let Write::Insert(document) = written(None, true) else { panic!("an insert") };
        assert_eq!(kept(&document).unwrap(), full());
        assert_eq!(document.get_str("_id").unwrap(), "b\u{1f}u");
        let Write::Update(statement) = written(Some(6), true) else { panic!("an update") };
        assert_eq!(
            read(&statement).get_document("q").unwrap(),
            &doc! { "_id": "b\u{1f}u", "s": 6_i64 }
        );
        let set = statement.get_document("u").unwrap().get_document("$set").unwrap();
        assert_eq!(kept(set).unwrap(), full());
    }

    #[test]
    fn a_document_without_its_decisions_still_has_its_profile() {
        let Write::Insert(document) = written(None, true) else { panic!("an insert") };
        let lacking = rawdoc! {
            "_id": "b\u{1f}u", "s": 7_i64, "tags": document.get_array("tags").unwrap().to_owned(),
            "fields": document.get_document("fields").unwrap().to_owned(),
        };
        let bare = Kept { decided: Vec::new(), ..full() };
        for document in [&document, &lacking] {
            assert_eq!(without_decisions(document).unwrap(), bare);
        }
        assert_eq!(kept(&lacking), None, "a slice needs them");
    }

    #[test]
    fn a_decision_that_leaves_the_profile_writes_no_profile() {
        let Write::Update(statement) = written(Some(6), false) else { panic!("an update") };
        let set = statement.get_document("u").unwrap().get_document("$set").unwrap();
        let set: Vec<String> = read(set).keys().cloned().collect();
        assert_eq!(set, ["s", "decided"]);
    }

    #[test]
    fn a_deleted_profile_is_dated_with_each_write_until_it_changes() {
        let gone = || Kept { gone: true, sequence: Some(Sequence::new(7)), ..Kept::default() };
        let write = |after: Option<u64>, changed, kept| {
            let (after, subscriber) = (after.map(Sequence::new), "u".to_owned());
            Write::new(&BotId::parse("b").unwrap(), &Next { subscriber, after, changed, kept })
        };
        let Write::Insert(document) = write(None, true, gone()) else { panic!("an insert") };
        assert_eq!(kept(&document).unwrap(), gone());
        let update = |changed, kept| match write(Some(6), changed, kept) {
            Write::Update(statement) => read(statement.get_document("u").unwrap()),
            Write::Insert(_) => panic!("an update"),
        };
        for changed in [true, false] {
            let update = update(changed, gone());
            assert_eq!(update.get_document("$currentDate").unwrap(), &doc! { "gone": true });
        }
        assert_eq!(update(true, full()).get_document("$unset").unwrap(), &doc! { "gone": "" });
        assert!(!update(false, full()).contains_key("$unset"));
        // An earlier version writes a profile and leaves the date.
        let Write::Insert(mut document) = write(None, true, full()) else { panic!("an insert") };
        document.append(cstr!("gone"), RawBson::DateTime(DateTime::now()));
        assert_eq!(kept(&document).unwrap(), full());
    }

    #[test]
    fn numbers_have_the_same_form_whether_they_are_read_back_or_not() {
        let mut kept = full();
        let fields = json!({ "u": [u64::MAX, { "n": u64::MAX }], "i": -1, "f": 1.5, "w": 2.0 });
        kept.profile.fields = serde_json::from_value(fields).unwrap();
        let next = Next { subscriber: "u".to_owned(), after: None, changed: true, kept };
        let Write::Insert(document) = Write::new(&BotId::parse("b").unwrap(), &next) else {
            panic!("an insert")
        };
        let mut here = next.kept.profile;
        as_stored(&mut here);
        assert_eq!(super::kept(&document).unwrap().profile, here);
    }

    /// A document as the first version wrote it. Every later version must read it.
    #[test]
    fn a_stored_profile_is_still_read() {
        let sample = rawdoc! {
            "_id": "b\u{1f}u", "bot": "b", "id": "u", "tags": ["x"],
            "fields": { "age": 31_i64, "gender": "f" }, "s": 7_i64,
            "decided": [{ "s": 6_i64, "d": "{}" }],
        };
        let found = kept(&sample).unwrap();
        assert_eq!(found.sequence, Some(Sequence::new(7)));
        assert_eq!(found.profile.tags.into_iter().collect::<Vec<_>>(), ["x"]);
        assert_eq!(json!(found.profile.fields), json!({ "age": 31, "gender": "f" }));
        assert_eq!(found.decided, [(Sequence::new(6), "{}".to_owned())]);
    }
}
