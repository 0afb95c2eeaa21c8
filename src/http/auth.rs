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

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{FromRequestParts, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use tracing::field::DisplayValue;
use tracing::{info, warn};

use super::admit::Door;
use super::cors::AllowedOrigin;
use super::listen::Peer;
use super::problem::{Kind, Problem};
use crate::admission::Class;
use crate::admission::quota::{Quota, Taken};
use crate::config::{Config, Scope, TokenConfig};
use crate::counters::view::AdId;
use crate::filter::Glob;
use crate::id::{BotId, PipelineName, RuleId};

/// Shortest token, in bytes.
const TOKEN_MIN_BYTES: usize = 16;
/// Longest token, in bytes.
const TOKEN_MAX_BYTES: usize = 4_096;
/// What the log calls a caller without a token.
const ANONYMOUS: &str = "anonymous";
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

/// Who sent a request, and what they may do.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    rights: Arc<Rights>,
    /// Where the request comes from; `None` where nobody told.
    address: Option<IpAddr>,
}

#[derive(Debug)]
struct Rights {
    name: String,
    /// Of a token with the scope `count`, which everybody may know.
    public: Option<Public>,
    class: Option<Class>,
    scopes: Vec<Scope>,
    bots: Vec<Glob>,
    all_bots: bool,
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

    /// Refuses what a page of another site can make a browser send.
    /// `is_allowed`: the page is of a site that may call this route.
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

/// Refuses what a page that is not of this server sent.
pub(super) fn refuse_foreign(uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    let ours = ["same-origin", "none"];
    let elsewhere = text(headers, &FETCH_SITE).is_some_and(|site| !ours.contains(&site));
    if elsewhere || is_foreign(host(uri, headers), headers) {
        let detail = "a page of another site sent this; open the page of this server";
        return Err(Problem::new(Kind::CrossSite, detail));
    }
    Ok(())
}

fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("(not text)"))
}

/// The name that the server was called by.
fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> &'a str {
    let authority = uri.authority().map(axum::http::uri::Authority::as_str);
    authority.or(text(headers, &header::HOST)).unwrap_or_default()
}

/// Whether the page that sent it is of another server than `host`.
fn is_foreign(host: &str, headers: &HeaderMap) -> bool {
    text(headers, &header::ORIGIN).is_some_and(|origin| {
        let rest = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
        rest.is_none_or(|rest| !rest.eq_ignore_ascii_case(host))
    })
}

const FETCH_SITE: header::HeaderName = header::HeaderName::from_static("sec-fetch-site");

/// `localhost` of `localhost:80`, `[::1]` of `[::1]:80`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
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

impl Caller {
    fn new(name: &str, scopes: Vec<Scope>, bots: &[String]) -> Self {
        let rights = Rights {
            name: name.to_owned(),
            public: None,
            class: None,
            scopes,
            bots: bots.iter().map(|glob| Glob::new(glob)).collect(),
            all_bots: bots.iter().any(|glob| glob == "*"),
        };
        Self { rights: Arc::new(rights), address: None }
    }

    /// The one of a token.
    fn of(token: &TokenConfig, cors_origins: &[String]) -> Self {
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
        Self { rights: Arc::new(Rights { class: token.class, public, ..rights }), address }
    }

    /// Whether everybody may know its token.
    pub(super) fn is_public(&self) -> bool {
        self.rights.public.is_some()
    }

    /// The class of a request of the caller that is of the class of its route.
    pub(super) fn class(&self, of_route: Class) -> Class {
        match self.rights.class {
            Some(class) if of_route != Class::P0 => class.max(of_route),
            _ => of_route,
        }
    }

    /// One who may do everything.
    #[cfg(test)]
    pub(super) fn of_tests() -> Self {
        let all = vec![Scope::Publish, Scope::Read, Scope::Operate];
        Self::new("tests", all, &["*".to_owned()])
    }

    /// The name of the token.
    pub(super) fn name(&self) -> &str {
        &self.rights.name
    }

    /// Whether a token was asked for.
    pub(super) fn has_token(&self) -> bool {
        self.rights.name != ANONYMOUS
    }

    pub(super) fn check_scope(&self, scope: Scope) -> Result<(), Problem> {
        if self.rights.scopes.contains(&scope) {
            return Ok(());
        }
        let detail = format!("token {:?} has no scope {:?}", self.rights.name, scope.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Whether the caller is for all bots.
    pub(super) fn covers_all(&self) -> bool {
        self.rights.all_bots
    }

    /// Whether the caller may have to do with a bot.
    pub(crate) fn covers(&self, bot: &BotId) -> bool {
        self.covers_all() || self.rights.bots.iter().any(|glob| glob.matches(bot.as_str()))
    }

    /// Refuses a bot that is not the caller's.
    pub(crate) fn check_bot(&self, bot: &BotId) -> Result<(), Problem> {
        if self.covers(bot) {
            return Ok(());
        }
        let detail = format!("token {:?} is not for bot {:?}", self.rights.name, bot.as_str());
        Err(Problem::new(Kind::Forbidden, detail))
    }

    /// Refuses callers that are not for all bots.
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

    /// Where the request comes from, for the log.
    fn address(&self) -> Option<DisplayValue<IpAddr>> {
        self.address.map(tracing::field::display)
    }

    /// Writes down what an operator did.
    pub(crate) fn did(&self, action: &'static str, pipeline: &PipelineName, bot: Option<&BotId>) {
        let (token, bot) = (&self.rights.name, bot.map(BotId::as_str));
        info!(token, address = self.address(), action, %pipeline, bot, "an operator acted");
    }

    /// Writes down what an operator did to a rule.
    pub(crate) fn did_to_rule(&self, action: &'static str, bot: &BotId, rule: &RuleId) {
        let (token, bot) = (&self.rights.name, bot.as_str());
        let (address, pipeline) = (self.address(), crate::automations::PIPELINE);
        info!(token, address, action, pipeline, bot, %rule, "an operator acted");
    }

    /// Writes down that lines of an import were taken.
    pub(crate) fn imported(&self, bot: &BotId, lines: u64) {
        let (token, bot) = (&self.rights.name, bot.as_str());
        let (address, pipeline) = (self.address(), crate::counters::PIPELINE);
        info!(
            token,
            address,
            action = "import counters",
            pipeline,
            bot,
            lines,
            "an operator acted"
        );
    }

    /// Writes down what an operator did to the counter of an ad.
    pub(crate) fn did_to_ad(&self, action: &'static str, bot: &BotId, ad: &AdId) {
        let (token, bot) = (&self.rights.name, bot.as_str());
        let (address, pipeline) = (self.address(), crate::counters::PIPELINE);
        info!(token, address, action, pipeline, bot, %ad, "an operator acted");
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
    pub(super) door: Arc<Door>,
    pub(super) scope: Scope,
    /// Another scope that is as good.
    pub(super) or: Option<Scope>,
}

/// The bounds of a token that everybody may know.
#[derive(Debug)]
struct Public {
    origins: Vec<String>,
    /// Of all requests with it.
    rate: Quota,
    /// Of those of one address.
    address_rate: Quota,
}

impl Public {
    /// Refuses requests that no page of its sites sends.
    fn check_origin(&self, headers: &HeaderMap) -> Result<(), Problem> {
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
            self.door.charge_public(&caller.rights.name, rates, request)?;
        }
        let token = caller.has_token().then_some(&*caller.rights.name);
        let charged = self.door.charge(token, request)?;
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

/// Lets requests through that no other site's page can have sent.
pub(super) async fn check_site(
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
