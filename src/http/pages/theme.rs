//! The colours of the pages: those that the device prefers, or always light or dark. The choice is
//! in a cookie, and the server renders it, so that no page appears in the wrong colours first.

use std::cell::RefCell;

use axum::extract::{FromRequest as _, Request};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};

use super::super::auth::refuse_foreign;
use super::super::parameters::Parameters;
use super::super::problem::Problem;
use super::{Refusal, browses, local, place};

const COOKIE: &str = "fairlane-theme";
/// A year, in seconds.
const AGE: u32 = 365 * 86_400;

tokio::task_local! {
    /// Set while a request of a browser is answered.
    static LOOK: RefCell<Look>;
}

/// How to render the page of a request.
#[derive(Debug, Default, Clone)]
pub(super) struct Look {
    theme: Theme,
    /// The page, for the way back after a choice.
    place: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Theme {
    #[default]
    Auto,
    Light,
    Dark,
}

impl Theme {
    const ALL: [Self; 3] = [Self::Auto, Self::Light, Self::Dark];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Light => "light",
            Self::Dark => "dark",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|theme| theme.as_str() == text)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Auto => "Auto",
            Self::Light => "Light",
            Self::Dark => "Dark",
        }
    }

    /// Of the cookie; `Auto` without one, or with an unknown value.
    fn of(headers: &HeaderMap) -> Self {
        let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
        let mut cookies = lines.flat_map(|line| line.split(';')).map(str::trim);
        cookies
            .find_map(|cookie| Self::parse(cookie.strip_prefix(COOKIE)?.strip_prefix('=')?))
            .unwrap_or_default()
    }
}

impl Look {
    /// The look of the page that is rendered now.
    pub(super) fn now() -> Self {
        LOOK.try_with(|look| look.borrow().clone()).unwrap_or_default()
    }

    /// The value of `data-theme`; `None`: the device decides.
    pub(super) fn forced(&self) -> Option<&'static str> {
        (self.theme != Theme::Auto).then(|| self.theme.as_str())
    }

    /// The value of the element `meta` with the name `color-scheme`.
    pub(super) fn schemes(&self) -> &'static str {
        self.forced().unwrap_or("light dark")
    }

    /// The form that changes it.
    pub(super) fn switch(&self) -> Markup {
        html! {
            form.theme method="post" action="/theme" {
                input type="hidden" name="to" value=(local(&self.place));
                span id="theme" { "Theme" }
                div role="group" aria-labelledby="theme" {
                    @for theme in Theme::ALL {
                        button type="submit" name="theme" value=(theme.as_str())
                            aria-pressed=(if theme == self.theme { "true" } else { "false" }) { (theme.name()) }
                    }
                }
            }
        }
    }
}

/// Notes the look for the pages that answer a request.
pub(in super::super) async fn dress(request: Request, next: Next) -> Response {
    if !browses(request.headers()) {
        return next.run(request).await;
    }
    // A form has no page of its own to return to.
    let is_page = request.method() == Method::GET;
    let look = Look {
        theme: Theme::of(request.headers()),
        place: if is_page { place(request.uri()).to_owned() } else { "/".to_owned() },
    };
    LOOK.scope(RefCell::new(look), next.run(request)).await
}

/// Sets the cookie and returns to the page.
pub(super) async fn choose(request: Request) -> Result<Response, Refusal> {
    refuse_foreign(request.uri(), request.headers())?;
    let mut fields = Parameters::from_request(request, &()).await?;
    let wish = fields.take("theme").unwrap_or_default();
    let Some(theme) = Theme::parse(&wish) else {
        return Err(Problem::field("theme", "write auto, light or dark".to_owned()).into());
    };
    let to = fields.take("to").unwrap_or_default();
    let age = if theme == Theme::Auto { 0 } else { AGE };
    // Also sent after a link from another site, which else would show the wrong colours.
    let cookie =
        format!("{COOKIE}={}; Max-Age={age}; Path=/; HttpOnly; SameSite=Lax", theme.as_str());
    Ok(([(header::SET_COOKIE, cookie)], Redirect::to(local(&to))).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cookie_decides_and_a_strange_one_does_not() {
        let of = |cookie: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::COOKIE, cookie.parse().unwrap());
            Theme::of(&headers)
        };
        assert_eq!(of("fairlane-theme=dark"), Theme::Dark);
        assert_eq!(of("a=b; fairlane-theme=light; c=d"), Theme::Light);
        for strange in ["", "fairlane-theme=", "fairlane-theme=\"><b>", "xfairlane-theme=dark"] {
            assert_eq!(of(strange), Theme::Auto, "{strange}");
        }
        assert_eq!(Theme::of(&HeaderMap::new()), Theme::Auto);
    }

    #[test]
    fn the_switch_names_the_theme_in_use() {
        let look = Look { theme: Theme::Dark, place: "/bots/a?b=\"".to_owned() };
        let form = look.switch().into_string();
        assert!(form.contains("value=\"dark\" aria-pressed=\"true\""), "{form}");
        assert_eq!(form.matches("aria-pressed=\"true\"").count(), 1, "{form}");
        assert!(form.contains("value=\"/bots/a?b=&quot;\""), "{form}");
        assert_eq!((look.forced(), look.schemes()), (Some("dark"), "dark"));
        assert_eq!((Look::default().forced(), Look::default().schemes()), (None, "light dark"));
    }
}
