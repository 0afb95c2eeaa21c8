//! The sizes of the facts, by which filters are charged.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::FilterError;
use super::evaluate::json;
use crate::event::Event;

/// The cost of a step grows by the cost of one step for each such number of bytes of an event.
pub(super) const BYTES_OF_A_STEP: u64 = 64;
/// A value has a size of its own if so many names lead to it from the event or the subscriber, as to
/// `event.data.price`.
const NAMES_MAX: usize = 2;

/// The sizes of an event and of its subscriber, as filters see them.
#[derive(Debug, Default)]
pub struct Sizes {
    event: Measured,
    subscriber: Measured,
}

/// The size of a value, and those of the values in a map.
#[derive(Debug, Default, Clone)]
struct Measured {
    size: Size,
    /// The values by their names, without those whose copies cost nothing. `None`: they are not measured.
    values: Option<BTreeMap<String, Measured>>,
}

/// The approximate size of a value in JSON.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Size {
    pub(super) bytes: u64,
    /// Number of entries of all lists and maps, and of these maps.
    entries: u64,
    /// Number of entries in the longest list or map.
    pub(super) longest: u64,
}

impl Sizes {
    /// The sizes of an event and of its subscriber.
    ///
    /// # Errors
    /// If the event's data is nested deeper than the JSON parser allows.
    pub fn of(event: &Event, subscriber: &Json) -> Result<Self, FilterError> {
        let mut sizes = Self::of_event(&json(event)?);
        sizes.set_subscriber(subscriber);
        Ok(sizes)
    }

    /// No event and no subscriber of so many bytes of JSON has larger ones.
    #[must_use]
    pub fn at_most(bytes: usize) -> Self {
        let bytes = bytes as u64;
        let size = Size { bytes, entries: bytes, longest: bytes / 2 };
        let measured = Measured { size, values: None };
        Self { event: measured.clone(), subscriber: measured }
    }

    pub(super) fn of_event(event: &Json) -> Self {
        Self { event: Measured::of(event, NAMES_MAX), ..Self::default() }
    }

    pub(super) fn set_subscriber(&mut self, subscriber: &Json) {
        self.subscriber = Measured::of(subscriber, NAMES_MAX);
    }

    /// The cost of a copy of the subscriber, in steps.
    #[must_use]
    pub fn subscriber(&self) -> u64 {
        self.subscriber.size.volume()
    }

    /// Of both together.
    pub(super) fn all(&self) -> Size {
        self.event.size.and(self.subscriber.size)
    }

    /// The maximum cost of a copy of the value with these names, in steps.
    pub(super) fn volume_of(&self, names: &[String]) -> u64 {
        let Some((root, names)) = names.split_first() else { return 0 };
        let root = if root == "event" { &self.event } else { &self.subscriber };
        root.volume_of(names).max(1)
    }
}

impl Measured {
    /// Measures also the values to which up to so many names lead.
    fn of(value: &Json, names: usize) -> Self {
        let (Json::Object(map), Some(names)) = (value, names.checked_sub(1)) else {
            return Self { size: Size::of(value), values: None };
        };
        let (mut size, mut values) = (Size::of_table(map.len()), BTreeMap::new());
        for (name, value) in map {
            let value = Self::of(value, names);
            size = size.and_entry(name, value.size);
            if value.size.volume() > 0 {
                values.insert(name.clone(), value);
            }
        }
        Self { size, values: Some(values) }
    }

    fn volume_of(&self, names: &[String]) -> u64 {
        match (&self.values, names) {
            (Some(values), [name, names @ ..]) => {
                values.get(name).map_or(0, |value| value.volume_of(names))
            }
            _ => self.size.volume(),
        }
    }
}

impl Size {
    fn of(value: &Json) -> Self {
        match value {
            Json::String(text) => Self { bytes: text.len() as u64, ..Self::default() },
            Json::Array(list) => {
                let count = list.len() as u64;
                let all = Self { bytes: count, entries: count, longest: count };
                list.iter().fold(all, |all, value| all.and(Self::of(value)))
            }
            Json::Object(map) => {
                map.iter().fold(Self::of_table(map.len()), |all, (name, value)| {
                    all.and_entry(name, Self::of(value))
                })
            }
            Json::Null | Json::Bool(_) | Json::Number(_) => Self { bytes: 1, ..Self::default() },
        }
    }

    /// Of a map with so many entries, without the entries: its table takes memory too.
    fn of_table(count: usize) -> Self {
        let count = count as u64;
        Self { bytes: count, entries: count + 1, longest: count }
    }

    /// With an entry of a map.
    fn and_entry(self, name: &str, value: Self) -> Self {
        self.and(Self { bytes: value.bytes + name.len() as u64, ..value })
    }

    /// Of both together.
    fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            entries: self.entries + other.entries,
            longest: self.longest.max(other.longest),
        }
    }

    /// The cost of a copy, in steps. An entry takes up to about 100 bytes of memory, however short
    /// its JSON is.
    fn volume(self) -> u64 {
        self.entries + self.bytes / BYTES_OF_A_STEP
    }
}
