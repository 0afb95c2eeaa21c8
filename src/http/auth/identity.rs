//! The sender of a request, from its head alone: before the body is read and before any store is
//! asked.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};

use super::super::listen::Peer;
use super::super::problem::{Kind, Problem};
use super::site::refuse_foreign;
use super::{Access, Caller};

/// What the head of a request proves about its sender.
#[derive(Debug, Clone)]
pub(in super::super) enum Identity {
    /// It has a known token. Without tokens, every sender is such a caller.
    Caller(Caller),
    /// A browser with a session: valid for pages and for reading.
    Browser(Caller),
    /// It knows the name of a lease, which is a signed capability.
    Receiver,
    /// It proves nothing.
    Stranger(Stranger),
}

/// Why a sender is a stranger.
#[derive(Debug, Clone)]
pub(in super::super) enum Stranger {
    /// It sent no token.
    NoToken,
    /// Its token is unknown.
    UnknownToken,
    /// A page of another site sent the request of a browser with a session.
    OtherSite(Box<Problem>),
}

impl Identity {
    /// The caller, if it is known.
    pub(in super::super) fn caller(&self) -> Option<&Caller> {
        match self {
            Self::Caller(caller) | Self::Browser(caller) => Some(caller),
            Self::Receiver | Self::Stranger(_) => None,
        }
    }

    pub(in super::super) fn is_stranger(&self) -> bool {
        matches!(self, Self::Stranger(_))
    }

    /// The caller for a route that asks for a token. `browses`: a session counts too.
    pub(super) fn admitted(&self, browses: bool) -> Result<&Caller, Problem> {
        let (detail, challenge) = match self {
            Self::Caller(caller) => return Ok(caller),
            Self::Browser(caller) if browses => return Ok(caller),
            Self::Stranger(Stranger::OtherSite(problem)) if browses => {
                return Err(Problem::clone(problem));
            }
            Self::Stranger(Stranger::UnknownToken) => (
                "the token is not known here",
                "Bearer realm=\"fairlane\", error=\"invalid_token\"",
            ),
            _ => (
                "send a token in the header `Authorization: Bearer …`",
                "Bearer realm=\"fairlane\"",
            ),
        };
        let problem = Problem::new(Kind::Unauthorized, detail);
        Err(problem.header(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge)))
    }
}

impl Access {
    /// The sender of a request.
    pub(in super::super) fn identify(&self, request: &Request) -> Identity {
        let (uri, headers) = (request.uri(), request.headers());
        let address: Option<IpAddr> = request.extensions().get().map(|Peer(address)| *address);
        let from = |caller: &Caller| Caller { address, ..caller.clone() };
        if self.tokens.is_empty() {
            return Identity::Caller(from(&self.anonymous));
        }
        if let Some(token) = bearer(headers) {
            let known = self.known(token).map(|(_, caller)| Identity::Caller(from(caller)));
            return known.unwrap_or(Identity::Stranger(Stranger::UnknownToken));
        }
        match cookie(headers).and_then(|text| self.of_session(text)) {
            None => Identity::Stranger(Stranger::NoToken),
            // Pages of other sites may make an old browser send its cookies.
            Some(caller) => match refuse_foreign(uri, headers) {
                Ok(()) => Identity::Browser(from(caller)),
                Err(problem) => Identity::Stranger(Stranger::OtherSite(Box::new(problem))),
            },
        }
    }
}

/// The token in the header.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?;
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// The session in the cookie.
fn cookie(headers: &HeaderMap) -> Option<&str> {
    headers.get_all(header::COOKIE).iter().find_map(|value| {
        let mut pairs = value.to_str().ok()?.split(';');
        pairs.find_map(|pair| pair.trim().strip_prefix(Access::COOKIE)?.strip_prefix('='))
    })
}
