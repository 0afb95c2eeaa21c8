use mongodb::bson::{Document, doc};

use super::*;

fn ad(text: &str) -> AdId {
    AdId::parse(text).unwrap()
}

fn day(text: &str) -> Date {
    text.parse().unwrap()
}

fn added(sequence: u64, on: &str, n: u64) -> Added {
    Added { sequence: Sequence::new(sequence), day: day(on), n }
}

fn add(to: &str, records: &[Added]) -> Change {
    Change { ad: ad(to), effect: Effect::Add(records.to_vec()) }
}

fn replace(what: &str, sequence: u64, with: Replacement) -> Change {
    Change { ad: ad(what), effect: Effect::Replace(Sequence::new(sequence), with) }
}

fn plan(changes: Vec<Change>) -> Plan {
    Plan::new(&BotId::parse("bot").unwrap(), changes)
}

fn documents(statements: &[Statement]) -> Vec<Document> {
    statements.iter().map(|statement| Document::try_from(&statement.fast()).unwrap()).collect()
}

fn ids(statements: &[Statement]) -> Vec<String> {
    let id = |document: &Document| {
        document.get_document("q").unwrap().get("_id").unwrap().to_string().replace('"', "")
    };
    documents(statements).iter().map(id).collect()
}

#[test]
fn additions_are_merged_by_ad_and_by_month_and_may_come_in_any_order() {
    let changes = vec![
        add("a", &[added(1, "2026-10-31", 1), added(3, "2026-11-01", 2)]),
        add("b", &[added(2, "2026-11-01", 5)]),
        add("a", &[added(4, "2026-11-01", 1)]),
        add("c", &[]),
    ];
    let Plan { totals, daily } = plan(changes);
    assert!(totals.ordered.is_empty() && daily.ordered.is_empty());
    assert_eq!(ids(&totals.free), ["bot\u{1f}a", "bot\u{1f}b"]);
    assert_eq!(
        ids(&daily.free),
        ["bot\u{1f}a\u{1f}2026-10", "bot\u{1f}a\u{1f}2026-11", "bot\u{1f}b\u{1f}2026-11"]
    );
}

#[test]
fn only_the_ads_with_a_replacement_are_ordered_and_months_are_there_before_they_are_wiped() {
    let days = BTreeMap::from([(day("2026-09-30"), 4), (day("2026-12-01"), 0)]);
    let with = Replacement { total: 10, days, forget: false };
    let Plan { totals, daily } = plan(vec![
        add("a", &[added(1, "2026-10-31", 1)]),
        add("b", &[added(2, "2026-11-01", 5)]),
        replace("a", 3, with),
        add("a", &[added(4, "2026-11-30", 1)]),
    ]);
    assert_eq!(ids(&totals.free), ["bot\u{1f}b"]);
    assert_eq!(ids(&totals.ordered), ["bot\u{1f}a"; 3]);
    assert_eq!(ids(&daily.free), ["bot\u{1f}b\u{1f}2026-11"]);
    assert_eq!(
        ids(&daily.ordered),
        [
            "bot\u{1f}a\u{1f}2026-10",
            "{ $gt: bot\u{1f}a\u{1f}, $lt: bot\u{1f}a  }",
            "bot\u{1f}a\u{1f}2026-09",
            "bot\u{1f}a\u{1f}2026-11",
        ]
    );
    let replacing: Vec<_> = daily.ordered.iter().map(Statement::is_replacement).collect();
    assert_eq!(replacing, [false, true, true, false]);
}

#[test]
fn the_fast_form_adds_a_sum_to_a_document_that_has_seen_nothing_of_it() {
    let Plan { totals, daily } =
        plan(vec![add("a", &[added(7, "2026-11-01", 2), added(9, "2026-11-01", 3)])]);
    let fresh = |then: mongodb::bson::Bson, field: &str| {
        doc! { "$cond": [{ "$lt": [{ "$ifNull": ["$s", 0_i64] }, 7_i64] }, then, field] }
    };
    let total = doc! { "$add": [{ "$ifNull": ["$total", 0_i64] }, 5_i64] };
    let expected = doc! {
        "q": { "_id": "bot\u{1f}a" },
        "u": [{ "$set": {
            "bot": { "$literal": "bot" },
            "ad": { "$literal": "a" },
            "s": fresh(9_i64.into(), "$s"),
            "gone": fresh("$$REMOVE".into(), "$gone"),
            "total": fresh(total.into(), "$total"),
        } }],
        "upsert": true,
    };
    assert_eq!(documents(&totals.free), [expected]);

    let days = doc! { "$concatArrays": [
        [{ "$add": [{ "$arrayElemAt": ["$days", 0] }, 5_i64] }],
        { "$slice": ["$days", 1, 30] },
    ] };
    let daily = &documents(&daily.free)[0];
    let set = daily.get_array("u").unwrap()[1].as_document().unwrap();
    let set = set.get_document("$set").unwrap();
    assert_eq!(set.get_document("days").unwrap(), &fresh(days.into(), "$days"));
    assert_eq!(set.get_document("month").unwrap(), &doc! { "$literal": "2026-11" });
}

#[test]
fn the_long_form_carries_every_record_and_one_record_needs_none() {
    let Plan { totals, daily } = plan(vec![
        add("a", &[added(7, "2026-11-01", 2), added(9, "2026-11-30", 3)]),
        add("b", &[added(8, "2026-11-01", 2)]),
    ]);
    for list in [&totals.free, &daily.free] {
        assert!(list[0].long().is_some() && list[1].long().is_none());
    }
    let text = |statement: &Statement| {
        let long = Document::try_from(&statement.long().unwrap()).unwrap();
        long.to_string().replace(' ', "")
    };
    let total = text(&totals.free[0]);
    assert!(total.contains("[[7,2],[9,3]]"), "{total}");
    assert!(total.contains(r#""$lt":[{"$ifNull":["$s",0]},9]"#), "{total}");
    let days = text(&daily.free[0]);
    assert!(days.contains("[[7,2]]") && days.contains("[[9,3]]"), "{days}");
    assert!(days.contains(r#"{"$slice":["$days",1,28]}"#), "{days}");
}

#[test]
fn the_first_and_the_last_day_of_the_longest_month_have_their_places() {
    assert_eq!((slot(day("2026-01-01")), slot(day("2026-01-31"))), (0, DAYS - 1));
    assert_eq!(Month::of(day("0987-03-31")).to_string(), "0987-03");
}
