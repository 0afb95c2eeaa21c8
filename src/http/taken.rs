//! The event types that the pipelines take. Publishers learn immediately about a type that no
//! pipeline takes.
//!
//! A pipeline takes a type if its `events` names it and the pipeline is enabled. A selective
//! pipeline names many types, but wants only some of them for each bot. It takes a type only for
//! the bots for which it wants it. Filters have no influence.

use std::sync::Arc;

use crate::config::Config;
use crate::expression::Glob;
use crate::fanout::Interest;
use crate::id::{BotId, PipelineName};
use crate::products::Kinds;

/// The types that a pipeline takes.
#[derive(Debug)]
pub(crate) struct Taken {
    written: Vec<Glob>,
    /// The selective pipelines that run here: the types they name, and the events they want.
    selective: Vec<(PipelineName, Vec<Glob>, Arc<dyn Interest>)>,
}

/// The types of the enabled pipelines that are not selective.
pub(crate) fn written(config: &Config, kinds: &Kinds) -> Vec<Glob> {
    named(config, |name| !kinds.of(name).selective)
}

fn named(config: &Config, which: impl Fn(&PipelineName) -> bool) -> Vec<Glob> {
    let enabled = config.pipelines.iter().filter(|(_, pipeline)| pipeline.enabled);
    let meant = enabled.filter(|(name, _)| which(name));
    meant.flat_map(|(_, pipeline)| pipeline.events.iter().map(|glob| Glob::new(glob))).collect()
}

impl Taken {
    /// The types in a configuration, and the selective pipelines that run here.
    pub(crate) fn new(
        config: &Config,
        kinds: &Kinds,
        interests: Vec<(PipelineName, Arc<dyn Interest>)>,
    ) -> Self {
        let types = |name: &PipelineName| named(config, |other| other == name);
        let selective = interests.into_iter().map(|(name, interest)| {
            let types = types(&name);
            (name, types, interest)
        });
        Self { written: written(config, kinds), selective: selective.collect() }
    }

    /// Whether a pipeline takes events of a bot of this type.
    pub(crate) fn takes(&self, bot: &BotId, kind: &str) -> bool {
        let has = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(kind));
        has(&self.written)
            || self
                .selective
                .iter()
                .any(|(_, types, interest)| has(types) && interest.takes(bot, kind))
    }

    /// Which events a selective pipeline wants for each bot, if it runs here.
    pub(crate) fn interest(&self, pipeline: &PipelineName) -> Option<Arc<dyn Interest>> {
        let found = self.selective.iter().find(|(name, ..)| name == pipeline);
        found.map(|(_, _, interest)| Arc::clone(interest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_taken_by_a_pipeline_and_not_by_unread_rules() {
        let text = "[pipelines.tags]\nhandler = \"log\"\nevents = [\"tag.*\"]\n\
                    [pipelines.off]\nhandler = \"log\"\nevents = [\"*\"]\nenabled = false\n";
        let config = Config::from_toml(text, "the test").unwrap();
        let kinds = Kinds::today(&config);
        let (taken, bot) = (Taken::new(&config, &kinds, Vec::new()), BotId::parse("b").unwrap());
        for (kind, expected) in [("tag.applied", true), ("tga.applied", false), ("x", false)] {
            assert_eq!(taken.takes(&bot, kind), expected, "{kind}");
        }
        // Before the rules are read, no rule is known.
        let name = PipelineName::parse(crate::automations::PIPELINE).unwrap();
        let rules: Arc<dyn Interest> = Arc::new(crate::automations::Subscriptions::new());
        assert!(!Taken::new(&config, &kinds, vec![(name, rules)]).takes(&bot, "tga.applied"));
    }
}
