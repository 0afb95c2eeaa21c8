//! The head of a request: its class, its deadline, its bot, its caller.

use std::borrow::Cow;
use std::hash::{Hash as _, Hasher as _};
use std::net::IpAddr;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, Uri};
use rustc_hash::FxHasher;

use super::super::auth::{Caller, Identity};
use super::super::extract;
use super::super::problem::Problem;
use super::super::routes::Route;
use crate::admission::Class;
use crate::id::BotId;

/// The deadline of the caller.
const DEADLINE: HeaderName = HeaderName::from_static("x-deadline-ms");
/// The highest class that the caller wants.
const PRIORITY: HeaderName = HeaderName::from_static("x-priority");
/// Maximum deadline.
const DEADLINE_MAX_MS: u64 = 3_600_000;
/// A request takes one place per started unit of this many bytes of its body: about sixty events.
const BYTES_OF_A_PLACE: u64 = 16 << 10;

/// The number of places that a request with a body of this size takes.
pub(super) fn places(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(BYTES_OF_A_PLACE)).unwrap_or(usize::MAX).max(1)
}

/// The class of a request: that of its route, or a lower one on request.
pub(super) fn class(route: &Route, headers: &HeaderMap) -> Result<Class, Problem> {
    let Some(wanted) = headers.get(&PRIORITY) else { return Ok(route.class) };
    let known = Class::ALL.into_iter().find(|class| wanted.as_bytes() == class.as_str().as_bytes());
    let detail = "write p1, p2 or p3; it can lower the class of a request, not raise it";
    known.map(|class| class.max(route.class)).ok_or_else(|| Problem::field("x-priority", detail))
}

/// The remaining time of a request.
pub(super) fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, Problem> {
    let Some(value) = headers.get(&DEADLINE) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.parse().ok());
    let ms = ms.filter(|ms| *ms <= DEADLINE_MAX_MS).ok_or_else(|| {
        let detail = format!("write whole milliseconds from now, 0 to {DEADLINE_MAX_MS}");
        Problem::field("x-deadline-ms", detail)
    })?;
    Ok(Some(Duration::from_millis(ms)))
}

/// The bot in a path or query, still encoded.
fn bot_of(uri: &Uri) -> Option<&str> {
    let Some((_, rest)) = uri.path().split_once("/bots/") else {
        return uri.query()?.split('&').find_map(|pair| pair.strip_prefix("bot="));
    };
    rest.split('/').next().filter(|bot| !bot.is_empty())
}

/// The decoded name of a bot in a path or query.
fn decoded(bot: &str) -> Cow<'_, str> {
    if !bot.contains('%') {
        return bot.into();
    }
    let bytes = extract::percent_decoded(bot.as_bytes());
    String::from_utf8_lossy(&bytes).into_owned().into()
}

/// The bot in a path or query, if the caller may have to do with it. Any text can be there, so no
/// other bot is charged or told of.
pub(super) fn covered_bot(uri: &Uri, caller: &Caller) -> Option<BotId> {
    let bot = BotId::parse(&decoded(bot_of(uri)?)).ok()?;
    caller.covers(&bot).then_some(bot)
}

/// A known caller as a number. The bots of a token for all bots are separate callers; otherwise the
/// globs of the token are, because a caller could invent any number of bots for one. A public token
/// and no token at all are no caller: each of their addresses is one.
pub(super) fn number(uri: &Uri, caller: &Caller, address: Option<IpAddr>) -> u64 {
    let mut hasher = FxHasher::default();
    caller.name().hash(&mut hasher);
    if caller.is_public() || !caller.has_token() {
        address.hash(&mut hasher);
    }
    if caller.covers_all() {
        bot_of(uri).hash(&mut hasher);
    } else {
        covered_bot(uri, caller).and_then(|bot| caller.glob_of(&bot)).hash(&mut hasher);
    }
    hasher.finish().max(1)
}

/// The tenant of a request as a number: the token, whatever bots it names. `None` for a token for all
/// bots, and without a token.
pub(super) fn tenant(identity: &Identity) -> Option<u64> {
    let caller = identity.caller().filter(|caller| !caller.covers_all())?;
    let mut hasher = FxHasher::default();
    caller.name().hash(&mut hasher);
    Some(hasher.finish())
}

/// The lease in the path of its routes.
pub(super) fn lease_of(uri: &Uri) -> Option<Cow<'_, str>> {
    let lease = uri.path().strip_prefix("/v1/leases/")?.split('/').next()?;
    Some(decoded(lease))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn callers(bots: &[&str], paths: &[&str]) -> usize {
        let bots: Vec<String> = bots.iter().map(|bot| (*bot).to_owned()).collect();
        let caller = Caller::new("shop", Vec::new(), &bots);
        let number = |path: &&str| number(&path.parse().unwrap(), &caller, None);
        paths.iter().map(number).collect::<BTreeSet<_>>().len()
    }

    #[test]
    fn a_token_of_certain_bots_has_as_many_callers_as_globs_whatever_bots_it_invents() {
        let paths = ["/v1/bots/shop-1/x", "/v1/bots/shop-2/x", "/v1/bots/shop-%33/x"];
        assert_eq!(callers(&["shop-*"], &paths), 1);
        assert_eq!(callers(&["shop-1", "shop-*"], &paths), 2);
        assert_eq!(callers(&["*"], &paths), 3, "an operator's");
        assert_eq!(callers(&["shop-*"], &["/v1/bots/a", "/v1/bots/b", "/user_online?bot=c"]), 1);
    }

    #[test]
    fn a_token_of_certain_bots_is_one_tenant_and_the_bots_of_one_for_all_are_apart() {
        let tenant_of = |name: &str, bots: &[&str]| {
            let bots: Vec<String> = bots.iter().map(|bot| (*bot).to_owned()).collect();
            tenant(&Identity::Caller(Caller::new(name, Vec::new(), &bots)))
        };
        let shop = tenant_of("shop", &["a", "b", "c-*"]);
        assert!(shop.is_some() && shop == tenant_of("shop", &["d"]));
        assert_ne!(shop, tenant_of("other", &["a"]));
        assert_eq!(tenant_of("operator", &["*"]), None);
        assert_eq!(tenant(&Identity::Caller(Caller::anonymous())), None);
        assert_eq!(tenant(&Identity::Receiver), None);
    }

    #[test]
    fn only_bots_of_the_token_are_charged_and_told_of() {
        let caller = Caller::new("shop", Vec::new(), &["shop-*".to_owned()]);
        let bot = |path: &str| covered_bot(&path.parse().unwrap(), &caller);
        assert_eq!(bot("/v1/bots/shop%2D1/x").unwrap().as_str(), "shop-1");
        for path in ["/v1/bots/other/x", "/v1/bots/%00/x", "/send_delayed?bot=", "/x"] {
            assert_eq!(bot(path), None, "{path}");
        }
    }
}
