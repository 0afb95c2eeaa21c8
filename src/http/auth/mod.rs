//! Authentication and authorisation: the caller of a request, and its rights.
//!
//! With `auth.tokens`, every route except the open ones requires a bearer token with its scope.
//! Without `auth.tokens`, every client that reaches the listener may do everything. Requests that a
//! page of another site can make a browser send are then refused: those with a foreign `Host` (DNS
//! rebinding) or a foreign `Origin` (CSRF).
//!
//! The head of a request identifies its sender ([`Identity`]), before the body is read and before
//! the sender counts as a caller.
//!
//! A browser has a [`session`] in a cookie ([`Access::COOKIE`]). The cookie is accepted only for the
//! pages and for `GET` requests with the scope `read`, and only if no page of another site sent the
//! request.
//!
//! Fairlane keeps only hashes of the tokens, and compares them in constant time. Neither the tokens
//! nor the texts that clients send as tokens are ever logged.

mod caller;
mod identity;
mod session;
mod site;

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{RawPathParams, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tracing::warn;

pub(crate) use self::caller::Caller;
pub(super) use self::identity::{Identity, Stranger};
pub(super) use self::session::HOURS as SESSION_HOURS;
use self::session::Sessions;
pub(super) use self::site::{check_site, refuse_foreign};
use super::admit::AdmissionGate;
use super::problem::{Kind, Problem};
use crate::admission::quota::Taken;
use crate::config::{Config, Scope, TokenConfig};
use crate::id::BotId;
use crate::pool::open::LeaseError;

/// Shortest token, in bytes.
const TOKEN_MIN_BYTES: usize = 16;
/// Longest token, in bytes.
const TOKEN_MAX_BYTES: usize = 4_096;

/// The reason why the configured tokens cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file cannot be read.
    #[error("auth.tokens: the file {} of token {name:?} cannot be read: {source}", path.display())]
    Read {
        /// The token.
        name: String,
        /// Its file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A token is too short or too long, or contains characters that a header cannot carry.
    #[error(
        "auth.tokens: the file {} of token {name:?} holds {problem}; put 16 to 4096 letters and digits there, such as `openssl rand -hex 32` makes",
        path.display()
    )]
    Unusable {
        /// The token.
        name: String,
        /// Its file.
        path: PathBuf,
        /// The problem, without the content of the file.
        problem: &'static str,
    },
    /// Two files contain the same token, so its rights are ambiguous.
    #[error("auth.tokens: tokens {first:?} and {second:?} are the same; make another for one")]
    Twice {
        /// One token.
        first: String,
        /// The other.
        second: String,
    },
}

/// The tokens and their rights.
pub(crate) struct Access {
    /// Sites whose pages may count views and read totals.
    cors_origins: Vec<String>,
    /// The digest of each token, and its bearer.
    tokens: Vec<([u8; 32], Caller)>,
    /// The index in `tokens` by a keyed hash of the token's text.
    places: HashMap<u64, usize>,
    seed: RandomState,
    sessions: Sessions,
    /// The host names that requests may use while there are no tokens, in lower case.
    hosts: Vec<String>,
    anonymous: Caller,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl Access {
    /// The cookie that contains a browser's session.
    pub(super) const COOKIE: &str = "fairlane-token";

    /// Reads the files of the tokens.
    pub(crate) fn open(config: &Config) -> Result<Self, AuthError> {
        let mut tokens: Vec<([u8; 32], Caller)> = Vec::new();
        let (mut places, seed) = (HashMap::new(), RandomState::new());
        for token in &config.auth.tokens {
            let text = read_token(token)?;
            let digest = Sha256::digest(&text).into();
            if let Some((_, first)) = tokens.iter().find(|(other, _)| *other == digest) {
                let (first, second) = (first.rights.name.clone(), token.name.clone());
                return Err(AuthError::Twice { first, second });
            }
            places.insert(seed.hash_one(&*text), tokens.len());
            tokens.push((digest, Caller::of(token, &config.http.cors_origins)));
        }
        Ok(Self {
            cors_origins: config.http.cors_origins.clone(),
            tokens,
            places,
            seed,
            sessions: Sessions::default(),
            hosts: config.http.hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            anonymous: Caller::anonymous(),
        })
    }

    /// Sites whose pages may count views and read totals.
    pub(super) fn cors_origins(&self) -> &[String] {
        &self.cors_origins
    }

    /// Whether requests need a token.
    pub(super) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// The digest of a known token, and its owner.
    fn known(&self, token: &[u8]) -> Option<&([u8; 32], Caller)> {
        // The hash is keyed, so that the duration does not reveal which token nearly matched.
        let place = self.places.get(&self.seed.hash_one(token))?;
        let known = self.tokens.get(*place)?;
        let digest: [u8; 32] = Sha256::digest(token).into();
        bool::from(known.0.ct_eq(&digest)).then_some(known)
    }
}

fn read_token(token: &TokenConfig) -> Result<Vec<u8>, AuthError> {
    let (name, path) = (token.name.clone(), token.token_file.clone());
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(source) => return Err(AuthError::Read { name, path, source }),
    };
    let text = text.trim_ascii();
    let problem = if text.len() < TOKEN_MIN_BYTES {
        Some("fewer than 16 bytes")
    } else if text.len() > TOKEN_MAX_BYTES {
        Some("more than 4096 bytes")
    } else if !text.iter().all(u8::is_ascii_graphic) {
        Some("blanks or characters beyond ASCII")
    } else {
        None
    };
    if let Some(problem) = problem {
        return Err(AuthError::Unusable { name, path, problem });
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(&path).map_or(0, |about| about.permissions().mode());
        if mode & 0o004 != 0 {
            let file = path.display();
            warn!(token = name, %file, "every user can read the file of a token; chmod o-r it");
        }
    }
    Ok(text.to_vec())
}

