//! Records that were fetched and are not decoded yet, in few allocations.

use std::sync::Arc;

use rdkafka::Message as _;
use rdkafka::message::{BorrowedMessage, Headers as _};

use super::position::offset;
use crate::bus::BusError;
use crate::bus::source::{Batch, Fetched};
use crate::bus::{Entry, EntryError, InvalidEntry};
use crate::event::Event;
use crate::id::Offset;

/// Maximum number of bytes kept of an unreadable record.
const RAW_MAX: usize = 64 * 1_024;

/// Consecutive records of one partition.
pub(super) struct RawBatch {
    /// The place of the log in the last `open`.
    pub(super) log: usize,
    incarnation: u64,
    records: Vec<Record>,
    /// Keys, values and headers, one behind the other.
    bytes: Vec<u8>,
    /// Names of headers with the ends of names and values in [`Self::bytes`].
    headers: Vec<(usize, Option<usize>)>,
    pub(super) end: Offset,
    /// The time of the newest record, ms since 1970; 0: not known.
    pub(super) newest_ms: u64,
    added_ms: u64,
}

/// Ends in [`RawBatch::bytes`]; each part begins where the one before ends.
struct Record {
    offset: i64,
    key: Option<usize>,
    value: Option<usize>,
    /// The end of its headers in [`RawBatch::headers`].
    headers: usize,
}

impl RawBatch {
    pub(super) fn new(log: usize, incarnation: u64) -> Self {
        Self {
            log,
            incarnation,
            records: Vec::new(),
            bytes: Vec::new(),
            headers: Vec::new(),
            end: Offset::default(),
            newest_ms: 0,
            added_ms: 0,
        }
    }

    /// Adds a record; returns its size in bytes.
    pub(super) fn push(&mut self, message: &BorrowedMessage<'_>) -> usize {
        let start = self.bytes.len();
        let bytes = &mut self.bytes;
        let mut push = |part: &[u8]| {
            bytes.extend_from_slice(part);
            bytes.len()
        };
        let key = message.key().map(&mut push);
        let value = message.payload().map(&mut push);
        if let Some(headers) = message.headers() {
            for header in headers.iter() {
                let name = push(header.key.as_bytes());
                self.headers.push((name, header.value.map(&mut push)));
            }
        }
        let headers = self.headers.len();
        self.records.push(Record { offset: message.offset(), key, value, headers });
        let time = message.timestamp().to_millis().and_then(|ms| u64::try_from(ms).ok());
        self.added_ms = time.unwrap_or(0);
        self.newest_ms = self.newest_ms.max(self.added_ms);
        self.bytes.len() - start
    }

    /// Number of records without a key.
    pub(super) fn without_key(&self) -> usize {
        self.records.iter().filter(|record| record.key.is_none()).count()
    }

    /// Number of records without a value.
    pub(super) fn tombstones(&self) -> usize {
        self.records.iter().filter(|record| record.value.is_none()).count()
    }
}

/// The answer to one fetch.
pub(super) struct Raw {
    pub(super) batches: Vec<RawBatch>,
    pub(super) reserved: Arc<[&'static str]>,
}

impl Fetched for Raw {
    fn len(&self) -> usize {
        self.batches.iter().map(|batch| batch.records.len()).sum()
    }

    fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
        Ok(self.batches.iter().map(|batch| decoded(batch, &self.reserved)).collect())
    }
}

fn decoded(raw: &RawBatch, reserved: &[&str]) -> Batch {
    let mut entries = Vec::with_capacity(raw.records.len());
    let (mut at, mut headers_at) = (0, 0);
    for record in &raw.records {
        let mut part = |end: Option<usize>| {
            end.map(|end| {
                let part = &raw.bytes[at..end];
                at = end;
                part
            })
        };
        part(record.key);
        let value = part(record.value);
        for (name, value) in &raw.headers[headers_at..record.headers] {
            part(Some(*name));
            part(*value);
        }
        headers_at = record.headers;
        // A tombstone is no event.
        let Some(value) = value else { continue };
        let offset = offset(raw.incarnation, record.offset + 1);
        entries.push(Entry { offset, event: event(value, reserved) });
    }
    Batch { log: raw.log, entries, end: raw.end, added_ms: raw.added_ms }
}

fn event(value: &[u8], reserved: &[&str]) -> Result<Event, InvalidEntry> {
    match Event::from_json(value) {
        Ok(event) => {
            Ok(reserved.iter().fold(event, |event, name| event.with_extension(name, None)))
        }
        Err(error) => Err(InvalidEntry {
            error: EntryError::from(error),
            raw: value[..value.len().min(RAW_MAX)].to_vec(),
        }),
    }
}
