//! Records that were fetched and are not decoded yet, in few allocations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rdkafka::Message as _;
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Headers as _};

use super::Partition;
use super::position::offset;
use super::settings::KafkaSettings;
use crate::bus::record::{Binding, Decoded, HEADERS_MAX, Place, RawRecord, decode};
use crate::bus::source::{Batch, Fetched};
use crate::bus::{BusError, Entry, EntryError, InvalidEntry};
use crate::id::Offset;

/// Maximum number of bytes kept of a record whose headers cannot be read.
const RAW_MAX_BYTES: usize = 64 * 1_024;

/// Consecutive records of one partition.
pub(super) struct RawBatch {
    /// The place of the log in the last `open`.
    pub(super) log: usize,
    partition: Partition,
    incarnation: u64,
    records: Vec<Record>,
    /// Keys, values and headers, one behind the other.
    bytes: Vec<u8>,
    /// The ends of names and values of headers in [`Self::bytes`].
    headers: Vec<(usize, usize)>,
    pub(super) end: Offset,
    /// The time of the newest record, ms since 1970; 0: not known.
    pub(super) newest_ms: u64,
    added_ms: u64,
}

/// Ends in [`RawBatch::bytes`]; each part begins where the one before ends.
struct Record {
    offset: i64,
    time_ms: u64,
    key: Option<usize>,
    value: Option<usize>,
    /// The end of its headers in [`RawBatch::headers`].
    headers: usize,
    /// Why it is no event, if its headers show that.
    wrong: Option<Wrong>,
}

/// What is wrong with the headers of a record.
#[derive(Debug, Clone, Copy)]
enum Wrong {
    /// There are so many.
    Count(usize),
    /// The name of this one, from 1, is not UTF-8.
    Name(usize),
}

impl Wrong {
    fn error(self) -> EntryError {
        match self {
            Self::Count(count) => EntryError::Headers { count, max: HEADERS_MAX },
            Self::Name(at) => {
                let (name, why) = (format!("header {at}"), "its name is not UTF-8".to_owned());
                EntryError::Header { name, why }
            }
        }
    }
}

impl RawBatch {
    pub(super) fn new(log: usize, partition: Partition, incarnation: u64) -> Self {
        Self {
            log,
            partition,
            incarnation,
            records: Vec::new(),
            bytes: Vec::new(),
            headers: Vec::new(),
            end: Offset::default(),
            newest_ms: 0,
            added_ms: 0,
        }
    }

    /// Adds a record; returns its size in bytes. Leaves out headers if there are too many: a megabyte can
    /// hold hundreds of thousands of them.
    pub(super) fn push(&mut self, message: &BorrowedMessage<'_>) -> usize {
        let start = self.bytes.len();
        let bytes = &mut self.bytes;
        let mut push = |part: &[u8]| {
            bytes.extend_from_slice(part);
            bytes.len()
        };
        let key = message.key().map(&mut push);
        let value = message.payload().map(&mut push);
        let (count, before) =
            (message.headers().map_or(0, BorrowedHeaders::count), self.headers.len());
        let mut wrong = (count > HEADERS_MAX).then_some(Wrong::Count(count));
        for at in 0..if wrong.is_none() { count } else { 0 } {
            // The binding panics if a name is not UTF-8, and a producer can write any bytes.
            let header = catch_unwind(AssertUnwindSafe(|| message.headers()?.try_get(at)));
            let Ok(header) = header else {
                wrong = Some(Wrong::Name(at + 1));
                break;
            };
            if let Some(header) = header {
                let name = push(header.key.as_bytes());
                self.headers.push((name, push(header.value.unwrap_or_default())));
            }
        }
        let headers = self.headers.len();
        let time = message.timestamp().to_millis().and_then(|ms| u64::try_from(ms).ok());
        let (offset, time_ms) = (message.offset(), time.unwrap_or(0));
        self.records.push(Record { offset, time_ms, key, value, headers, wrong });
        self.added_ms = time_ms;
        self.newest_ms = self.newest_ms.max(time_ms);
        self.bytes.len() - start + (headers - before) * size_of::<(usize, usize)>()
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
    pub(super) settings: Arc<KafkaSettings>,
}

impl Fetched for Raw {
    fn len(&self) -> usize {
        self.batches.iter().map(|batch| batch.records.len()).sum()
    }

    fn bytes(&self) -> usize {
        self.batches.iter().map(|batch| batch.bytes.len()).sum()
    }

    fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
        Ok(self.batches.iter().map(|batch| decoded(batch, &self.settings)).collect())
    }
}

fn decoded(raw: &RawBatch, settings: &KafkaSettings) -> Batch {
    let mut entries = Vec::with_capacity(raw.records.len());
    let (mut at, mut header_at, mut tombstones) = (0, 0, Vec::new());
    let mut headers: Vec<(&str, &[u8])> = Vec::new();
    let topic = &*raw.partition.topic;
    for record in &raw.records {
        let mut part = |end: usize| {
            let part = &raw.bytes[at..end];
            at = end;
            part
        };
        let key = record.key.map(&mut part);
        let value = record.value.map(&mut part);
        headers.clear();
        for (name, value) in &raw.headers[header_at..record.headers] {
            let name = part(*name);
            headers.push((std::str::from_utf8(name).unwrap_or_default(), part(*value)));
        }
        header_at = record.headers;
        let place = offset(raw.incarnation, record.offset + 1);
        let event = if let Some(wrong) = record.wrong {
            let value = value.unwrap_or_default();
            let raw = value[..value.len().min(RAW_MAX_BYTES)].to_vec();
            Err(InvalidEntry { error: wrong.error(), raw })
        } else {
            let partition = Some(raw.partition.number);
            let offset = u64::try_from(record.offset).unwrap_or(0);
            let (headers, time_ms) = (&*headers, record.time_ms);
            let from = Place { log: topic, partition, offset };
            let record = RawRecord { place: from, topic, key, headers, value, time_ms };
            match decode(&record, Binding::Kafka, &settings.mapping, &settings.reserved) {
                Decoded::Event(event) => Ok(event),
                Decoded::Invalid(invalid) => Err(invalid),
                Decoded::Tombstone => {
                    tombstones.push(place);
                    continue;
                }
            }
        };
        entries.push(Entry { offset: place, event });
    }
    let (skipped, added_ms) = (tombstones.len(), raw.added_ms);
    Batch { log: raw.log, entries, skipped, tombstones, end: raw.end, added_ms }
}
