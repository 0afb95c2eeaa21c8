//! Converts the changes of a slice to statements of `update` commands.
//!
//! The records of an ad are a list, and a document is the result of the records up to its `s`. A
//! statement brings the document from any earlier state to a later one, and does not change it if
//! it is already there. This makes repeated, overlapping and late slices harmless. Precondition:
//! the process that applies a slice knows that all earlier records were applied to all documents of
//! the ad.
//!
//! An addition has two forms. The fast form adds a sum if the document contains none of its
//! records. The long form is correct for any document, and contains every record.
//!
//! The first record of a month creates its document. A replacement clears the existing months. So
//! every month of an earlier record must exist before a replacement, even if it is cleared
//! immediately. Otherwise a late write would create it with replaced views.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use jiff::civil::Date;
use mongodb::bson::{RawArrayBuf, RawBson, RawDocumentBuf, cstr, rawdoc};

use super::{Added, Change, Effect};
use crate::counters::view::{AdId, Replacement};
use crate::id::{BotId, Sequence};

/// Number of days in a month's document: the longest month.
pub(super) const DAYS: usize = 31;
/// Separates the parts of a document's id. Ids cannot contain it.
const SEPARATOR: char = '\u{1f}';
/// The character after [`SEPARATOR`]: the end of the range of ids with a common prefix.
const AFTER_SEPARATOR: char = '\u{20}';
/// The MongoDB variable that leaves a field out.
const REMOVE: &str = "$$REMOVE";
/// The MongoDB variable of the server's clock.
const NOW: &str = "$$NOW";

/// A month, written `2026-11`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Month {
    year: i16,
    month: i8,
}

impl Month {
    pub(super) fn of(day: Date) -> Self {
        Self { year: day.year(), month: day.month() }
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.year, self.month)
    }
}

/// The index of a day in its month.
pub(super) fn slot(day: Date) -> usize {
    usize::try_from(day.day() - 1).expect("days are counted from 1")
}

/// The document id of an ad's total.
pub(super) fn total_id(bot: &BotId, ad: &AdId) -> String {
    format!("{bot}{SEPARATOR}{ad}")
}

/// The document id of an ad's month.
pub(super) fn month_id(bot: &BotId, ad: &AdId, month: Month) -> String {
    format!("{bot}{SEPARATOR}{ad}{SEPARATOR}{month}")
}

/// The bounds of all document ids of a bot, both exclusive.
pub(super) fn ids_of_bot(bot: &BotId) -> (String, String) {
    (format!("{bot}{SEPARATOR}"), format!("{bot}{AFTER_SEPARATOR}"))
}

/// The effect of one statement on the counters of one ad.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Statement {
    bot: BotId,
    ad: AdId,
    does: Does,
}

#[derive(Debug, Clone, PartialEq)]
enum Does {
    AddTotal(Vec<Added>),
    SetTotal {
        sequence: Sequence,
        total: u64,
        forget: bool,
    },
    AddDays {
        month: Month,
        records: Vec<Added>,
    },
    /// Follows a [`Self::WipeDays`] with the same sequence.
    SetDays {
        month: Month,
        sequence: Sequence,
        days: BTreeMap<usize, u64>,
    },
    /// Clears all months.
    WipeDays {
        sequence: Sequence,
        forget: bool,
    },
}

/// The statements of a slice for one collection.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Statements {
    /// Additions, at most one per document. They may run in any order, concurrently with those of
    /// other slices.
    pub(super) free: Vec<Statement>,
    /// The statements of ads with a replacement. They must run in this order.
    pub(super) ordered: Vec<Statement>,
}

/// The statements of a slice.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) totals: Statements,
    pub(super) daily: Statements,
}

impl Plan {
    /// The statements for the changes of a slice of this bot.
    pub(super) fn new(bot: &BotId, changes: Vec<Change>) -> Self {
        let mut places: HashMap<AdId, usize> = HashMap::new();
        let mut ads: Vec<(AdId, Vec<Effect>)> = Vec::new();
        for Change { ad, effect } in changes {
            let place = *places.entry(ad.clone()).or_insert(ads.len());
            if place == ads.len() {
                ads.push((ad, Vec::new()));
            }
            let effects = &mut ads[place].1;
            match (effects.last_mut(), effect) {
                (Some(Effect::Add(before)), Effect::Add(more)) => before.extend(more),
                (_, Effect::Add(none)) if none.is_empty() => {}
                (_, effect) => effects.push(effect),
            }
        }
        let mut plan = Self::default();
        for (ad, effects) in ads {
            let ordered = effects.iter().any(|effect| matches!(effect, Effect::Replace(..)));
            for effect in effects {
                let (totals, daily) = match effect {
                    Effect::Add(records) => additions(records),
                    Effect::Replace(sequence, with) => replacements(sequence, &with),
                };
                let statement = |does| Statement { bot: bot.clone(), ad: ad.clone(), does };
                let lists = [(&mut plan.totals, totals), (&mut plan.daily, daily)];
                for (Statements { free, ordered: in_order }, does) in lists {
                    let list = if ordered { in_order } else { free };
                    list.extend(does.into_iter().map(statement));
                }
            }
        }
        plan
    }
}

