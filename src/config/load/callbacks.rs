//! `[callbacks]`, with its sets of headers.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use super::http::nets;
use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{CallbacksConfig, ConfigError, HeadersConfig};
use crate::outbound::sign::Secret;

pub(super) fn callbacks(top: &Reader<'_>) -> Result<CallbacksConfig, ConfigError> {
    let secret = |(index, text): (usize, String)| {
        // The error never quotes the secret.
        Secret::parse(&text).map_err(|error| {
            top.invalid("callbacks.secrets", format_args!("number {} {error}", index + 1))
        })
    };
    let secrets = top.list("callbacks.secrets").into_iter().enumerate();
    Ok(CallbacksConfig {
        allow_nets: nets(top, "callbacks.allow_nets")?,
        secrets: secrets.map(secret).collect::<Result<_, _>>()?,
        max_per_host: top.positive("callbacks.max_per_host", limits::PER_HOST)?,
        name_servers: name_servers(top)?,
        headers: (0..top.tables("callbacks.headers"))
            .map(|place| {
                let prefix = format!("callbacks.headers[{place}].");
                let read = Reader { layers: top.layers, prefix: &prefix };
                HeadersConfig {
                    name: read.text("name").to_owned(),
                    headers_file: PathBuf::from(read.text("headers_file")),
                    bots: read.list("bots"),
                    hosts: read.list("hosts"),
                }
            })
            .collect(),
    })
}

fn name_servers(top: &Reader<'_>) -> Result<Vec<SocketAddr>, ConfigError> {
    const KEY: &str = "callbacks.name_servers";
    const PORT: u16 = 53;
    let server = |text: String| {
        let address = text.parse().or_else(|_| text.parse::<IpAddr>().map(|ip| (ip, PORT).into()));
        address.map_err(|_| {
            let remedy = "write ADDRESS or ADDRESS:PORT, such as \"10.0.0.2\" or \"[fd00::2]:53\"";
            top.invalid(KEY, format_args!("holds {text:?}; {remedy}"))
        })
    };
    top.list(KEY).into_iter().map(server).collect()
}
