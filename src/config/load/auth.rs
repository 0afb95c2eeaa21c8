//! `[auth]`.

use std::path::PathBuf;

use super::reader::Reader;
use crate::admission::Class;
use crate::config::check::limits;
use crate::config::{ConfigError, Scope, TokenConfig, WEIGHT_MAX};

pub(super) fn token(read: &Reader<'_>) -> Result<TokenConfig, ConfigError> {
    const SCOPES: [Scope; 4] = [Scope::Publish, Scope::Read, Scope::Operate, Scope::Count];
    let scope = |name: String| {
        SCOPES.into_iter().find(|scope| scope.as_str() == name).ok_or_else(|| {
            let remedy = "write \"publish\", \"read\", \"operate\" or \"count\"";
            read.invalid("scopes", format_args!("holds {name:?}; {remedy}"))
        })
    };
    let bots = read.list("bots");
    let max_weight = match read.count("max_weight", limits::TOKEN_WEIGHT)? {
        0 if bots.iter().any(|bot| bot == "*") => WEIGHT_MAX,
        0 => 1,
        weight => weight,
    };
    Ok(TokenConfig {
        name: read.text("name").to_owned(),
        token_file: PathBuf::from(read.text("token_file")),
        scopes: read.list("scopes").into_iter().map(scope).collect::<Result<_, _>>()?,
        bots,
        max_weight,
        origins: read.list("origins"),
        rate: read.count("rate", limits::PUBLIC_RATE)?,
        address_rate: read.count("address_rate", limits::PUBLIC_RATE)?,
        class: read.choice(
            "class",
            &[
                ("", None),
                ("p1", Some(Class::P1)),
                ("p2", Some(Class::P2)),
                ("p3", Some(Class::P3)),
            ],
        )?,
    })
}
