//! Which reads of the counters are large, and their turns.

use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::mongo::large::{LargeReads, Place};
use crate::mongo::turns::{Turn, Turns};

/// Number of documents up to which a read is small. A networked disk needs some milliseconds for each
/// one that is not in memory, so only these are a sign of a store that hangs if they take too long.
const SMALL: usize = 10;
/// Number of documents above which a process runs only few reads.
const MEDIUM: usize = 100;
/// Maximum number of medium reads of days of a bot at a time: each is a query of its own.
const MEDIUM_DAYS: usize = 8;

/// The size of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// It opens the breaker if it takes too long.
    Small,
    /// Of days, each bot has some at a time.
    Medium,
    /// Each tenant has one at a time, and a process has few.
    Large,
}

impl Size {
    pub(super) fn of(documents: usize) -> Self {
        if documents <= SMALL {
            Self::Small
        } else if documents <= MEDIUM {
            Self::Medium
        } else {
            Self::Large
        }
    }
}

/// The larger reads of a process. One request reads both kinds side by side, so each kind has turns
/// of its own. Medium reads of totals need none: they share at most four queries.
#[derive(Debug, Clone, Default)]
pub(super) struct Large {
    pub(super) totals: LargeReads,
    pub(super) days: SizedReads,
}

/// The turns of reads of days. A medium read does not wait for a large one.
#[derive(Debug, Clone)]
pub(super) struct SizedReads {
    medium: Turns,
    large: LargeReads,
}

impl Default for SizedReads {
    fn default() -> Self {
        Self { medium: Turns::of_each(MEDIUM_DAYS), large: LargeReads::default() }
    }
}

impl SizedReads {
    /// Waits until a read of this size may run. It may run until the result is dropped.
    ///
    /// # Errors
    /// [`MongoError::Crowded`].
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(super) async fn take(
        &self,
        bot: &BotId,
        size: Size,
    ) -> Result<(Option<Turn>, Option<Place>), MongoError> {
        Ok(match size {
            Size::Small => (None, None),
            Size::Medium => (Some(self.medium.of_request(bot).await?), None),
            Size::Large => (None, Some(self.large.take(bot).await?)),
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_read_of_more_than_ten_documents_is_no_sign_of_a_store_that_hangs() {
        let sizes = [0, 1, 10, 11, 100, 101].map(Size::of);
        let (small, medium) = (Size::Small, Size::Medium);
        assert_eq!(sizes, [small, small, small, medium, medium, Size::Large]);
    }
    #[test]
    fn a_bot_has_eight_medium_reads_of_days_at_a_time_beside_a_large_one() {
        let days = SizedReads::default();
        let [busy, quiet] = ["busy", "quiet"].map(|name| BotId::parse(name).unwrap());
        let take = |bot, size| days.take(bot, size).now_or_never();
        let large = take(&busy, Size::Large).expect("the first one");
        assert!(take(&busy, Size::Large).is_none());
        let mut medium: Vec<_> = (0..MEDIUM_DAYS).map(|_| take(&busy, Size::Medium)).collect();
        assert!(medium.iter().all(Option::is_some));
        assert!(take(&busy, Size::Medium).is_none());
        assert!(take(&busy, Size::Small).is_some() && take(&quiet, Size::Medium).is_some());
        drop((large, medium.pop()));
        assert!(take(&busy, Size::Medium).is_some() && take(&busy, Size::Large).is_some());
    }
}
