//! Redrives or drops many dead letters: the selected ones, or all that a filter finds. A question with
//! their number comes first. It needs no script.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use tokio::time::Instant;

use super::super::super::Api;
use super::super::super::acting;
use super::super::super::auth::Caller;
use super::super::super::dead::WITHIN_OF_BOT;
use super::super::super::extract::{Path, Query};
use super::super::super::parameters::Parameters;
use super::super::super::partly::stopped;
use super::super::super::pipelines::PipelinePath;
use super::super::super::problem::Problem;
use super::super::{Refusal, grouped, headline, page};
use super::filter::{Done, PageQuery, path};
use crate::clock::millis;
use crate::config::Scope;
use crate::id::{BotId, LetterId, Offset, PipelineName, Shard};
use crate::queue::{Bound, BulkStopped, Deed, Queue, Swept, Wish};
use crate::trail::Action;

/// Maximum number of letters of one action, and its time, for tokens of all bots.
const LETTERS_MAX: u64 = 10_000;
const TIME: Duration = Duration::from_secs(5);
/// Time for counting them before.
const COUNT_TIME: Duration = Duration::from_secs(2);
/// The prefix of the names of the fields of selected letters.
pub(super) const CHOSEN: &str = "letter-";
/// Maximum number of selected letters.
const CHOSEN_MAX: usize = super::LETTERS;

/// Whether the caller may act on all dead letters of a bot, or of all bots.
fn check(caller: &Caller, bot: Option<&BotId>) -> Result<(), Problem> {
    bot.map_or_else(|| caller.check_all_bots(), |bot| caller.check_bot(bot))
}

/// The end of an action of the caller, which starts now.
fn bound(caller: &Caller) -> Bound {
    let time = if caller.covers_all() { TIME } else { WITHIN_OF_BOT };
    Bound { letters: LETTERS_MAX, deadline: Instant::now() + time }
}

fn name(deed: Deed) -> (&'static str, &'static str) {
    match deed {
        Deed::Redrive => ("redrive", "Redrive"),
        Deed::Drop => ("drop", "Drop"),
    }
}

/// The number of letters that a filter finds.
async fn count(
    (api, caller): (&Api, &Caller),
    queue: &Queue,
    (bot, wish): (Option<&BotId>, &PageQuery),
    until: Duration,
) -> Result<Swept, Problem> {
    if wish.is_empty() {
        return Ok(Swept { count: queue.count_dead_letters(None, until).await?, more: false });
    }
    // It may read all, as a list does.
    let _turn = api.large_reads.take(caller.name()).await?;
    let wanted = Wish { bot, wanted: &|_| true, reason: &wish.reason };
    let bound = Bound { letters: u64::MAX, deadline: Instant::now() + COUNT_TIME };
    Ok(queue.count_dead(wanted, until, bound).await?)
}

async fn ask(
    (api, caller): (&Api, &Caller),
    pipeline: &PipelineName,
    wish: PageQuery,
    deed: Deed,
) -> Result<Response, Refusal> {
    let bot = wish.bot()?;
    check(caller, bot.as_ref())?;
    caller.check_scope(Scope::Operate)?;
    let queue = api.queues.find(pipeline).await?;
    let until = api.queues.time().await?;
    let counted = count((api, caller), &queue, (bot.as_ref(), &wish), until).await?;
    let question = Question {
        what: question_text(deed, counted, &wish.scope(pipeline)),
        about: about(deed, counted),
        action: format!("{}/{}", path(pipeline), name(deed).0),
        back: wish.list(pipeline),
        fields: html! {
            (wish.hidden())
            input type="hidden" name="until" value=(millis(until));
        },
        deed,
    };
    Ok(question.page(caller))
}

/// Asks before a bulk redrive.
pub(in super::super) async fn ask_redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    ask((&api, &caller), &pipeline, wish, Deed::Redrive).await
}

/// Asks before many letters are dropped.
pub(in super::super) async fn ask_drop_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    ask((&api, &caller), &pipeline, wish, Deed::Drop).await
}

fn question_text(deed: Deed, Swept { count, more }: Swept, scope: &str) -> String {
    let letters = if count == 1 { "dead letter" } else { "dead letters" };
    let about = if more { "at least " } else { "" };
    format!("{} {about}{} {letters} {scope}?", name(deed).1, grouped(count))
}

