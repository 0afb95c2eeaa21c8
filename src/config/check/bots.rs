//! `[[limits.bots]]`.

use std::collections::BTreeSet;

use super::Fault;
use super::bounds::at_most;
use crate::config::Config;

const BOTS_MAX: usize = 1_000;

impl Config {
    pub(super) fn check_limited_bots(&self) -> Result<(), Fault> {
        at_most("limits.bots", self.limited_bots.len(), BOTS_MAX)?;
        let mut seen = BTreeSet::new();
        for (place, own) in self.limited_bots.iter().enumerate() {
            let key = |name: &str| format!("limits.bots[{place}].{name}");
            let Some(pipeline) = self.pipelines.get(&own.pipeline) else {
                let problem = format!("is {:?}, which is no pipeline; name one", own.pipeline);
                return Err(Fault::new(key("pipeline"), problem));
            };
            if !seen.insert((&own.pipeline, &own.bot)) {
                let (bot, pipeline) = (&own.bot, &own.pipeline);
                let problem =
                    format!("is {bot:?} once more for {pipeline:?}; give each bot one table");
                return Err(Fault::new(key("bot"), problem));
            }
            if own.limits.burst.is_some()
                && own.limits.rate.or(pipeline.rate.map(Into::into)).is_none()
            {
                return Err(Fault::new(
                    key("burst"),
                    "has no effect without a rate; set rate, or remove it",
                ));
            }
        }
        Ok(())
    }
}
