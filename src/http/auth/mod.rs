//! Authentication and authorisation: the caller of a request, and its rights.
//!
//! With `auth.tokens`, every route except the open ones requires a bearer token with its scope.
//! Without `auth.tokens`, every client that reaches the listener may do everything. Requests that a
//! page of another site can make a browser send are then refused: those with a foreign `Host` (DNS
//! rebinding) or a foreign `Origin` (CSRF).
//!
//! A browser sends its token in a cookie ([`Access::COOKIE`]). The cookie is accepted only for the
//! pages and for `GET` requests with the scope `read`, and only if no page of another site sent the
//! request.
//!
//! Fairlane keeps only hashes of the tokens. A sent token is compared with all of them by SHA-256,
//! in constant time. Neither the tokens nor the texts that clients send as tokens are ever logged.

mod caller;
mod site;

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use tracing::warn;

use self::caller::ANONYMOUS;
pub(crate) use self::caller::Caller;
pub(super) use self::site::{check_site, refuse_foreign};
use super::admit::AdmissionGate;
use super::listen::Peer;
use super::problem::{Kind, Problem};
use crate::admission::quota::Taken;
use crate::config::{Config, Scope, TokenConfig};
use crate::id::BotId;

/// Shortest token, in bytes.
const TOKEN_MIN_BYTES: usize = 16;
/// Longest token, in bytes.
const TOKEN_MAX_BYTES: usize = 4_096;
/// Time that a browser keeps a token, in hours.
pub(super) const COOKIE_HOURS: u32 = 12;

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
    tokens: Vec<([u8; 32], Caller)>,
    /// The index in `tokens` by a keyed hash of the token's text.
    claims: HashMap<u64, usize>,
    seed: RandomState,
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
    /// The cookie that contains a browser's token.
    pub(super) const COOKIE: &str = "fairlane-token";

    /// Reads the files of the tokens.
    pub(crate) fn open(config: &Config) -> Result<Self, AuthError> {
        let mut tokens: Vec<([u8; 32], Caller)> = Vec::new();
        let (mut claims, seed) = (HashMap::new(), RandomState::new());
        for token in &config.auth.tokens {
            let text = read_token(token)?;
            let digest = Sha256::digest(&text).into();
            if let Some((_, first)) = tokens.iter().find(|(other, _)| *other == digest) {
                let (first, second) = (first.rights.name.clone(), token.name.clone());
                return Err(AuthError::Twice { first, second });
            }
            claims.insert(seed.hash_one(&*text), tokens.len());
            tokens.push((digest, Caller::of(token, &config.http.cors_origins)));
        }
        let all = vec![Scope::Publish, Scope::Read, Scope::Operate];
        Ok(Self {
            cors_origins: config.http.cors_origins.clone(),
            tokens,
            claims,
            seed,
            hosts: config.http.hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            anonymous: Caller::new(ANONYMOUS, all, &["*".to_owned()]),
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

    /// The caller of a request, if it has one of the scopes. `browses`: a token in a cookie is
    /// accepted too.
    pub(super) fn admit(
        &self,
        request: &Request,
        (scope, or): (Scope, Option<Scope>),
        browses: bool,
    ) -> Result<Caller, Problem> {
        let caller = self.caller(request.uri(), request.headers(), browses)?;
        if !or.is_some_and(|or| caller.rights.scopes.contains(&or)) {
            caller.check_scope(scope)?;
        }
        if let Some(public) = &caller.rights.public {
            public.check_origin(request.headers())?;
        }
        let address = request.extensions().get().map(|Peer(address)| *address);
        Ok(Caller { address, ..caller.clone() })
    }

    /// The name and value of the cookie for a known token.
    pub(super) fn cookie(&self, token: &str) -> Option<String> {
        self.known(token.as_bytes())?;
        Some(format!("{}={}", Self::COOKIE, BASE64_URL_SAFE_NO_PAD.encode(token)))
    }

    /// The caller of a request, identified by its token.
    fn caller(&self, uri: &Uri, headers: &HeaderMap, browses: bool) -> Result<&Caller, Problem> {
        if self.tokens.is_empty() {
            return Ok(&self.anonymous);
        }
        let token = match bearer(headers) {
            None if browses => kept(uri, headers)?,
            token => token.map(<[u8]>::to_vec),
        };
        let Some(token) = token else {
            let detail = "send a token in the header `Authorization: Bearer …`";
            let problem = Problem::new(Kind::Unauthorized, detail);
            let challenge = HeaderValue::from_static("Bearer realm=\"fairlane\"");
            return Err(problem.header(header::WWW_AUTHENTICATE, challenge));
        };
        self.known(&token).ok_or_else(|| {
            let problem = Problem::new(Kind::Unauthorized, "the token is not known here");
            let challenge = "Bearer realm=\"fairlane\", error=\"invalid_token\"";
            let challenge = HeaderValue::from_static(challenge);
            problem.header(header::WWW_AUTHENTICATE, challenge)
        })
    }

    /// The probable owner of a request's token, found by a quick lookup that proves nothing. It
    /// serves to attribute refusals and to lower the class of a request, never to grant access.
    pub(super) fn claimed(&self, headers: &HeaderMap) -> Option<&Caller> {
        let place = self.claims.get(&self.seed.hash_one(bearer(headers)?))?;
        self.tokens.get(*place).map(|(_, caller)| caller)
    }

    /// The owner of a token.
    fn known(&self, token: &[u8]) -> Option<&Caller> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        // Compares with every token, so that the duration does not reveal which one nearly matched.
        let (mut found, mut place) = (Choice::from(0), 0_u64);
        for (at, (known, _)) in (0_u64..).zip(&self.tokens) {
            let equal = known.ct_eq(&digest);
            place.conditional_assign(&at, equal);
            found |= equal;
        }
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        self.tokens.get(place).filter(|_| found.into()).map(|(_, caller)| caller)
    }
}

/// The bearer token in the header.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?;
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// The token in the cookie. Old browsers send the cookie with requests from pages of other sites
/// too, so such requests are refused.
fn kept(uri: &Uri, headers: &HeaderMap) -> Result<Option<Vec<u8>>, Problem> {
    let mut cookies = headers.get_all(header::COOKIE).iter();
    let cookie = cookies.find_map(|value| {
        let mut pairs = value.to_str().ok()?.split(';');
        pairs.find_map(|pair| pair.trim().strip_prefix(Access::COOKIE)?.strip_prefix('='))
    });
    let Some(token) = cookie.and_then(|text| BASE64_URL_SAFE_NO_PAD.decode(text).ok()) else {
        return Ok(None);
    };
    refuse_foreign(uri, headers)?;
    Ok(Some(token))
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
    /// `browses`: a token in a cookie is accepted too.
    pub(super) fn admit(
        &self,
        request: &Request,
        browses: bool,
    ) -> Result<(Caller, [Option<Taken>; 2]), Problem> {
        let caller = self.access.admit(request, (self.scope, self.or), browses)?;
        if let Some(public) = &caller.rights.public {
            let rates = [public.address_rate, public.rate];
            self.gate.charge_public(&caller.rights.name, rates, request)?;
        }
        let token = caller.has_token().then_some(&*caller.rights.name);
        let charged = self.gate.charge(token, request)?;
        Ok((caller, charged))
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
    match guard.admit(&request, browses) {
        Ok((caller, _taken)) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    }
}