/// What happens, and its bound.
fn about(deed: Deed, counted: Swept) -> String {
    let mut text = match deed {
        Deed::Redrive => {
            "Each event is handled again at its place in the order of its bot. Events that fail from now on stay dead letters."
        }
        Deed::Drop => "They are deleted for good: their events are not handled.",
    }
    .to_owned();
    if counted.more || counted.count > LETTERS_MAX {
        text.push_str(
            " One step takes up to 10,000, the oldest first, for some seconds; repeat it for the others.",
        );
    }
    text
}

/// The question before an action.
struct Question {
    what: String,
    about: String,
    action: String,
    back: String,
    /// Hidden fields.
    fields: Markup,
    deed: Deed,
}

impl Question {
    fn page(&self, caller: &Caller) -> Response {
        let verb = name(self.deed).1;
        let title = format!("{verb} dead letters?");
        let content = html! {
            (headline(&title, caller.has_token()))
            p { strong { (self.what) } }
            p { (self.about) }
            div.actions {
                form method="post" action=(self.action) {
                    (self.fields)
                    button.danger type="submit" { (verb) " them" }
                }
                a href=(self.back) { "Cancel" }
            }
        };
        page(&title, &content)
    }
}

/// The time limit that the form of the question sends. Without it, the page asks the question
/// first.
fn confirmed(fields: &mut Parameters) -> Result<Option<Duration>, Problem> {
    let until = fields.read("until", |text| {
        text.parse()
            .map_err(|_| "it is not a time in ms since 1970; open the question again".to_owned())
    });
    Ok(until?.map(Duration::from_millis))
}

async fn act(
    (api, caller): (&Api, &Caller),
    pipeline: &PipelineName,
    mut fields: Parameters,
    deed: Deed,
) -> Result<Redirect, Refusal> {
    let wish = PageQuery { cursor: None, ..PageQuery::take(&mut fields) };
    let bot = wish.bot()?;
    check(caller, bot.as_ref())?;
    let Some(until) = confirmed(&mut fields)? else {
        return Ok(Redirect::to(&wish.at(pipeline, &format!("/{}", name(deed).0))));
    };
    let queue = api.queues.find(pipeline).await?;
    let wanted = Wish { bot: bot.as_ref(), wanted: &|_| true, reason: &wish.reason };
    let _turn = api.searches.take(caller.name()).await?;
    let bound = bound(caller);
    let until = until.min(api.queues.time().await?);
    let work = async {
        let swept = queue.sweep_dead(wanted, until, bound, deed).await;
        swept.map_err(|error| stopped(deed, error))
    };
    let action = if deed == Deed::Drop { "drop all" } else { "redrive all" };
    let action = Action::new(action).in_pipeline(pipeline).of_bot(bot.as_ref());
    let action = action.details(&wish.reason);
    let swept = api.act(caller, action, work, |swept| acting::number(&swept.count)).await?;
    Ok(Redirect::to(&wish.after(pipeline, deed.into(), swept)))
}

pub(in super::super) async fn redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    act((&api, &caller), &pipeline, fields, Deed::Redrive).await
}

pub(in super::super) async fn drop_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    act((&api, &caller), &pipeline, fields, Deed::Drop).await
}

