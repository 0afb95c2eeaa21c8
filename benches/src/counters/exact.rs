//! Checks that the totals over HTTP, the stored totals and the sums of days all equal the
//! acknowledged views.

use std::io;
use std::net::SocketAddr;

use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::answer::{unexpected, whole};
use super::plan::{Ads, ad_name, bot_name};
use crate::error::BenchError;

/// Number of ads per query.
const ASKED_MAX: usize = 1_000;

/// The expected figures of each ad.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger(Vec<Bounds>);

/// The bounds of the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Bounds {
    least: u64,
    most: u64,
}

impl Ledger {
    pub(super) fn new(ads: usize) -> Self {
        Self(vec![Bounds::default(); ads])
    }

    /// Notes an acknowledged view.
    pub(super) fn acknowledge(&mut self, ad: usize) {
        self.put(ad, 1);
    }

    /// Notes a view that may have been counted.
    pub(super) fn doubt(&mut self, ad: usize) {
        self.at(ad).most += 1;
    }

    /// Notes this many existing views.
    pub(super) fn put(&mut self, ad: usize, views: u64) {
        let bounds = self.at(ad);
        bounds.least += views;
        bounds.most += views;
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (ad, bounds) in other.0.iter().enumerate() {
            let own = self.at(ad);
            own.least += bounds.least;
            own.most += bounds.most;
        }
    }

    /// The bounds of an ad's views.
    #[cfg(test)]
    pub(super) fn of(&self, ad: usize) -> (u64, u64) {
        let Bounds { least, most } = self.0[ad];
        (least, most)
    }

    pub(super) fn ads(&self) -> usize {
        self.0.len()
    }

    fn at(&mut self, ad: usize) -> &mut Bounds {
        if ad >= self.0.len() {
            self.0.resize(ad + 1, Bounds::default());
        }
        &mut self.0[ad]
    }
}

/// The figures of an ad.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The total over HTTP; `None`: unknown.
    pub(super) told: Option<u64>,
    /// The total in MongoDB.
    pub(super) total: u64,
    /// The sum of its days.
    pub(super) days: u64,
}

/// The result of the comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Number of ads with a wrong figure.
    pub(super) differ: u64,
    /// The first of them.
    pub(super) first: Option<String>,
}

/// Compares the expected and the found figures of each ad.
pub(super) fn judge(ledger: &Ledger, found: &[Found]) -> Verdict {
    let none = Found { told: Some(0), ..Found::default() };
    let mut verdict = Verdict { differ: 0, first: None };
    for ad in 0..ledger.ads().max(found.len()) {
        let Bounds { least, most } = ledger.0.get(ad).copied().unwrap_or_default();
        let Found { told, total, days } = found.get(ad).copied().unwrap_or(none);
        if told == Some(total) && days == total && (least..=most).contains(&total) {
            continue;
        }
        verdict.differ += 1;
        verdict.first.get_or_insert_with(|| {
            let told = told.map_or_else(|| "none".to_owned(), |told| told.to_string());
            let range = if least == most { String::new() } else { format!(" to {most}") };
            format!(
                "{}: {least}{range} acknowledged, {told} told, {total} stored, {days} in its days",
                ad_name(ad)
            )
        });
    }
    verdict
}

/// Queries the service for the totals of all ads.
pub(super) async fn ask(
    address: SocketAddr,
    ads: Ads,
    found: &mut [Found],
) -> Result<(), BenchError> {
    let failed = BenchError::Http;
    let mut stream = TcpStream::connect(address).await.map_err(failed)?;
    for bot in 0..ads.bots {
        let of_bot: Vec<usize> = (bot..found.len()).step_by(ads.bots).collect();
        for asked in of_bot.chunks(ASKED_MAX) {
            let names: Vec<String> = asked.iter().map(|ad| ad_name(*ad)).collect();
            let body = serde_json::json!({ "ids": names }).to_string();
            let (bot, length) = (bot_name(bot), body.len());
            let request = format!(
                "POST /v1/bots/{bot}/counters/query HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            let totals = exchange(&mut stream, &request).await.map_err(BenchError::Http)?;
            for (ad, name) in asked.iter().zip(&names) {
                found[*ad].told = totals.totals.get(name).copied().flatten();
            }
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct Totals {
    totals: std::collections::HashMap<String, Option<u64>>,
}

async fn exchange(stream: &mut TcpStream, request: &str) -> io::Result<Totals> {
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let length = loop {
        if let Some(length) = whole(&answer)? {
            break length;
        }
        if stream.read_buf(&mut answer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let body = answer[..length].windows(4).position(|window| window == b"\r\n\r\n");
    let body = &answer[body.map_or(0, |end| end + 4)..length];
    if !answer.starts_with(b"HTTP/1.1 200 ") {
        return Err(unexpected("asked for totals, it answered", &answer));
    }
    serde_json::from_slice(body).map_err(|_| unexpected("no totals", &answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_must_be_what_was_acknowledged_and_the_sum_of_the_days() {
        let mut ledger = Ledger::new(1);
        ledger.put(0, 7);
        ledger.acknowledge(0);
        ledger.acknowledge(2);
        let found = |total| Found { told: Some(total), total, days: total };
        let judged = |all: &[Found]| judge(&ledger, all).first;
        assert_eq!(judged(&[found(8), found(0), found(1)]), None);
        let wrong = |all: &[Found], text: &str| assert_eq!(judged(all).unwrap(), text);
        wrong(&[found(8)], "ad-2: 1 acknowledged, 0 told, 0 stored, 0 in its days");
        wrong(
            &[Found { days: 7, ..found(8) }, found(0), found(1)],
            "ad-0: 8 acknowledged, 8 told, 8 stored, 7 in its days",
        );
        wrong(
            &[found(8), found(0), Found { told: None, ..found(1) }],
            "ad-2: 1 acknowledged, none told, 1 stored, 1 in its days",
        );
        wrong(
            &[found(8), found(0), found(1), found(4)],
            "ad-3: 0 acknowledged, 4 told, 4 stored, 4 in its days",
        );
        assert_eq!(judge(&ledger, &[found(9), found(1), found(1)]).differ, 2);
    }

    #[test]
    fn views_that_may_have_been_counted_may_be_there_or_not() {
        let mut ledger = Ledger::default();
        ledger.acknowledge(0);
        ledger.doubt(0);
        let mut sum = Ledger::default();
        sum.add(&ledger);
        sum.add(&ledger);
        assert_eq!(sum.of(0), (2, 4));
        for (total, differ) in [(1, 1), (2, 0), (4, 0), (5, 1)] {
            let found = Found { told: Some(total), total, days: total };
            assert_eq!(judge(&sum, &[found]).differ, differ, "{total}");
        }
    }
}
