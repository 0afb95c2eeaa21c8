//! The state of an event in words, for the command line and the pages.

use super::{EventState, Found, InPipeline};
use crate::problems::text::number;

/// Formats a time in ms for people.
type Spoken = fn(u64) -> String;

impl InPipeline {
    /// Where the event is, as a sentence without its end.
    pub(crate) fn words(&self, now_ms: u64, spoken: Spoken) -> String {
        let ago = || {
            let ms = self.time_ms.map(|at| now_ms.saturating_sub(at) / 1_000 * 1_000);
            ms.map_or_else(String::new, |ms| format!(" {} ago", spoken(ms)))
        };
        let rest = || {
            let ms = self.time_ms.map(|at| at.saturating_sub(now_ms) / 1_000 * 1_000);
            ms.map_or_else(String::new, |ms| format!(" in {}", spoken(ms)))
        };
        let place = match (self.place, self.depth) {
            (Some(place), Some(depth)) => {
                format!("at place {} of {}", number(place), number(depth.max(place)))
            }
            _ => "behind others with its ordering key".to_owned(),
        };
        let why = |reason: &Option<String>| {
            reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"))
        };
        match self.state {
            EventState::Disabled => "the pipeline is disabled or no longer configured".to_owned(),
            EventState::OtherType => "not copied: the pipeline does not take its type".to_owned(),
            EventState::FilteredOut => {
                "not copied: the filter of the pipeline excludes it".to_owned()
            }
            EventState::BeforeStart => {
                "not copied: it was published before the pipeline started".to_owned()
            }
            EventState::OnBus => "on the bus, not copied yet".to_owned(),
            EventState::Waiting => format!("waiting {place}"),
            EventState::Parked => {
                format!("waiting {place}; tried again{}{}", rest(), why(&self.reason))
            }
            EventState::Paused => {
                format!("waiting {place}; the bot or the pipeline is paused")
            }
            EventState::InFlight => format!("being handled, {place}"),
            EventState::Delayed => format!("delayed; due{}", rest()),
            EventState::Dead => format!("dead letter{}{}", ago(), why(&self.reason)),
            EventState::Expired => format!("expired{}{}", ago(), why(&self.reason)),
            EventState::Done => match self.attempts.first() {
                Some(last) if last.attempt > 1 => {
                    format!("done{}, at attempt {}", ago(), last.attempt)
                }
                _ => format!("done{}", ago()),
            },
            EventState::Left => {
                "copied, and no longer queued: done, dropped or purged; no attempt is kept"
                    .to_owned()
            }
            EventState::Unknown => {
                "not among the first 20,000 queued events of its bot; the others were not read"
                    .to_owned()
            }
        }
    }
}

impl Found {
    /// What was read, as a sentence without its end.
    pub(crate) fn searched_words(&self, now_ms: u64, spoken: Spoken) -> String {
        let searched = &self.searched;
        let entries = match searched.entries {
            1 => "1 entry".to_owned(),
            entries => format!("{} entries", number(entries)),
        };
        let back = searched.oldest_ms.map_or_else(String::new, |at| {
            let ms = now_ms.saturating_sub(at) / 1_000 * 1_000;
            format!(", back to {} ago", spoken(ms))
        });
        let cut = if searched.complete {
            ""
        } else {
            "; the search ended early, older entries were not read"
        };
        let missing = if searched.attempts_complete {
            ""
        } else {
            "; the time was too short to read all attempts and dead letters"
        };
        format!("{entries} of the bus{back}{cut}{missing}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::Searched;
    use crate::id::{BotId, PipelineName};

    #[test]
    fn each_state_is_said_in_words() {
        let spoken = |ms: u64| format!("{} s", ms / 1_000);
        let found = |state, change: fn(&mut InPipeline)| {
            let mut found = InPipeline {
                pipeline: PipelineName::parse("p").unwrap(),
                bot: BotId::parse("b").unwrap(),
                state,
                place: Some(12),
                depth: Some(40),
                time_ms: Some(70_000),
                reason: Some("no".to_owned()),
                letter: None,
                attempts: Vec::new(),
            };
            change(&mut found);
            found
        };
        for (found, words) in [
            (found(EventState::Waiting, |_| ()), "waiting at place 12 of 40"),
            (found(EventState::InFlight, |_| ()), "being handled, at place 12 of 40"),
            (
                found(EventState::Parked, |one| one.time_ms = Some(150_000)),
                "waiting at place 12 of 40; tried again in 50 s: no",
            ),
            (
                found(EventState::Parked, |one| one.place = None),
                "waiting behind others with its ordering key; tried again in 0 s: no",
            ),
            (found(EventState::Dead, |_| ()), "dead letter 30 s ago: no"),
            (found(EventState::Done, |_| ()), "done 30 s ago"),
            (found(EventState::Delayed, |one| one.time_ms = Some(101_000)), "delayed; due in 1 s"),
        ] {
            assert_eq!(found.words(100_000, spoken), words);
        }
    }

    #[test]
    fn a_search_that_was_cut_short_says_what_it_did_not_read() {
        let words = |complete, attempts_complete| {
            let (entries, oldest_ms) = (2, Some(70_000));
            let found = Found {
                id: "e".to_owned(),
                known: false,
                bot: None,
                bus: None,
                event: None,
                unreadable: None,
                pipelines: Vec::new(),
                searched: Searched { entries, complete, attempts_complete, oldest_ms },
            };
            found.searched_words(100_000, |ms| format!("{} s", ms / 1_000))
        };
        let read = "2 entries of the bus, back to 30 s ago";
        let older = "; the search ended early, older entries were not read";
        let kept = "; the time was too short to read all attempts and dead letters";
        assert_eq!(words(true, true), read);
        assert_eq!(words(false, true), format!("{read}{older}"));
        assert_eq!(words(true, false), format!("{read}{kept}"));
        assert_eq!(words(false, false), format!("{read}{older}{kept}"));
    }
}
