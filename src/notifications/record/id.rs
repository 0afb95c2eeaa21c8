//! The id of a notification.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};
use uuid::Uuid;

use crate::id::{Shard, ShardCount};
use crate::outbound::sign::MessageId;

/// The id of a notification: `<shard>.<32 hexadecimal digits>`, so it can be found without its bot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NotificationId {
    shard: Shard,
    unique: Uuid,
}

impl NotificationId {
    /// A new id for a bot in this shard.
    #[must_use]
    pub fn new(shard: Shard) -> Self {
        Self { shard, unique: Uuid::now_v7() }
    }

    /// The shard of its bot; `None` if there is no such shard.
    #[must_use]
    pub fn shard(self, shards: ShardCount) -> Option<Shard> {
        (self.shard.index() < usize::from(shards.get())).then_some(self.shard)
    }

    /// Its `webhook-id`: the id with `-` in place of the dot, the same on every attempt.
    ///
    /// # Panics
    /// Never: it consists of digits and `-`.
    #[must_use]
    pub fn message(self) -> MessageId {
        let text = format!("{}-{}", self.shard, self.unique.simple());
        MessageId::parse(&text).expect("it consists of digits and -")
    }
}

impl fmt::Display for NotificationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.shard, self.unique.simple())
    }
}

impl fmt::Debug for NotificationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for NotificationId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A text that is not the id of a notification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the id of a notification, which looks like 3.0192f1b0c1d27c3e8f00112233445566"
)]
pub struct NotificationIdError(String);

impl FromStr for NotificationId {
    type Err = NotificationIdError;

    fn from_str(text: &str) -> Result<Self, NotificationIdError> {
        let parse = || {
            let (shard, unique) = text.split_once('.')?;
            let unique = Uuid::try_parse(unique).ok()?;
            let id = Self { shard: Shard::from_digits(shard)?, unique };
            // Each notification has exactly one spelling of its id.
            (id.to_string() == text).then_some(id)
        };
        parse().ok_or_else(|| NotificationIdError(text.chars().take(100).collect()))
    }
}

impl<'de> Deserialize<'de> for NotificationId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
