//! The form for the weight, rate and burst of a bot in one pipeline.

use maud::{Markup, html};

use super::super::headline;
use super::path;
use crate::id::{BotId, PipelineName};
use crate::queue::{BotChange, BotView};
use crate::rate::{BURST_MAX, BotRate, LimitError, Weight};

/// The texts of the fields, and what is wrong with them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Form {
    weight: String,
    rate: String,
    burst: String,
    /// The name of a field, and its remedy.
    wrong: Vec<(&'static str, String)>,
}

impl Form {
    /// What was sent.
    pub(super) fn new(weight: String, rate: String, burst: String) -> Self {
        Self { weight, rate, burst, wrong: Vec::new() }
    }

    /// What is set now.
    pub(super) fn of(look: &BotView) -> Self {
        Self {
            weight: look.weight.to_string(),
            rate: look.rate.map_or_else(String::new, |rate| rate.to_string()),
            burst: look.burst.map_or_else(String::new, |burst| burst.to_string()),
            wrong: Vec::new(),
        }
    }

    /// What the fields say. An empty one sets the bot back to what the others have. Otherwise the
    /// form again, with what is wrong.
    pub(super) fn change(mut self) -> Result<BotChange, Self> {
        let mut wrong = Vec::new();
        let mut refused = |field: &'static str, text: &str, error: LimitError| {
            wrong.push((field, format!("{field} is {text:?}; {error}")));
        };
        let weight = match self.weight.trim() {
            "" => Weight::ONE,
            text => text.parse().unwrap_or_else(|error| {
                refused("weight", text, error);
                Weight::ONE
            }),
        };
        let rate: Option<BotRate> = match self.rate.trim() {
            "" => None,
            text => text.parse().map_err(|error| refused("rate", text, error)).ok(),
        };
        let burst: Option<u32> = match self.burst.trim() {
            "" => None,
            text => {
                let burst = text.parse().ok().filter(|burst| (1..=BURST_MAX).contains(burst));
                if burst.is_none() {
                    refused("burst", text, LimitError::Burst);
                }
                burst
            }
        };
        if wrong.is_empty() {
            return Ok(BotChange { weight: Some(weight), rate: rate.into(), burst: burst.into() });
        }
        self.wrong = wrong;
        Err(self)
    }

    /// The form.
    pub(super) fn markup(&self, bot: &BotId, pipeline: &PipelineName) -> Markup {
        let field = |name: &'static str, label: &str, text: &str, more: Markup| {
            let wrong = self.wrong.iter().find(|(field, _)| *field == name).map(|(_, why)| why);
            let id = format!("{name}-{pipeline}");
            html! {
                span.field {
                    label for=(id) { (label) }
                    (more)
                    input id=(id) name=(name) value=(text) maxlength="16" size="10"
                        aria-invalid=[wrong.map(|_| "true")]
                        aria-describedby=[wrong.map(|_| format!("{id}-wrong"))];
                    @if let Some(why) = wrong { span.bad id={ (id) "-wrong" } role="alert" { (why) } }
                }
            }
        };
        html! {
            form.settings method="post" action={ (path(bot)) "/" (pipeline) "/set" } {
                (field("weight", "Weight", &self.weight, html! {}))
                (field("rate", "Rate", &self.rate, html! {}))
                (field("burst", "Burst", &self.burst, html! {}))
                button type="submit" aria-label={ "Set in " (pipeline) } { "Set" }
                p { "Weight: 0.01 to 1000. Rate: such as 10/s, 30/m or unlimited. Burst: 1 to 1000000 events. An empty field: as for the other bots of the pipeline." }
            }
        }
    }

    /// The page that shows what is wrong.
    pub(super) fn page(&self, bot: &BotId, pipeline: &PipelineName, has_token: bool) -> Markup {
        html! {
            (headline(&format!("Limits of bot {bot}"), has_token))
            p { "Nothing is changed. Correct the fields, or go back to " a href=(path(bot)) { "the bot" } "." }
            div.panel { h2 { (pipeline) } (self.markup(bot, pipeline)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(weight: &str, rate: &str, burst: &str) -> Form {
        let [weight, rate, burst] = [weight, rate, burst].map(str::to_owned);
        Form::new(weight, rate, burst)
    }

    #[test]
    fn empty_fields_reset_and_others_are_set() {
        let change = form(" ", "", "").change().unwrap();
        assert_eq!(change.weight, Some(Weight::ONE));
        assert_eq!((change.rate, change.burst), (None.into(), None.into()));
        let change = form("0.5", "30/m", " 20 ").change().unwrap();
        assert_eq!(change.burst, Some(20).into());
        assert_eq!(change.rate, Some("30/m".parse().unwrap()).into());
    }

    #[test]
    fn each_wrong_field_has_its_remedy_beside_it_and_keeps_its_text() {
        let wrong = form("0", "\"><b>", "many").change().unwrap_err();
        let (bot, pipeline) = (BotId::parse("<i>").unwrap(), PipelineName::parse("p").unwrap());
        let page = wrong.page(&bot, &pipeline, true).into_string();
        assert!(!page.contains("<b>") && !page.contains("<i>"), "{page}");
        for shown in [
            "a number from 0.01",
            "events per second, minute or hour",
            "a whole number from 1",
            "value=\"many\"",
            "aria-describedby=\"burst-p-wrong\"",
        ] {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
        assert_eq!(page.matches("aria-invalid=\"true\"").count(), 3, "{page}");
    }
}
