//! The lanes of a bot that are set aside, as Redis stores them: `tag;tried;lane:due:attempts:alone,…`
//! behind the attempts of the bot. The scripts do not look inside.

use std::fmt;

use crate::id::Lane;

/// The lanes of a bot that are set aside after a failure. Only the holder of the lease changes them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aside {
    /// Names the ordering key for which these lanes are.
    pub tag: u32,
    /// The list whose first event is tried alone after a holder vanished: attempts count for it.
    pub tried: Option<Tried>,
    lanes: Vec<Waiting>,
}

/// A list of a bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tried {
    /// The queue.
    Queue,
    /// A lane that is set aside.
    Lane(Lane),
}

/// A lane that is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The lane.
    pub lane: Lane,
    /// When it is tried again, ms since 1970.
    pub due_ms: u64,
    /// Failed attempts at its first event.
    pub attempts: u32,
    /// Number of its next events until its slices are as large as usual.
    pub alone: u32,
}

impl Aside {
    /// Reads the text; empty: no lane.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::default());
        }
        let mut parts = text.splitn(3, ';');
        let mut next = || parts.next();
        let tag = u32::from_str_radix(next()?, 16).ok()?;
        let tried = match next()? {
            "" => None,
            "q" => Some(Tried::Queue),
            lane => Some(Tried::Lane(Lane::from_digits(lane)?)),
        };
        let lanes = next()?.split(',').map(Waiting::parse).collect::<Option<_>>()?;
        Some(Self { tag, tried, lanes })
    }

    /// No lane yet, for the ordering key with this tag.
    #[must_use]
    pub fn of(tag: u32) -> Self {
        Self { tag, ..Self::default() }
    }

    /// The same lanes, of which this list is tried.
    #[must_use]
    pub fn trying(&self, tried: Option<Tried>) -> Self {
        Self { tried, ..self.clone() }
    }

    /// Whether no lane is set aside.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// All lanes, in the order in which they are due.
    #[must_use]
    pub fn lanes(&self) -> &[Waiting] {
        &self.lanes
    }

    /// The state of a lane, if it is set aside.
    #[must_use]
    pub fn get(&self, lane: Lane) -> Option<Waiting> {
        self.lanes.iter().find(|waiting| waiting.lane == lane).copied()
    }

    /// Sets a lane aside, or changes its state.
    pub fn set(&mut self, waiting: Waiting) {
        self.remove(waiting.lane);
        let at = self.lanes.partition_point(|other| other.due_ms <= waiting.due_ms);
        self.lanes.insert(at, waiting);
    }

    /// The lane is not set aside any more.
    pub fn remove(&mut self, lane: Lane) {
        self.lanes.retain(|waiting| waiting.lane != lane);
    }

    /// The lane that is due first.
    #[must_use]
    pub fn first(&self) -> Option<Waiting> {
        self.lanes.first().copied()
    }

    /// How long until the first lane is due, ms.
    #[must_use]
    pub fn next_ms(&self, now_ms: u64) -> u64 {
        self.first().map_or(0, |waiting| waiting.due_ms.saturating_sub(now_ms))
    }
}

impl Waiting {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let mut next = || parts.next();
        Some(Self {
            lane: Lane::from_digits(next()?)?,
            due_ms: next()?.parse().ok()?,
            attempts: next()?.parse().ok()?,
            alone: next()?.parse().ok()?,
        })
    }
}

impl fmt::Display for Aside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lanes.is_empty() {
            return Ok(());
        }
        write!(f, "{:x};", self.tag)?;
        match self.tried {
            None => {}
            Some(Tried::Queue) => f.write_str("q")?,
            Some(Tried::Lane(lane)) => write!(f, "{lane}")?,
        }
        let mut before = ';';
        for Waiting { lane, due_ms, attempts, alone } in &self.lanes {
            write!(f, "{before}{lane}:{due_ms}:{attempts}:{alone}")?;
            before = ',';
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(lane: &str, due_ms: u64) -> Waiting {
        Waiting { lane: Lane::from_digits(lane).unwrap(), due_ms, attempts: 2, alone: 3 }
    }

    #[test]
    fn lanes_set_aside_are_read_as_they_were_written() {
        let mut aside = Aside { tag: 0xdead_beef, ..Aside::default() };
        assert_eq!(aside.to_string(), "");
        assert_eq!(Aside::parse(""), Some(Aside::default()));
        aside.set(waiting("7", 30));
        aside.set(waiting("63", 10));
        let lane = Some(Tried::Lane(Lane::from_digits("7").unwrap()));
        for (tried, text) in [(None, ""), (Some(Tried::Queue), "q"), (lane, "7")] {
            aside.tried = tried;
            let expected = format!("deadbeef;{text};63:10:2:3,7:30:2:3");
            assert_eq!(aside.to_string(), expected);
            assert_eq!(Aside::parse(&expected).unwrap(), aside);
        }
        for damaged in ["x", "1;", "1;;", "1;;64:1:1:1", "1;y;1:1:1:1", "1;;1:1:1"] {
            assert_eq!(Aside::parse(damaged), None, "{damaged}");
        }
    }

    #[test]
    fn the_lane_that_is_due_first_is_first_and_a_lane_is_there_once() {
        let mut aside = Aside::default();
        for (lane, due_ms) in [("1", 50), ("2", 20), ("3", 90), ("1", 10), ("2", 60)] {
            aside.set(waiting(lane, due_ms));
        }
        let order: Vec<u64> = aside.lanes().iter().map(|waiting| waiting.due_ms).collect();
        assert_eq!(order, [10, 60, 90]);
        assert_eq!((aside.next_ms(4), aside.next_ms(99)), (6, 0));
        aside.remove(Lane::from_digits("1").unwrap());
        assert_eq!(aside.first().unwrap().due_ms, 60);
    }
}
