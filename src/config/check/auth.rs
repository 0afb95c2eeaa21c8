//! `[auth]`.

use std::collections::BTreeSet;

use super::Fault;
use super::bounds::{HOSTS_MAX, TOKEN_BOTS_MAX, names};
use crate::config::{ANONYMOUS, Config, Scope, TokenConfig};

const TOKENS_MAX: usize = 1_000;

impl Config {
    pub(super) fn check_auth(&self) -> Result<(), Fault> {
        let tokens = &self.auth.tokens;
        if tokens.len() > TOKENS_MAX {
            let problem = format!("has {} entries; at most {TOKENS_MAX} are allowed", tokens.len());
            return Err(Fault::new("auth.tokens", problem));
        }
        let mut seen = BTreeSet::new();
        for (place, token) in tokens.iter().enumerate() {
            let key = |name: &str| format!("auth.tokens[{place}].{name}");
            names(&key("name"), std::slice::from_ref(&token.name), 1, "name")?;
            if token.name == ANONYMOUS {
                let problem = "is \"anonymous\", which the log calls callers without a token; choose another name";
                return Err(Fault::new(key("name"), problem));
            }
            if !seen.insert(&token.name) {
                let problem = format!("is {:?} once more; give each its own", token.name);
                return Err(Fault::new(key("name"), problem));
            }
            if token.token_file.as_os_str().is_empty() {
                return Err(Fault::new(key("token_file"), "is not set; name a file"));
            }
            if token.scopes.is_empty() {
                let remedy = "name at least one of \"publish\", \"read\" and \"operate\", or \"count\" alone";
                return Err(Fault::new(key("scopes"), format!("is empty; {remedy}")));
            }
            names(&key("bots"), &token.bots, TOKEN_BOTS_MAX, "glob")?;
            if token.bots.is_empty() {
                let problem = "is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]";
                return Err(Fault::new(key("bots"), problem));
            }
        }
        for (place, token) in tokens.iter().enumerate() {
            self.check_public(token, |name| format!("auth.tokens[{place}].{name}"))?;
        }
        if self.auth.allow_anonymous && !tokens.is_empty() {
            let problem = "is true beside auth.tokens, which are asked for all the same; set it to false or remove the tokens";
            return Err(Fault::new("auth.allow_anonymous", problem).or("auth.tokens"));
        }
        let open = !self.http.listen.ip().to_canonical().is_loopback();
        if open && tokens.is_empty() && !self.auth.allow_anonymous {
            let problem = format!(
                "is {}, beyond the loopback, and there are no auth.tokens: every client could do everything; add tokens, listen on 127.0.0.1, or set auth.allow_anonymous = true",
                self.http.listen
            );
            return Err(Fault::new("http.listen", problem).or("auth.allow_anonymous"));
        }
        Ok(())
    }

    /// A token with the scope `count` is public, so it may have no other permission.
    fn check_public(&self, token: &TokenConfig, key: impl Fn(&str) -> String) -> Result<(), Fault> {
        let origins = &self.http.cors_origins;
        names(&key("origins"), &token.origins, HOSTS_MAX, "origin")?;
        if !token.scopes.contains(&Scope::Count) {
            if token.origins.is_empty() {
                return Ok(());
            }
            let problem = "is set, but only a token with the scope \"count\" is for certain origins; remove it";
            return Err(Fault::new(key("origins"), problem).or(key("scopes")));
        }
        if token.scopes.len() > 1 {
            let problem = "holds \"count\" beside other scopes, but such a token is public; make another token for the others";
            return Err(Fault::new(key("scopes"), problem));
        }
        if token.bots.iter().any(|bot| bot == "*") {
            let problem = "holds \"*\", but a token with the scope \"count\" is public; name the bots whose views it may count";
            return Err(Fault::new(key("bots"), problem).or(key("scopes")));
        }
        if origins.is_empty() {
            let problem = "holds \"count\", but http.cors_origins is empty; name the sites whose pages count there";
            return Err(Fault::new(key("scopes"), problem).or("http.cors_origins"));
        }
        if let Some(other) = token.origins.iter().find(|origin| !origins.contains(origin)) {
            let problem =
                format!("holds {other:?}, which http.cors_origins does not; add it there");
            return Err(Fault::new(key("origins"), problem));
        }
        Ok(())
    }
}
