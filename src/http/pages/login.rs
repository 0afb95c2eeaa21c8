//! The page that asks for a token.

use std::sync::Arc;

use axum::extract::{FromRequest as _, Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::{Router, routing};
use maud::html;
use reqwest::Url;
use serde::Deserialize;

use super::super::auth::{Access, SESSION_HOURS, refuse_foreign};
use super::super::extract::Query;
use super::super::parameters::Parameters;
use super::{Refusal, local, page, place};

pub(super) fn routes(access: Arc<Access>) -> Router {
    Router::new()
        .route("/login", routing::get(show).post(enter))
        .route("/logout", routing::post(leave))
        .with_state(access)
}

/// The login path for a request without a token.
pub(super) fn path(uri: &Uri) -> String {
    // `Url` is used only to encode the query.
    let Ok(mut url) = Url::parse("http://fairlane/login") else { return "/login".to_owned() };
    url.query_pairs_mut().append_pair("to", place(uri));
    format!("/login?{}", url.query().unwrap_or_default())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct To {
    /// The requested page.
    #[serde(default)]
    to: String,
}

impl To {
    fn path(&self) -> &str {
        local(&self.to)
    }
}

async fn show(State(access): State<Arc<Access>>, Query(to): Query<To>) -> Response {
    if !access.has_tokens() {
        return Redirect::to(to.path()).into_response();
    }
    form(&to, StatusCode::OK, None)
}

fn form(to: &To, status: StatusCode, problem: Option<&str>) -> Response {
    let body = html! {
        h1 { "Log in" }
        form.login method="post" action="/login" {
            input type="hidden" name="to" value=(to.path());
            label for="token" { "Token" }
            input id="token" name="token" type="password" required autofocus
                autocomplete="current-password" aria-describedby="about";
            p #about { "A token of " code { "auth.tokens" } " with the scope read. Changes need the scope operate." }
            @if let Some(problem) = problem { p.problem role="alert" { (problem) } }
            button type="submit" { "Log in" }
        }
    };
    (status, page("Log in", &body)).into_response()
}

async fn enter(State(access): State<Arc<Access>>, request: Request) -> Result<Response, Refusal> {
    refuse_foreign(request.uri(), request.headers())?;
    let has_query = request.uri().query().is_some();
    // A proxy may end TLS, so only the browser knows.
    let origin = request.headers().get(header::ORIGIN);
    let secure = if origin.is_some_and(|origin| origin.as_bytes().starts_with(b"https://")) {
        "; Secure"
    } else {
        ""
    };
    let mut fields = Parameters::from_request(request, &()).await?;
    let to = To { to: fields.take("to").unwrap_or_default() };
    // A token in a URL would end up in logs.
    let token = fields.take("token").filter(|_| !has_query).unwrap_or_default();
    match access.open_session(token.trim()) {
        Some(session) => {
            let (name, age) = (Access::COOKIE, SESSION_HOURS * 3_600);
            let cookie = format!(
                "{name}={session}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{secure}"
            );
            Ok(([(header::SET_COOKIE, cookie)], Redirect::to(to.path())).into_response())
        }
        None => Ok(form(&to, StatusCode::UNAUTHORIZED, Some("Fairlane does not know this token."))),
    }
}

async fn leave(request: Request) -> Result<Response, Refusal> {
    refuse_foreign(request.uri(), request.headers())?;
    let cookie = format!("{}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict", Access::COOKIE);
    Ok(([(header::SET_COOKIE, cookie)], Redirect::to("/login")).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_login_comes_a_page_of_this_server_only() {
        let path = |to: &str| To { to: to.to_owned() }.path().to_owned();
        assert_eq!(path("/notifications?by=hour"), "/notifications?by=hour");
        assert_eq!(path("/bots/a%20b?subscriber=u"), "/bots/a%20b?subscriber=u");
        for wrong in [
            "",
            "//evil.example/",
            "/\\evil.example",
            "https://evil.example/",
            "/notifications\r\nb",
            "/notificationsx",
            "/send_delayed?delay=0",
        ] {
            assert_eq!(path(wrong), "/", "{wrong:?}");
        }
        let uri = "http://h/notifications?by=hour&x=1".parse().unwrap();
        assert_eq!(super::path(&uri), "/login?to=%2Fnotifications%3Fby%3Dhour%26x%3D1");
    }
}
