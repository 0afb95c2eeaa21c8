//! The filter of the dead letters. Every link and form of these pages keeps it.

use maud::{Markup, html};
use serde::Deserialize;

use super::super::super::parameters::Parameters;
use super::super::super::problem::Problem;
use super::super::{bot, grouped, pipeline};
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::{Deed, Swept};

/// Maximum length of the text that a reason has to contain, in bytes.
const REASON_MAX: usize = 1_024;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct PageQuery {
    /// The bot. A form sends an empty one for all bots.
    #[serde(default)]
    pub(super) bot: String,
    /// A part of the reason. A form sends an empty one for all reasons.
    #[serde(default)]
    pub(super) reason: String,
    pub(super) cursor: Option<String>,
    /// What was done before this page was opened, and to how many letters.
    pub(super) done: Option<Done>,
    #[serde(default)]
    pub(super) n: u64,
    /// Whether the bound of an action ended it.
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Done {
    Redrive,
    Drop,
    /// Nothing was selected.
    Nothing,
}

impl Done {
    fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Drop => "drop",
            Self::Nothing => "nothing",
        }
    }
}

impl From<Deed> for Done {
    fn from(deed: Deed) -> Self {
        match deed {
            Deed::Redrive => Self::Redrive,
            Deed::Drop => Self::Drop,
        }
    }
}

impl PageQuery {
    /// The filter of a list with one bot, or with an empty text for all.
    pub(super) fn of_bot(bot: &str) -> Self {
        Self { bot: bot.to_owned(), ..Self::default() }
    }

    /// The filter that a form has kept.
    pub(super) fn take(fields: &mut Parameters) -> Self {
        Self {
            bot: fields.take("bot").unwrap_or_default(),
            reason: fields.take("reason").unwrap_or_default(),
            cursor: fields.take("cursor"),
            ..Self::default()
        }
    }

