//! The series of pipelines that a reload removed. The recorder forgets none, so they are not shown.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::id::PipelineName;

/// The pipelines after a reload; `None`: all.
static PIPELINES: Mutex<Option<BTreeSet<PipelineName>>> = Mutex::new(None);

/// The text without the series of removed pipelines.
pub(super) fn left_out(text: String) -> String {
    match &*PIPELINES.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(pipelines) => of_pipelines(&text, pipelines),
        None => text,
    }
}

/// From now on, the metrics of other pipelines are not shown. A reload may have removed some.
pub(crate) fn show_only(pipelines: BTreeSet<PipelineName>) {
    *PIPELINES.lock().unwrap_or_else(PoisonError::into_inner) = Some(pipelines);
}

/// The text without the series of other pipelines.
fn of_pipelines(text: &str, pipelines: &BTreeSet<PipelineName>) -> String {
    let is_shown = |line: &&str| {
        let label = line.split_once("pipeline=\"").and_then(|(_, rest)| rest.split_once('"'));
        label.is_none_or(|(name, _)| {
            name.is_empty() || pipelines.iter().any(|known| known.as_str() == name)
        })
    };
    text.split_inclusive('\n').filter(is_shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_other_pipelines_are_left_out_and_all_else_stays() {
        let text = "# TYPE a gauge\na{pipeline=\"one\"} 1\na{state=\"x\",pipeline=\"two\"} 1\n\
                    b{problem=\"c\",pipeline=\"\"} 1\nc 2\n";
        let one = BTreeSet::from([PipelineName::parse("one").unwrap()]);
        let left = text.replace("a{state=\"x\",pipeline=\"two\"} 1\n", "");
        assert_eq!(of_pipelines(text, &one), left);
    }
}
