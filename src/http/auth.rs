//! Who may do what.
//!
//! With `auth.tokens`, every route but the open ones asks for a bearer token with the scope of its
//! class. Without, everybody who reaches the listener may do everything, and what a web page of
//! another site could make a browser send is refused: a foreign `Host` (DNS rebinding), a foreign
//! `Origin` (CSRF).
//!
//! Tokens are kept as SHA-256 only and compared with all of them in constant time. They and what
//! was sent in their place are never logged.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use tracing::{info, warn};

use super::problem::{Kind, Problem};
use crate::config::{Config, Scope, TokenConfig};
use crate::fanout::Glob;
use crate::id::{BotId, PipelineName};
use crate::view::AdId;

/// Shortest token, in bytes.
const TOKEN_MIN_BYTES: usize = 16;
/// Longest token, in bytes.
const TOKEN_MAX_BYTES: usize = 4_096;
/// What the log calls a caller without a token.
const ANONYMOUS: &str = "anonymous";

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
    tokens: Vec<([u8; 32], Caller)>,
    /// Names under which the server may be called without tokens, in lower case.
    hosts: Vec<String>,
    anonymous: Caller,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// Who sent a request, and what they may do.
#[derive(Debug, Clone)]
pub(crate) struct Caller(Arc<Rights>);

#[derive(Debug)]
struct Rights {
    name: String,
    scopes: Vec<Scope>,
    bots: Vec<Glob>,
    all_bots: bool,
}

impl Access {
    /// Reads the files of the tokens.
    pub(crate) fn open(config: &Config) -> Result<Self, AuthError> {
        let mut tokens: Vec<([u8; 32], Caller)> = Vec::new();
        for token in &config.auth.tokens {
            let digest = read_digest(token)?;
            if let Some((_, first)) = tokens.iter().find(|(other, _)| *other == digest) {
                let (first, second) = (first.0.name.clone(), token.name.clone());
                return Err(AuthError::Twice { first, second });
            }
            tokens.push((digest, Caller::new(&token.name, token.scopes.clone(), &token.bots)));
        }
        let all = vec![Scope::Publish, Scope::Read, Scope::Operate];
        Ok(Self {
            tokens,
            hosts: config.http.hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            anonymous: Caller::new(ANONYMOUS, all, &["*".to_owned()]),
        })
    }

    /// Who sent a request.
    fn caller(&self, headers: &HeaderMap) -> Result<&Caller, Problem> {
        if self.tokens.is_empty() {
            return Ok(&self.anonymous);
        }
        let token = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
        });
        let Some(token) = token else {
            let detail = "send a token in the header `Authorization: Bearer …`";
            let problem = Problem::new(Kind::Unauthorized, detail);
            let challenge = HeaderValue::from_static("Bearer realm=\"fairlane\"");
            return Err(problem.header(header::WWW_AUTHENTICATE, challenge));
        };
        let digest: [u8; 32] = Sha256::digest(token).into();
        // All are compared, so that the time says nothing about which was nearly met.
        let (mut found, mut place) = (Choice::from(0), 0_u64);
        for (at, (known, _)) in (0_u64..).zip(&self.tokens) {
            let equal = known.ct_eq(&digest);
            place.conditional_assign(&at, equal);
            found |= equal;
        }
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        match self.tokens.get(place) {
            Some((_, caller)) if found.into() => Ok(caller),
            _ => {
                let problem = Problem::new(Kind::Unauthorized, "the token is not known here");
                let challenge = "Bearer realm=\"fairlane\", error=\"invalid_token\"";
                let challenge = HeaderValue::from_static(challenge);
                Err(problem.header(header::WWW_AUTHENTICATE, challenge))
            }
        }
    }

    /// Refuses what a page of another site can make a browser send.
    fn check_site(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
        if !self.tokens.is_empty() {
            return Ok(());
        }
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("(not text)"));
        let authority = uri.authority().map(axum::http::uri::Authority::as_str);
        let host = authority.or(text(&header::HOST)).unwrap_or_default();
        if !self.is_known(host) {
            let detail = format!(
                "{host:?} is no name of this server; call it by its address or localhost, add the name to http.hosts, or set up auth.tokens"
            );
            return Err(Problem::new(Kind::UnknownHost, detail));
        }
        let same = |origin: &str| {
            let rest = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
            rest.is_some_and(|rest| rest.eq_ignore_ascii_case(host))
        };
        let foreign = text(&header::ORIGIN).is_some_and(|origin| !same(origin));
        if foreign || text(&FETCH_SITE).is_some_and(|site| site == "cross-site") {
            let detail = "a page of another site sent this, which only auth.tokens make safe";
            return Err(Problem::new(Kind::CrossSite, detail));
        }
        Ok(())
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