/// The statements for the total, and those for the days.
fn additions(records: Vec<Added>) -> (Vec<Does>, Vec<Does>) {
    let mut months: BTreeMap<Month, Vec<_>> = BTreeMap::new();
    for record in &records {
        months.entry(Month::of(record.day)).or_default().push(*record);
    }
    let months = months.into_iter().map(|(month, records)| Does::AddDays { month, records });
    (vec![Does::AddTotal(records)], months.collect())
}

/// The statements for the total, and those for the days.
fn replacements(sequence: Sequence, with: &Replacement) -> (Vec<Does>, Vec<Does>) {
    let &Replacement { total, forget, .. } = with;
    let mut months: BTreeMap<Month, BTreeMap<_, _>> = BTreeMap::new();
    for (&day, &n) in with.days.iter().filter(|(_, n)| **n > 0) {
        months.entry(Month::of(day)).or_default().insert(slot(day), n);
    }
    let mut daily = vec![Does::WipeDays { sequence, forget }];
    let set = |(month, days)| Does::SetDays { month, sequence, days };
    daily.extend(months.into_iter().map(set));
    (vec![Does::SetTotal { sequence, total, forget }], daily)
}

impl Statement {
    /// Whether it must run after the statements before it.
    pub(super) fn is_replacement(&self) -> bool {
        !matches!(self.does, Does::AddTotal(_) | Does::AddDays { .. })
    }

    /// Its fast form. A replacement has only one form.
    pub(super) fn fast(&self) -> RawDocumentBuf {
        match &self.does {
            Does::AddTotal(records) => {
                let sum = int(records.iter().map(|record| record.n).sum());
                self.add_total(first(records), last(records), sum.into())
            }
            Does::AddDays { month, records } => {
                let mut sums = BTreeMap::new();
                for record in records {
                    *sums.entry(slot(record.day)).or_default() += record.n;
                }
                let sums = sums.into_iter().map(|(slot, sum)| (slot, int(sum).into()));
                self.add_days(*month, first(records), last(records), sums)
            }
            Does::SetTotal { sequence, total, forget } => {
                let gone = if *forget { NOW } else { REMOVE };
                self.put_total(*sequence, *sequence, int(*total).into(), gone)
            }
            Does::SetDays { month, sequence, days } => {
                let days = (0..DAYS).map(|slot| int(days.get(&slot).copied().unwrap_or(0)));
                let days = RawBson::Array(days.collect());
                // Also overwrites the zeros of the clearing, and its own earlier result.
                self.put_days(*month, Sequence::new(sequence.get() + 1), *sequence, days)
            }
            Does::WipeDays { sequence, forget } => self.wipe_days(*sequence, *forget),
        }
    }

    /// Its long form, which is correct for any document; `None`: the fast form is correct for any
    /// document.
    pub(super) fn long(&self) -> Option<RawDocumentBuf> {
        match &self.does {
            Does::AddTotal(records) if records.len() > 1 => {
                let (last, sum) = (last(records), unseen(records));
                Some(self.add_total(last, last, sum))
            }
            Does::AddDays { month, records } if records.len() > 1 => {
                let mut days: BTreeMap<_, Vec<_>> = BTreeMap::new();
                for record in records {
                    days.entry(slot(record.day)).or_default().push(record);
                }
                let sums = days.into_iter().map(|(slot, records)| (slot, unseen(records)));
                let last = last(records);
                Some(self.add_days(*month, last, last, sums))
            }
            _ => None,
        }
    }

    fn add_total(&self, below: Sequence, last: Sequence, sum: RawBson) -> RawDocumentBuf {
        let total = rawdoc! { "$add": [{ "$ifNull": ["$total", 0_i64] }, sum] };
        self.put_total(below, last, total.into(), REMOVE)
    }

    fn put_total(
        &self,
        below: Sequence,
        last: Sequence,
        total: RawBson,
        gone: &str,
    ) -> RawDocumentBuf {
        let mut set = self.set(below, last, gone);
        set.append(cstr!("total"), when_below(below, total, "$total"));
        rawdoc! {
            "q": { "_id": total_id(&self.bot, &self.ad) },
            "u": [{ "$set": set }],
            "upsert": true,
        }
    }

