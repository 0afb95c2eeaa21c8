//! The form that publishes an event.

use std::sync::Arc;

use axum::extract::{FromRequest as _, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use serde_json::value::RawValue;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::super::Api;
use super::super::auth::Caller;
use super::super::cloudevents::Mode;
use super::super::events::{self, Unstored};
use super::super::parameters::Parameters;
use super::{Refusal, bot, event, headline, page, page_for};
use crate::event::Event;
use crate::id::BotId;

/// The source of the events.
const SOURCE: &str = "fairlane/page";
/// Maximum number of UTF-16 units of the data: the body of the form has up to nine bytes for each, and at
/// most 1 MiB.
const DATA_MAX: u32 = 115_000;

/// What the user typed, and what is wrong with it.
#[derive(Debug, Default)]
struct Typed {
    kind: String,
    bot: String,
    data: String,
    kind_error: Option<String>,
    bot_error: Option<String>,
    data_error: Option<String>,
    /// Why it was not published, although nothing is wrong with the fields.
    problem: Option<String>,
    /// The id of the event that was sent with these values and may be stored.
    sent: Option<Uuid>,
}

impl Typed {
    fn new(kind: String) -> Self {
        Self { kind, bot: "bot-1".to_owned(), data: "{ \"n\": 1 }".to_owned(), ..Self::default() }
    }

    /// Tells whether the values are those of an earlier form: another event needs another id.
    fn mark(&self) -> String {
        let all = [&*self.kind, &self.bot, &self.data].join("\n");
        format!("{:016x}", xxh3_64(all.as_bytes()))
    }

    /// The event in JSON and its bot, or `None` with an error in each wrong field.
    fn event(&mut self, id: &str, caller: &Caller) -> Option<(String, BotId)> {
        let bot = match BotId::parse(&self.bot) {
            Ok(bot) if caller.covers(&bot) => Some(bot),
            Ok(_) => {
                self.bot_error = Some("This token is not for this bot.".to_owned());
                None
            }
            Err(error) => {
                self.bot_error = Some(sentence(&error.to_string()));
                None
            }
        };
        let data = match self.data.trim() {
            "" => None,
            data => match serde_json::from_str::<Box<RawValue>>(data) {
                Ok(data) => Some(data),
                Err(error) => {
                    self.data_error = Some(format!("This is not JSON: {error}."));
                    None
                }
            },
        };
        let bot = bot?;
        let mut attributes = serde_json::json!({
            "specversion": "1.0", "id": id, "source": SOURCE, "type": self.kind, "botid": bot,
        });
        if data.is_some() {
            attributes["datacontenttype"] = "application/json".into();
        }
        let mut text = attributes.to_string();
        if let Some(data) = data {
            text.truncate(text.len() - 1);
            text.extend([",\"data\":", data.get(), "}"]);
        }
        if let Err(error) = Event::from_json(text.as_bytes()) {
            let place = match error.attribute().as_deref() {
                Some("type") => &mut self.kind_error,
                Some("botid") => &mut self.bot_error,
                _ => &mut self.data_error,
            };
            place.get_or_insert(sentence(&error.to_string()));
        }
        let is_good =
            [&self.kind_error, &self.bot_error, &self.data_error].into_iter().all(Option::is_none);
        is_good.then_some((text, bot))
    }
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", letters.as_str())
}

/// The form, with an example of this type.
pub(super) fn form_for(kind: String) -> Markup {
    form(&Typed::new(kind))
}

fn form(typed: &Typed) -> Markup {
    let problem = |id: &str, error: Option<&String>| {
        html! { @if let Some(error) = error { p.problem id={ (id) "-problem" } role="alert" { (error) } } }
    };
    let about = |id: &str, error: Option<&String>| error.map(|_| format!("{id}-problem"));
    let invalid = |error: Option<&String>| error.map(|_| "true");
    let (kind, bot, data) =
        (typed.kind_error.as_ref(), typed.bot_error.as_ref(), typed.data_error.as_ref());
    html! {
        form.fields method="post" action="/publish" {
            @if let Some(id) = typed.sent {
                input type="hidden" name="id" value=(id);
                input type="hidden" name="of" value=(typed.mark());
            }
            label for="publish-type" { "Type" }
            input id="publish-type" name="type" required maxlength="256" value=(typed.kind)
                aria-describedby=[about("type", kind)] aria-invalid=[invalid(kind)];
            (problem("type", kind))
            label for="publish-bot" { "Bot" }
            input id="publish-bot" name="bot" required maxlength="256" value=(typed.bot)
                aria-describedby=[about("bot", bot)] aria-invalid=[invalid(bot)];
            (problem("bot", bot))
            label for="publish-data" { "Data, in JSON" }
            textarea id="publish-data" name="data" rows="4" maxlength=(DATA_MAX) spellcheck="false"
                aria-describedby=[about("data", data)] aria-invalid=[invalid(data)] { (typed.data) }
            (problem("data", data))
            (problem("publish", typed.problem.as_ref()))
            button type="submit" { "Publish" }
        }
    }
}

fn shown(typed: &Typed, caller: &Caller) -> Markup {
    html! {
        (headline("Publish an event", caller.has_token()))
        p { "Fairlane puts the event on the bus. Each pipeline that takes its type queues it for its bot." }
        (form(typed))
    }
}

pub(super) async fn ask(State(api): State<Arc<Api>>, caller: Caller) -> Response {
    let kind = example(&api).unwrap_or_default();
    page("Publish an event", &shown(&Typed::new(kind), &caller))
}

/// A type that a pipeline takes.
pub(super) fn example(api: &Api) -> Option<String> {
    let mut kinds = api.queues.all_configured().filter(|(name, config)| {
        config.enabled && api.queues.takes_of_bus(name) && !crate::config::is_built_in(name)
    });
    let kind = kinds.find_map(|(_, config)| config.events.first());
    kind.map(|glob| glob.replace('*', "created"))
}

pub(super) async fn publish(
    State(api): State<Arc<Api>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let mut fields =
        Parameters::from_request(Request::from_parts(parts.clone(), body), &()).await?;
    let mut field = |name: &str| fields.take(name).unwrap_or_default();
    let mut typed = Typed {
        kind: field("type").trim().to_owned(),
        bot: field("bot").trim().to_owned(),
        data: field("data"),
        ..Typed::default()
    };
    let (sent, of) = (Uuid::parse_str(&field("id")).ok(), field("of"));
    let sent = sent.filter(|_| of == typed.mark());
    let new = sent.unwrap_or_else(Uuid::now_v7);
    let id = new.to_string();
    let Some((text, bot)) = typed.event(&id, &caller) else {
        let page = page("Publish an event", &shown(&typed, &caller));
        return Ok((StatusCode::BAD_REQUEST, page).into_response());
    };
    let stored = match Mode::Structured.read(&parts.headers, text.as_bytes()) {
        Ok(read) => events::store(&api, &caller, &parts, read).await,
        Err(problem) => Err(problem.into()),
    };
    if let Err(Unstored { problem, is_unsure }) = stored {
        let detail = sentence(problem.detail());
        // An earlier try may have stored it too.
        typed.sent = (is_unsure || sent.is_some()).then_some(new);
        typed.problem = Some(match typed.sent {
            Some(id) => format!(
                "{detail} Id of the event: {id}. If you publish it again without a change, it keeps this id, so that bus.dedup drops the repetition."
            ),
            None => detail,
        });
        return Ok(page_for(problem, "Publish an event", &shown(&typed, &caller)));
    }
    if caller.check_scope(crate::config::Scope::Read).is_err() {
        let body = html! {
            (headline("Publish an event", caller.has_token()))
            p role="status" { "Published as event " code { (id) } "." }
            p { a href="/publish" { "Publish another" } }
        };
        return Ok(page("Published", &body));
    }
    let path = format!("{}?bot={}", event::path(&id), bot::encoded(bot.as_str()));
    Ok(Redirect::to(&path).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Scope;

    fn typed(kind: &str, bot: &str, data: &str) -> Typed {
        let [kind, bot, data] = [kind, bot, data].map(str::to_owned);
        Typed { kind, bot, data, ..Typed::default() }
    }

    #[test]
    fn the_event_has_what_was_typed() {
        let mut good = typed("a.b", "bot \"1\"", " [1, 2.50] ");
        let (text, bot) = good.event("7", &Caller::of_tests()).unwrap();
        let event = Event::from_json(text.as_bytes()).unwrap();
        assert_eq!((event.kind(), event.id(), bot.as_str()), ("a.b", "7", "bot \"1\""));
        assert!(text.ends_with(",\"data\":[1, 2.50]}"), "{text}");
        assert!(typed("a", "b", "").event("7", &Caller::of_tests()).is_some());
    }

    #[test]
    fn each_wrong_field_has_its_error_beside_it() {
        let caller = Caller::new("shop", vec![Scope::Publish], &["shop-*".to_owned()]);
        let mut wrong = typed("", "shop-1", "{ nope");
        assert!(wrong.event("7", &caller).is_none());
        let mut foreign = typed("a", "other", "1");
        assert!(foreign.event("7", &caller).is_none());
        let page = form(&wrong).into_string();
        assert!(page.contains("aria-describedby=\"type-problem\" aria-invalid=\"true\""), "{page}");
        assert!(page.contains("id=\"data-problem\" role=\"alert\">This is not JSON:"), "{page}");
        assert!(page.contains("{ nope</textarea>") && !page.contains("bot-problem"), "{page}");
        let page = form(&foreign).into_string();
        assert!(page.contains("This token is not for this bot."), "{page}");
        assert!(!page.contains("data-problem"), "{page}");
    }
}
