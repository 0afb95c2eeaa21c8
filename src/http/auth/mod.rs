//! Who may do what.
//!
//! With `auth.tokens`, every route but the open ones asks for a bearer token with the scope of its
//! class. Without, everybody who reaches the listener may do everything, and what a web page of
//! another site could make a browser send is refused: a foreign `Host` (DNS rebinding), a foreign
//! `Origin` (CSRF).
//!
//! A browser sends its token in a cookie ([`Access::COOKIE`]). It counts for the pages and for reading
//! alone, and not if a page of another site sent the request.
//!
//! Tokens are kept as SHA-256 only and compared with all of them in constant time. They and what
//! was sent in their place are never logged.

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
/// So long a browser keeps a token.
pub(super) const COOKIE_HOURS: u32 = 12;

/// Why the tokens cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file cannot be read.
    #[error("auth.tokens: the file {} of token {name:?} cannot be read: {source}", path.display())]
    Read {
        /// The token.
        name: String,
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A token is too short to be one, or too long, or holds what no header can carry.
    #[error(
        "auth.tokens: the file {} of token {name:?} holds {problem}; put 16 to 4096 letters and digits there, such as `openssl rand -hex 32` makes",
        path.display()
    )]
    Unusable {
        /// The token.
        name: String,
        /// Its file.
        path: PathBuf,
        /// What is wrong, without the content.
        problem: &'static str,
    },
    /// Two files hold the same token, so that it is undecided what it may do.
    #[error("auth.tokens: tokens {first:?} and {second:?} are the same; make another for one")]
    Twice {
        /// One token.
        first: String,
        /// The other.
        second: String,
    },
}

/// Who may do what.
pub(crate) struct Access {
    /// Sites whose pages may count views and read totals.
    cors_origins: Vec<String>,
    tokens: Vec<([u8; 32], Caller)>,
    /// Places of tokens by a keyed hash of their text.
    claims: HashMap<u64, usize>,
    seed: RandomState,
    /// Names under which the server may be called without tokens, in lower case.
    hosts: Vec<String>,
    anonymous: Caller,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl Access {
    /// The cookie that has a browser's token.
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

    /// Whether anybody is asked for one.
    pub(super) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// The caller of a request, if it has the scope. `browses`: what a browser keeps counts too.
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

    /// What a browser is given for a token that is known: the name and value of a cookie.
    pub(super) fn cookie(&self, token: &str) -> Option<String> {
        self.known(token.as_bytes())?;
        Some(format!("{}={}", Self::COOKIE, BASE64_URL_SAFE_NO_PAD.encode(token)))
    }

    /// Who sent a request.
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

    /// Whose token a request seems to have: quick, and no proof. Good enough to tell operators who was
    /// refused, and to rank a request lower.
    pub(super) fn claimed(&self, headers: &HeaderMap) -> Option<&Caller> {
        let place = self.claims.get(&self.seed.hash_one(bearer(headers)?))?;
        self.tokens.get(*place).map(|(_, caller)| caller)
    }

    /// Whose token it is.
    fn known(&self, token: &[u8]) -> Option<&Caller> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        // All are compared, so that the time says nothing about which was nearly met.
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

/// The token in the header.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?;
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// The token that a browser keeps. Other sites' pages may make it send what it keeps, if it is
/// an old one: then it is not listened to.
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

/// Refuses callers that are not for the bot of the path. Where the path names none, they must be for
/// all bots.
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

/// What a guarded route asks for.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) access: Arc<Access>,
    pub(super) gate: Arc<AdmissionGate>,
    pub(super) scope: Scope,
    /// Another scope that is as good.
    pub(super) or: Option<Scope>,
}

impl Guard {
    /// The caller of a request that has the scope, and whose quota is not used up. `browses`: what a
    /// browser keeps counts too.
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

/// Lets requests through whose token has the scope.
pub(super) async fn guard(
    State(guard): State<Guard>,
    mut request: Request,
    next: Next,
) -> Response {
    // To read is all that a link or an image of somebody else's may make a browser do.
    let browses = guard.scope == Scope::Read && request.method() == Method::GET;
    match guard.admit(&request, browses) {
        Ok((caller, _taken)) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    }
}
