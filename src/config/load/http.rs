//! `[http]` and `[admission]`.

use std::net::IpAddr;

use ipnet::IpNet;

use super::reader::Reader;
use crate::admission::quota::Quota;
use crate::admission::{Class, Mode, Settings};
use crate::config::check::limits;
use crate::config::{AdmissionConfig, ConfigError, HttpConfig};

pub(super) fn http(top: &Reader<'_>) -> Result<HttpConfig, ConfigError> {
    Ok(HttpConfig {
        listen: top.address("http.listen")?,
        hosts: top.list("http.hosts"),
        cors_origins: top.list("http.cors_origins"),
        backlog: top.count("http.backlog", limits::BACKLOG)?,
        max_connections: top.count("http.max_connections", limits::CONNECTIONS)?,
        max_connections_per_address: top
            .count("http.max_connections_per_address", (1, limits::CONNECTIONS.1))?,
        trusted_proxies: nets(top, "http.trusted_proxies")?,
        proxy_protocol: top.flag("http.proxy_protocol"),
    })
}

pub(super) fn admission(top: &Reader<'_>) -> Result<AdmissionConfig, ConfigError> {
    let mode = |class: Class| {
        let modes = [
            ("enforce", Mode::Enforce),
            ("shadow", Mode::Shadow),
            ("off", Mode::Off),
            ("refuse", Mode::Refuse),
        ];
        top.choice(&format!("admission.{}", class.as_str()), &modes)
    };
    let number = |key: &str| top.count(&format!("admission.{key}"), limits::QUOTA);
    let quota = |rate, in_flight| {
        Ok::<_, ConfigError>(Quota { rate: number(rate)?, in_flight: number(in_flight)? })
    };
    let deadline = |class: Class| {
        let time = top.duration(&format!("admission.{}_deadline", class.as_str()))?;
        Ok::<_, ConfigError>(Some(time).filter(|time| !time.is_zero()))
    };
    let modes = [Mode::Enforce, mode(Class::P1)?, mode(Class::P2)?, mode(Class::P3)?];
    let limit_max = top.count("admission.limit_max", limits::IN_FLIGHT)?;
    Ok(AdmissionConfig {
        settings: Settings { modes, limit_max },
        bot: quota("bot_rate", "bot_in_flight")?,
        token: quota("token_rate", "token_in_flight")?,
        deadlines: [None, deadline(Class::P1)?, deadline(Class::P2)?, deadline(Class::P3)?],
    })
}

pub(super) fn nets(top: &Reader<'_>, key: &str) -> Result<Vec<IpNet>, ConfigError> {
    let net = |text: String| {
        // An address without bits is a network of one address.
        let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        net.map_err(|_| {
            let remedy = "write ADDRESS/BITS, such as \"10.0.0.0/8\" or \"fd00::/8\"";
            top.invalid(key, format_args!("holds {text:?}; {remedy}"))
        })
    };
    top.list(key).into_iter().map(net).collect()
}