/// Refuses callers without access to the bot in the path. If the path names no bot, the caller
/// needs access to all bots.
pub(super) async fn cover(
    caller: Caller,
    path: RawPathParams,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    match path.iter().find(|(name, _)| *name == "bot") {
        Some((name, text)) => {
            let bot =
                BotId::parse(text).map_err(|error| Problem::field(name, error.to_string()))?;
            caller.check_bot(&bot)?;
        }
        None => caller.check_all_bots()?,
    }
    Ok(next.run(request).await)
}

/// The requirements of a guarded route.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) access: Arc<Access>,
    pub(super) gate: Arc<AdmissionGate>,
    pub(super) scope: Scope,
    /// Another scope that suffices too.
    pub(super) or: Option<Scope>,
}

impl Guard {
    /// The caller of a request, if it has one of the scopes and its quota is not used up.
    /// `browses`: a session is accepted too.
    pub(super) fn admit(
        &self,
        request: &mut Request,
        browses: bool,
    ) -> Result<[Option<Taken>; 2], Problem> {
        let identity = request.extensions().get::<Identity>();
        let unguarded = || Problem::new(Kind::Internal, "the sender was not identified");
        let caller = identity.ok_or_else(unguarded)?.admitted(browses)?.clone();
        if !self.or.is_some_and(|or| caller.rights.scopes.contains(&or)) {
            caller.check_scope(self.scope)?;
        }
        if let Some(public) = &caller.rights.public {
            public.check_origin(request.headers())?;
            let rates = [public.address_rate, public.rate];
            self.gate.charge_public(&caller, rates, request)?;
        }
        if self.scope != Scope::Read {
            self.access.refuse_other_pages(request)?;
        }
        let charged = self.gate.charge(&caller, request)?;
        request.extensions_mut().insert(caller);
        Ok(charged)
    }
}

/// Admits requests whose token has the scope.
pub(super) async fn guard(
    State(guard): State<Guard>,
    mut request: Request,
    next: Next,
) -> Response {
    // The cookie suffices only for reading, because a link or an image of another site can make a
    // browser send it.
    let browses = guard.scope == Scope::Read && request.method() == Method::GET;
    match guard.admit(&mut request, browses) {
        Ok(_taken) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

/// Lets requests through that know the name of a lease. Other methods than that of the routes do
/// nothing, and are answered as everywhere.
pub(super) async fn receive(request: Request, next: Next) -> Response {
    match request.extensions().get() {
        Some(Identity::Receiver) => next.run(request).await,
        _ if request.method() != Method::POST => next.run(request).await,
        _ => Problem::from(LeaseError::NoSuch).into_response(),
    }
}
