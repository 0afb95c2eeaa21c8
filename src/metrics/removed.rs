//! The series of what a reload removed: pipelines, and MongoDB. The recorder forgets none, so they are
//! not shown.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::MONGODB_UP;
use crate::id::PipelineName;

/// What an instance has.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) pipelines: BTreeSet<PipelineName>,
    /// Whether it uses MongoDB.
    pub(crate) mongodb: bool,
}

/// What the instance after a reload has; `None`: all.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

/// The text without the removed series.
pub(super) fn left_out(text: String) -> String {
    match &*SHOWN.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(shown) => shown.of(&text),
        None => text,
    }
}

/// From now on, other series are not shown. A reload may have removed some.
pub(crate) fn show_only(shown: Shown) {
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(shown);
}

impl Shown {
    /// The text without the series of other pipelines, and of a MongoDB that is not used.
    fn of(&self, text: &str) -> String {
        let is_shown = |line: &&str| {
            if line.split_once(' ').is_some_and(|(series, _)| series == MONGODB_UP) {
                return self.mongodb;
            }
            let label = line.split_once("pipeline=\"").and_then(|(_, rest)| rest.split_once('"'));
            label.is_none_or(|(name, _)| {
                name.is_empty() || self.pipelines.iter().any(|known| known.as_str() == name)
            })
        };
        text.split_inclusive('\n').filter(is_shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_other_pipelines_are_left_out_and_all_else_stays() {
        let text = "# TYPE a gauge\na{pipeline=\"one\"} 1\na{state=\"x\",pipeline=\"two\"} 1\n\
                    b{problem=\"c\",pipeline=\"\"} 1\nc 2\n";
        let pipelines = BTreeSet::from([PipelineName::parse("one").unwrap()]);
        let left = text.replace("a{state=\"x\",pipeline=\"two\"} 1\n", "");
        assert_eq!(Shown { pipelines, mongodb: true }.of(text), left);
    }

    #[test]
    fn a_mongodb_that_is_not_used_is_neither_up_nor_down() {
        let text = "# TYPE fairlane_mongodb_up gauge\nfairlane_mongodb_up 0\nfairlane_redis_up 1\n";
        let shown = |mongodb| Shown { pipelines: BTreeSet::new(), mongodb }.of(text);
        assert_eq!(shown(true), text);
        assert_eq!(shown(false), text.replace("fairlane_mongodb_up 0\n", ""));
    }
}