const FETCH_SITE: header::HeaderName = header::HeaderName::from_static("sec-fetch-site");

/// `localhost` of `localhost:80`, `[::1]` of `[::1]:80`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

fn read_digest(token: &TokenConfig) -> Result<[u8; 32], AuthError> {
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
    Ok(Sha256::digest(text).into())
}

impl Caller {
    fn new(name: &str, scopes: Vec<Scope>, bots: &[String]) -> Self {
        Self(Arc::new(Rights {
            name: name.to_owned(),
            scopes,
            bots: bots.iter().map(|glob| Glob::new(glob)).collect(),
            all_bots: bots.iter().any(|glob| glob == "*"),
        }))
    }

    fn check_scope(&self, scope: Scope) -> Result<(), Problem> {
        if self.0.scopes.contains(&scope) {
            return Ok(());
        }
        let detail = format!("token {:?} has no scope {:?}", self.0.name, scope.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Whether the caller may have to do with a bot.
    pub(crate) fn covers(&self, bot: &BotId) -> bool {
        self.0.all_bots || self.0.bots.iter().any(|glob| glob.matches(bot.as_str()))
    }

    /// Refuses a bot that is not the caller's.
    pub(crate) fn check_bot(&self, bot: &BotId) -> Result<(), Problem> {
        if self.covers(bot) {
            return Ok(());
        }
        let detail = format!("token {:?} is not for bot {:?}", self.0.name, bot.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Refuses callers that are not for all bots.
    pub(crate) fn check_all_bots(&self) -> Result<(), Problem> {
        if self.0.all_bots {
            return Ok(());
        }
        let detail = format!(
            "token {:?} is not for all bots (bots = [\"*\"]), as what concerns a whole pipeline demands",
            self.0.name
        );
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Writes down what an operator did.
    pub(crate) fn did(&self, action: &'static str, pipeline: &PipelineName, bot: Option<&BotId>) {
        let (token, bot) = (&self.0.name, bot.map(BotId::as_str));
        info!(token, action, %pipeline, bot, "an operator acted");
    }

    /// Writes down what an operator did to the counter of an ad.
    pub(crate) fn did_to_ad(&self, action: &'static str, bot: &BotId, ad: &AdId) {
        let (token, bot) = (&self.0.name, bot.as_str());
        info!(token, action, pipeline = PipelineName::COUNTERS, bot, %ad, "an operator acted");
    }
}

/// The caller whom [`guard`] found; a route outside its reach answers 500.
impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get().cloned();
        caller.ok_or_else(|| Problem::new(Kind::Internal, "this route is not guarded"))
    }
}

/// Lets requests through whose token has the scope.
pub(super) async fn guard(
    State((access, scope)): State<(Arc<Access>, Scope)>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = access.caller(request.headers());
    let caller = caller.and_then(|caller| caller.check_scope(scope).map(|()| caller.clone()));
    match caller {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    }
}

/// Lets requests through that no other site's page can have sent.
pub(super) async fn check_site(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Response {
    match access.check_site(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}
