//! The caller of a request, and its rights.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};

use super::super::problem::{Kind, Problem};
use super::site::text;
use crate::admission::Class;
use crate::admission::quota::Quota;
use crate::config::{ANONYMOUS, Scope, TokenConfig, WEIGHT_MAX};
use crate::expression::Glob;
use crate::id::BotId;
use crate::rate::Weight;

/// The caller of a request, and its rights.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(super) rights: Arc<Rights>,
    /// The address of the client; `None` if it is unknown.
    pub(super) address: Option<IpAddr>,
}

#[derive(Debug)]
pub(super) struct Rights {
    pub(super) name: String,
    /// The bounds of a public token: one with the scope `count`, which is not secret.
    pub(super) public: Option<Public>,
    pub(super) class: Option<Class>,
    pub(super) scopes: Vec<Scope>,
    pub(super) bots: Vec<Glob>,
    pub(super) all_bots: bool,
    /// Maximum weight that it may give to a bot.
    pub(super) max_weight: u32,
}

impl Caller {
    pub(in super::super) fn new(name: &str, scopes: Vec<Scope>, bots: &[String]) -> Self {
        let rights = Rights {
            name: name.to_owned(),
            public: None,
            class: None,
            scopes,
            bots: bots.iter().map(|glob| Glob::new(glob)).collect(),
            all_bots: bots.iter().any(|glob| glob == "*"),
            max_weight: WEIGHT_MAX,
        };
        Self { rights: Arc::new(rights), address: None }
    }

    /// The caller with this token.
    pub(super) fn of(token: &TokenConfig, cors_origins: &[String]) -> Self {
        let Self { rights, address } = Self::new(&token.name, token.scopes.clone(), &token.bots);
        let rights = Arc::try_unwrap(rights).unwrap_or_else(|_| unreachable!("it is new"));
        let public = token.scopes.contains(&Scope::Count).then(|| Public {
            origins: if token.origins.is_empty() {
                cors_origins.to_vec()
            } else {
                token.origins.clone()
            },
            rate: Quota { rate: token.rate, in_flight: 0 },
            address_rate: Quota { rate: token.address_rate, in_flight: 0 },
        });
        let (class, max_weight) = (token.class, token.max_weight);
        Self { rights: Arc::new(Rights { public, class, max_weight, ..rights }), address }
    }

    /// Every caller, if there are no tokens.
    pub(in super::super) fn anonymous() -> Self {
        let all = vec![Scope::Publish, Scope::Read, Scope::Operate];
        Self::new(ANONYMOUS, all, &["*".to_owned()])
    }

    /// Whether its token is public.
    pub(in super::super) fn is_public(&self) -> bool {
        self.rights.public.is_some()
    }

    /// The class of a request by this caller, from the class of the route. The token may lower it,
    /// but not that of critical requests (p0).
    pub(in super::super) fn class(&self, of_route: Class) -> Class {
        match self.rights.class {
            Some(class) if of_route != Class::P0 => class.max(of_route),
            _ => of_route,
        }
    }

    /// A caller with all rights.
    #[cfg(test)]
    pub(in super::super) fn of_tests() -> Self {
        let all = vec![Scope::Publish, Scope::Read, Scope::Operate];
        Self::new("tests", all, &["*".to_owned()])
    }

    /// The name of the token.
    pub(in super::super) fn name(&self) -> &str {
        &self.rights.name
    }

    /// Whether the caller has a token.
    pub(in super::super) fn has_token(&self) -> bool {
        self.rights.name != ANONYMOUS
    }

    pub(in super::super) fn check_scope(&self, scope: Scope) -> Result<(), Problem> {
        if self.rights.scopes.contains(&scope) {
            return Ok(());
        }
        let detail = format!("token {:?} has no scope {:?}", self.rights.name, scope.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Whether the caller has access to all bots.
    pub(in super::super) fn covers_all(&self) -> bool {
        self.rights.all_bots
    }

    /// Whether the caller has access to a bot.
    pub(crate) fn covers(&self, bot: &BotId) -> bool {
        self.covers_all() || self.glob_of(bot).is_some()
    }

    /// The place of the glob that gives access to a bot.
    pub(in super::super) fn glob_of(&self, bot: &BotId) -> Option<usize> {
        self.rights.bots.iter().position(|glob| glob.matches(bot.as_str()))
    }

    /// Refuses callers without access to a bot.
    pub(crate) fn check_bot(&self, bot: &BotId) -> Result<(), Problem> {
        if self.covers(bot) {
            return Ok(());
        }
        let detail = format!("token {:?} is not for bot {:?}", self.rights.name, bot.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Refuses callers without access to all bots.
    pub(crate) fn check_all_bots(&self) -> Result<(), Problem> {
        if self.covers_all() {
            return Ok(());
        }
        let detail = format!(
            "token {:?} is not for all bots (bots = [\"*\"]), as what concerns a whole pipeline demands",
            self.rights.name
        );
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Refuses to give a bot more weight than the token allows.
    pub(in super::super) fn check_weight(&self, weight: Weight) -> Result<(), Problem> {
        let Rights { name, max_weight, .. } = &*self.rights;
        if weight <= Weight::from(*max_weight) {
            return Ok(());
        }
        let detail = format!(
            "token {name:?} sets weights up to {max_weight}; use a token for all bots (bots = [\"*\"]), or raise max_weight of this one in auth.tokens"
        );
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// The address of the client.
    pub(in super::super) fn address(&self) -> Option<IpAddr> {
        self.address
    }
}

/// The caller that [`guard`](super::guard) identified. A route without a guard answers 500.
impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get().cloned();
        caller.ok_or_else(|| Problem::new(Kind::Internal, "this route is not guarded"))
    }
}

/// The bounds of a public token.
#[derive(Debug)]
pub(super) struct Public {
    origins: Vec<String>,
    /// The rate of all its requests.
    pub(super) rate: Quota,
    /// The rate of its requests from one address.
    pub(super) address_rate: Quota,
}

impl Public {
    /// Refuses requests that do not come from a page of its sites.
    pub(super) fn check_origin(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let origin = text(headers, &header::ORIGIN).unwrap_or("(none)");
        if self.origins.iter().any(|known| known == origin) {
            return Ok(());
        }
        let detail = format!(
            "the token is for pages of certain origins, not of {origin:?}; http.cors_origins and the token's origins name them"
        );
        Err(Problem::new(Kind::CrossSite, detail))
    }
}
