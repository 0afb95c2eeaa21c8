//! `[auth]`: the tokens and their permissions.

use std::path::PathBuf;

use crate::admission::Class;

/// The name of every caller if there are no tokens, in the log. No token has it.
pub(crate) const ANONYMOUS: &str = "anonymous";
/// Maximum weight of a bot.
pub(crate) const WEIGHT_MAX: u32 = 1_000;

/// The section `[auth]`: access to the HTTP interface.
#[derive(Debug, Clone)]
pub struct AuthConfig {
    /// At most 1,000, each with a unique name. None: every client that connects may do everything.
    pub tokens: Vec<TokenConfig>,
    /// Whether to listen beyond the loopback without tokens.
    pub allow_anonymous: bool,
}

/// One bearer token. Its text exists only in its file.
#[derive(Debug, Clone)]
pub struct TokenConfig {
    /// Its name in the log.
    pub name: String,
    /// The file with the token, trimmed: 16 to 4,096 bytes.
    pub token_file: PathBuf,
    /// The permissions; at least one.
    pub scopes: Vec<Scope>,
    /// Globs over the bots that it gives access to; at least one.
    pub bots: Vec<String>,
    /// With [`Scope::Count`]: the allowed sites of
    /// [`HttpConfig::cors_origins`](crate::config::HttpConfig::cors_origins); none: all of them.
    pub origins: Vec<String>,
    /// With [`Scope::Count`]: maximum requests per second: 1 to 1,000,000.
    pub rate: u32,
    /// With [`Scope::Count`]: the same maximum per client address.
    pub address_rate: u32,
    /// The highest class of its requests; `None`: the class of the route.
    pub class: Option<Class>,
    /// Maximum weight that it may give to a bot: 1 to 1,000.
    pub max_weight: u32,
}

/// A permission of a token. None implies another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Publish events.
    Publish,
    /// Read pipelines, bots and dead letters.
    Read,
    /// Change pipelines, bots and dead letters.
    Operate,
    /// Count single views and read totals with a public token. Must be the only scope.
    Count,
}

impl Scope {
    /// Its name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Count => "count",
        }
    }
}