    pub(super) fn bot(&self) -> Result<Option<BotId>, Problem> {
        if self.reason.len() > REASON_MAX {
            let detail =
                format!("it has {} bytes; at most {REASON_MAX} are allowed", self.reason.len());
            return Err(Problem::field("reason", detail));
        }
        let parsed = (!self.bot.is_empty()).then(|| BotId::parse(&self.bot)).transpose();
        parsed.map_err(|error| Problem::field("bot", error.to_string()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bot.is_empty() && self.reason.is_empty()
    }

    /// The filter with these parameters, as a query with its `?`; empty for nothing.
    fn query(&self, more: &[(&str, &str)]) -> String {
        let own = [("bot", &*self.bot), ("reason", &*self.reason)];
        let all = own.into_iter().chain(more.iter().copied());
        let all: Vec<String> = all
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name}={}", bot::encoded(value)))
            .collect();
        if all.is_empty() { String::new() } else { format!("?{}", all.join("&")) }
    }

    /// The list.
    pub(super) fn list(&self, pipeline: &PipelineName) -> String {
        self.at(pipeline, "")
    }

    /// The same page of the list.
    fn same_page(&self, pipeline: &PipelineName, more: &[(&str, &str)]) -> String {
        let cursor = self.cursor.as_deref().unwrap_or_default();
        let all: Vec<_> = [("cursor", cursor)].iter().chain(more).copied().collect();
        format!("{}{}", path(pipeline), self.query(&all))
    }

    /// The page of the list that starts behind `cursor`.
    pub(super) fn next(&self, cursor: &str) -> String {
        self.query(&[("cursor", cursor)])
    }

    /// A page below the list, such as `/redrive`.
    pub(super) fn at(&self, pipeline: &PipelineName, below: &str) -> String {
        format!("{}{below}{}", path(pipeline), self.query(&[]))
    }

    /// The list with another reason.
    pub(super) fn with_reason(&self, pipeline: &PipelineName, reason: &str) -> String {
        Self { reason: reason.to_owned(), ..self.clone() }.list(pipeline)
    }

    /// The list after something was done, with a message.
    pub(super) fn after(&self, pipeline: &PipelineName, done: Done, swept: Swept) -> String {
        let n = swept.count.to_string();
        let more = if swept.more { "true" } else { "" };
        self.same_page(pipeline, &[("done", done.name()), ("n", &n), ("more", more)])
    }

    /// The page of one letter.
    pub(super) fn one(&self, pipeline: &PipelineName, id: LetterId) -> String {
        let cursor = self.cursor.as_deref().unwrap_or_default();
        format!("{}/{id}{}", path(pipeline), self.query(&[("cursor", cursor)]))
    }

    /// The filter as hidden fields of a form.
    pub(super) fn hidden(&self) -> Markup {
        html! {
            @if !self.bot.is_empty() { input type="hidden" name="bot" value=(self.bot); }
            @if !self.reason.is_empty() { input type="hidden" name="reason" value=(self.reason); }
            @if let Some(cursor) = &self.cursor { input type="hidden" name="cursor" value=(cursor); }
        }
    }

    /// What the letters have in common: `of bot b in pipeline p with "500" in their reason`.
    pub(super) fn scope(&self, pipeline: &PipelineName) -> String {
        let bots = match self.bot.as_str() {
            "" => "all bots".to_owned(),
            bot => format!("bot {bot}"),
        };
        let reason = match self.reason.as_str() {
            "" => String::new(),
            reason => format!(" with {reason:?} in their reason"),
        };
        format!("of {bots} in pipeline {pipeline}{reason}")
    }

    /// What was done.
    pub(super) fn message(&self) -> Markup {
        let said = |verb: &str| {
            let letters = if self.n == 1 { "dead letter" } else { "dead letters" };
            let more = if self.more { "; more are left, repeat it for the next ones" } else { "" };
            format!("{verb} {} {letters}{more}.", grouped(self.n))
        };
        let text = match self.done {
            None => return html! {},
            Some(Done::Redrive) => said("Redrove"),
            Some(Done::Drop) => said("Dropped"),
            Some(Done::Nothing) => "Nothing was selected. Select dead letters first.".to_owned(),
        };
        html! { p.said role="status" { (text) } }
    }
}

/// The path of the list.
pub(super) fn path(pipeline: &PipelineName) -> String {
    format!("{}/dead", pipeline::path(pipeline))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_kept_by_every_path() {
        let p = PipelineName::parse("p").unwrap();
        let wish = PageQuery {
            bot: "a&b".to_owned(),
            reason: "50% of <x>".to_owned(),
            cursor: Some("c".to_owned()),
            ..PageQuery::default()
        };
        let kept = "?bot=a%26b&reason=50%25%20of%20%3Cx%3E";
        assert_eq!(wish.list(&p), format!("/pipelines/p/dead{kept}"));
        assert_eq!(wish.at(&p, "/drop"), format!("/pipelines/p/dead/drop{kept}"));
        assert_eq!(wish.next("d"), format!("{kept}&cursor=d"));
        let swept = Swept { count: 12, more: false };
        assert_eq!(
            wish.after(&p, Done::Drop, swept),
            format!("/pipelines/p/dead{kept}&cursor=c&done=drop&n=12")
        );
        let id = "0.1-0".parse().unwrap();
        assert_eq!(wish.one(&p, id), format!("/pipelines/p/dead/0.1-0{kept}&cursor=c"));
        assert_eq!(PageQuery::default().list(&p), "/pipelines/p/dead");
        let hidden = wish.hidden().into_string();
        assert!(
            hidden.contains("value=\"50% of &lt;x&gt;\"") && hidden.contains("a&amp;b"),
            "{hidden}"
        );
    }

    #[test]
    fn the_message_says_what_was_done() {
        let said = |done, n, more| {
            let query = PageQuery { done, n, more, ..PageQuery::default() };
            query.message().into_string()
        };
        assert_eq!(said(None, 1, true), "");
        assert!(said(Some(Done::Redrive), 12, false).contains("Redrove 12 dead letters."));
        assert!(said(Some(Done::Drop), 1, false).contains("Dropped 1 dead letter."));
        assert!(
            said(Some(Done::Drop), 10_000, true)
                .contains("Dropped 10,000 dead letters; more are left")
        );
    }
}
