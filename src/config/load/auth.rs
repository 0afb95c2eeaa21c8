//! `[auth]`.

use std::path::PathBuf;

use super::reader::Reader;
use crate::admission::Class;
use crate::config::check::limits;
use crate::config::{ConfigError, Scope, TokenConfig};

pub(super) fn token(read: &Reader<'_>) -> Result<TokenConfig, ConfigError> {
    const SCOPES: [Scope; 4] = [Scope::Publish, Scope::Read, Scope::Operate, Scope::Count];
    let scope = |name: String| {
        SCOPES.into_iter().find(|scope| scope.as_str() == name).ok_or_else(|| {
            let remedy = "write \"publish\", \"read\", \"operate\" or \"count\"";
            read.invalid("scopes", format_args!("holds {name:?}; {remedy}"))
        })
    };
    Ok(TokenConfig {
        name: read.text("name").to_owned(),
        token_file: PathBuf::from(read.text("token_file")),
        scopes: read.list("scopes").into_iter().map(scope).collect::<Result<_, _>>()?,
        bots: read.list("bots"),
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
