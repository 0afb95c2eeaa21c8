//! The check of the site that a request comes from.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::super::cors::AllowedOrigin;
use super::super::problem::{Kind, Problem};
use super::Access;

impl Access {
    /// While there are no tokens, refuses requests that a page of another site can make a browser
    /// send. `is_allowed`: the page belongs to a site that may call this route.
    fn check_site(&self, uri: &Uri, headers: &HeaderMap, is_allowed: bool) -> Result<(), Problem> {
        if !self.tokens.is_empty() {
            return Ok(());
        }
        let host = host(uri, headers);
        if !self.is_known(host) {
            let detail = format!(
                "{host:?} is no name of this server; call it by its address or localhost, add the name to http.hosts, or set up auth.tokens"
            );
            return Err(Problem::new(Kind::UnknownHost, detail));
        }
        let elsewhere = text(headers, &FETCH_SITE).is_some_and(|site| site == "cross-site");
        if !is_allowed && (elsewhere || is_foreign(host, headers)) {
            let detail = "nothing was done: a page of another site sent the request, and this server has no auth.tokens; set up auth.tokens";
            return Err(Problem::new(Kind::CrossSite, detail));
        }
        Ok(())
    }

    /// Without tokens: refuses to let a page of another site change anything, by a link or an image
    /// too. `check_site` refuses other sites everywhere, but not other pages of the same site.
    pub(super) fn refuse_other_pages(&self, request: &Request) -> Result<(), Problem> {
        if self.has_tokens() || request.extensions().get::<AllowedOrigin>().is_some() {
            return Ok(());
        }
        refuse_foreign(request.uri(), request.headers())
    }

    fn is_known(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let literal = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        literal.unwrap_or(name).parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self.hosts.iter().any(|known| known == name)
    }
}

/// Refuses requests from pages of other servers.
pub(in super::super) fn refuse_foreign(uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    let ours = ["same-origin", "none"];
    let elsewhere = text(headers, &FETCH_SITE).is_some_and(|site| !ours.contains(&site));
    if elsewhere || is_foreign(host(uri, headers), headers) {
        let detail = "a page of another site sent this; open the page of this server";
        return Err(Problem::new(Kind::CrossSite, detail));
    }
    Ok(())
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("(not text)"))
}

/// The host name and port in the request.
fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> &'a str {
    let authority = uri.authority().map(axum::http::uri::Authority::as_str);
    authority.or(text(headers, &header::HOST)).unwrap_or_default()
}

/// Whether the page that sent the request belongs to another server than `host`.
fn is_foreign(host: &str, headers: &HeaderMap) -> bool {
    text(headers, &header::ORIGIN).is_some_and(|origin| {
        let rest = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
        rest.is_none_or(|rest| !rest.eq_ignore_ascii_case(host))
    })
}

const FETCH_SITE: header::HeaderName = header::HeaderName::from_static("sec-fetch-site");

/// Removes the port: `localhost:80` becomes `localhost`, `[::1]:80` becomes `[::1]`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Refuses requests that a page of another site can have sent, unless the site may call the route.
pub(in super::super) async fn check_site(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Response {
    let is_allowed = request.extensions().get::<AllowedOrigin>().is_some();
    match access.check_site(request.uri(), request.headers(), is_allowed) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}