    fn add_days(
        &self,
        month: Month,
        below: Sequence,
        last: Sequence,
        sums: impl Iterator<Item = (usize, RawBson)>,
    ) -> RawDocumentBuf {
        let mut parts = RawArrayBuf::new();
        let mut next = 0;
        let untouched = |parts: &mut RawArrayBuf, next: usize, to: usize| {
            if next < to {
                parts.push(rawdoc! { "$slice": ["$days", place(next), place(to - next)] });
            }
        };
        for (slot, sum) in sums {
            untouched(&mut parts, next, slot);
            let day = rawdoc! { "$arrayElemAt": ["$days", place(slot)] };
            let mut part = RawArrayBuf::new();
            part.push(rawdoc! { "$add": [day, sum] });
            parts.push(part);
            next = slot + 1;
        }
        untouched(&mut parts, next, DAYS);
        self.put_days(month, below, last, rawdoc! { "$concatArrays": parts }.into())
    }

    fn put_days(
        &self,
        month: Month,
        below: Sequence,
        last: Sequence,
        days: RawBson,
    ) -> RawDocumentBuf {
        let mut set = self.set(below, last, REMOVE);
        set.append(cstr!("month"), rawdoc! { "$literal": month.to_string() });
        set.append(cstr!("days"), when_below(below, days, "$days"));
        let zeros = rawdoc! {
            "$map": { "input": { "$range": [0, place(DAYS)] }, "in": 0_i64 }
        };
        rawdoc! {
            "q": { "_id": month_id(&self.bot, &self.ad, month) },
            "u": [
                { "$set": { "days": { "$ifNull": ["$days", zeros] } } },
                { "$set": set },
            ],
            "upsert": true,
        }
    }

    fn wipe_days(&self, sequence: Sequence, forget: bool) -> RawDocumentBuf {
        let total = total_id(&self.bot, &self.ad);
        let zeros: RawArrayBuf = [0_i64; DAYS].into_iter().collect();
        let mut update = rawdoc! { "$set": { "days": zeros, "s": int(sequence.get()) } };
        if forget {
            update.append(cstr!("$currentDate"), rawdoc! { "gone": true });
        } else {
            update.append(cstr!("$unset"), rawdoc! { "gone": "" });
        }
        rawdoc! {
            "q": {
                "_id": {
                    "$gt": format!("{total}{SEPARATOR}"),
                    "$lt": format!("{total}{AFTER_SEPARATOR}"),
                },
                "s": { "$lt": int(sequence.get()) },
            },
            "u": update,
            "multi": true,
        }
    }

    /// The fields of every document.
    fn set(&self, below: Sequence, last: Sequence, gone: &str) -> RawDocumentBuf {
        rawdoc! {
            "bot": { "$literal": self.bot.as_str() },
            "ad": { "$literal": self.ad.as_str() },
            "s": when_below(below, int(last.get()).into(), "$s"),
            "gone": when_below(below, gone.into(), "$gone"),
        }
    }
}

/// An expression: `then` if the document contains no record from `below` on; otherwise the
/// unchanged field.
fn when_below(below: Sequence, then: RawBson, field: &str) -> RawBson {
    rawdoc! {
        "$cond": [{ "$lt": [seen(), int(below.get())] }, then, field]
    }
    .into()
}

/// An expression: the sum of the records that the document does not contain.
fn unseen<'a>(records: impl IntoIterator<Item = &'a Added>) -> RawBson {
    let records: RawArrayBuf = records
        .into_iter()
        .map(|record| RawArrayBuf::from_iter([int(record.sequence.get()), int(record.n)]))
        .collect();
    let sequence = rawdoc! { "$arrayElemAt": ["$$this", 0] };
    let n = rawdoc! { "$arrayElemAt": ["$$this", 1] };
    rawdoc! {
        "$sum": {
            "$map": {
                "input": { "$literal": records },
                "in": { "$cond": [{ "$gt": [sequence, seen()] }, n, 0_i64] },
            }
        }
    }
    .into()
}

/// An expression: the last record that the document contains.
fn seen() -> RawDocumentBuf {
    rawdoc! { "$ifNull": ["$s", 0_i64] }
}

fn first(records: &[Added]) -> Sequence {
    records.iter().map(|record| record.sequence).min().unwrap_or_default()
}

fn last(records: &[Added]) -> Sequence {
    records.iter().map(|record| record.sequence).max().unwrap_or_default()
}

/// Sequences and totals stay far below the maximum of the type.
fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn place(slot: usize) -> i32 {
    i32::try_from(slot).expect("a month has 31 days at most")
}

#[cfg(test)]
mod tests;