/// The selected letters: asks, and acts when the question is answered.
pub(in super::super) async fn chosen(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    mut fields: Parameters,
) -> Result<Response, Refusal> {
    let wish = PageQuery::take(&mut fields);
    let deed = match fields.take("deed").as_deref() {
        Some("redrive") => Deed::Redrive,
        Some("drop") => Deed::Drop,
        _ => return Err(Problem::field("deed", "write redrive or drop").into()),
    };
    let is_confirmed = fields.take("confirmed").is_some();
    let ids = fields.take_names(CHOSEN);
    if ids.len() > CHOSEN_MAX {
        return Err(Problem::field("letter", format!("select at most {CHOSEN_MAX}")).into());
    }
    let ids: Result<Vec<LetterId>, _> = ids.iter().map(|id| id.parse::<LetterId>()).collect();
    let ids = ids.map_err(|error| Problem::field("letter", error.to_string()))?;
    if ids.is_empty() {
        let nothing = Swept::default();
        return Ok(Redirect::to(&wish.after(&pipeline, Done::Nothing, nothing)).into_response());
    }
    let queue = api.queues.find(&pipeline).await?;
    let mut letters = queue.glimpse_letters(&ids).await?;
    // Those of other bots do not exist for the caller.
    letters.retain(|(bot, _)| caller.covers(bot));
    if is_confirmed {
        let mut shards: BTreeMap<Shard, Vec<(BotId, Offset)>> = BTreeMap::new();
        let mut bots: Vec<BotId> = Vec::new();
        // Events of a bot go back in their order.
        for (bot, letter) in letters.into_iter().rev() {
            if !bots.contains(&bot) {
                bots.push(bot.clone());
            }
            shards.entry(letter.id.shard).or_default().push((bot, letter.id.entry));
        }
        let work = async {
            let mut done = 0;
            for (shard, letters) in &mut shards {
                letters.sort_by_key(|(_, entry)| *entry);
                let settled = queue.settle_letters(*shard, letters, deed, &mut done).await;
                settled.map_err(|source| stopped(deed, BulkStopped { done, source }))?;
            }
            Ok(done)
        };
        let action = Action::new(name(deed).0).in_pipeline(&pipeline);
        let action = match bots.as_slice() {
            [bot] => action.of_bot(Some(bot)),
            bots => action.details(&format!("selected, of {} bots", bots.len())),
        };
        let count = api.act(&caller, action, work, acting::number).await?;
        let swept = Swept { count, more: false };
        return Ok(Redirect::to(&wish.after(&pipeline, deed.into(), swept)).into_response());
    }
    let counted = Swept { count: letters.len() as u64, more: false };
    let question = Question {
        what: question_text(deed, counted, &format!("that you selected in pipeline {pipeline}")),
        about: about(deed, counted),
        action: format!("{}/chosen", path(&pipeline)),
        back: wish.list(&pipeline),
        fields: html! {
            (wish.hidden())
            input type="hidden" name="deed" value=(name(deed).0);
            input type="hidden" name="confirmed" value="yes";
            @for (_, letter) in &letters {
                input type="hidden" name={ (CHOSEN) (letter.id) } value="on";
            }
        },
        deed,
    };
    Ok(question.page(&caller))
}

/// The bulk redrive on the page of the notifications.
pub(in super::super) async fn ask_redrive_notifications(
    State(api): State<Arc<Api>>,
    caller: Caller,
) -> Result<Response, Refusal> {
    caller.check_all_bots()?;
    caller.check_scope(Scope::Operate)?;
    let queue = api.notifications()?.queue().clone();
    let until = api.queues.time().await?;
    let count = queue.count_dead_letters(None, until).await?;
    let counted = Swept { count, more: false };
    let scope = "of all bots: their notifications are sent immediately";
    let question = Question {
        what: question_text(Deed::Redrive, counted, scope),
        about: about(Deed::Redrive, counted),
        action: "/notifications/dead/redrive".to_owned(),
        back: "/notifications#dead".to_owned(),
        fields: html! { input type="hidden" name="until" value=(millis(until)); },
        deed: Deed::Redrive,
    };
    Ok(question.page(&caller))
}

pub(in super::super) async fn redrive_notifications(
    State(api): State<Arc<Api>>,
    caller: Caller,
    mut fields: Parameters,
) -> Result<Redirect, Refusal> {
    caller.check_all_bots()?;
    let Some(until) = confirmed(&mut fields)? else {
        return Ok(Redirect::to("/notifications/dead/redrive"));
    };
    let queue = api.notifications()?.queue().clone();
    let wanted = Wish { bot: None, wanted: &|_| true, reason: "" };
    let _turn = api.searches.take(caller.name()).await?;
    let bound = bound(&caller);
    let until = until.min(api.queues.time().await?);
    let work = async {
        let swept = queue.sweep_dead(wanted, until, bound, Deed::Redrive).await;
        swept.map_err(|error| stopped(Deed::Redrive, error))
    };
    let action = Action::new("redrive all").in_pipeline(queue.name());
    api.act(&caller, action, work, |swept| acting::number(&swept.count)).await?;
    Ok(Redirect::to("/notifications#dead"))
}
