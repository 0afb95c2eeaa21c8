//! `[http]`, `[metrics]` and `[admission]`.

use std::time::Duration;

use reqwest::Url;

use super::bounds::{HOSTS_MAX, HOUR, NETS_MAX, at_most, names, number, within};
use super::{Fault, limits};
use crate::admission::Class;
use crate::config::Config;

impl Config {
    pub(super) fn check_http(&self) -> Result<(), Fault> {
        // Port 0 means any free port, so two of them do not collide.
        if self.http.listen == self.metrics.listen && self.http.listen.port() != 0 {
            let problem =
                format!("is {}, as is http.listen; choose another port", self.metrics.listen);
            return Err(Fault::new("metrics.listen", problem).or("http.listen"));
        }
        names("http.hosts", &self.http.hosts, HOSTS_MAX, "name of a host")?;
        names("http.cors_origins", &self.http.cors_origins, HOSTS_MAX, "origin")?;
        if let Some(wrong) = self.http.cors_origins.iter().find(|text| !is_origin(text)) {
            let remedy = "write scheme, host and port exactly as browsers send them, such as \"https://shop.example\", without a path";
            return Err(Fault::new("http.cors_origins", format!("holds {wrong:?}; {remedy}")));
        }
        at_most("http.trusted_proxies", self.http.trusted_proxies.len(), NETS_MAX)?;
        if self.http.proxy_protocol && self.http.trusted_proxies.is_empty() {
            let problem = "is true, but http.trusted_proxies is empty, so no connection may carry the header; name the networks of the proxies";
            return Err(Fault::new("http.proxy_protocol", problem).or("http.trusted_proxies"));
        }
        Ok(())
    }

    pub(super) fn check_admission(&self) -> Result<(), Fault> {
        let (http, admission) = (&self.http, &self.admission);
        number("http.backlog", http.backlog.into(), limits::BACKLOG)?;
        number("http.max_connections", http.max_connections as u64, limits::CONNECTIONS)?;
        let per_address = http.max_connections_per_address;
        if !(1..=http.max_connections).contains(&per_address) {
            let problem = format!(
                "is {per_address}; write 1 to {}, which is http.max_connections",
                http.max_connections
            );
            let key = "http.max_connections_per_address";
            return Err(Fault::new(key, problem).or("http.max_connections"));
        }
        let limit_max = admission.settings.limit_max as u64;
        number("admission.limit_max", limit_max, limits::IN_FLIGHT)?;
        for (class, deadline) in Class::ALL.into_iter().zip(admission.deadlines) {
            let key = format!("admission.{}_deadline", class.as_str());
            within(&key, deadline.unwrap_or_default(), Duration::ZERO..=HOUR)?;
        }
        for (whose, quota) in [("bot", admission.bot), ("token", admission.token)] {
            let key = |what: &str| format!("admission.{whose}_{what}");
            number(&key("rate"), quota.rate.into(), limits::QUOTA)?;
            number(&key("in_flight"), quota.in_flight.into(), limits::QUOTA)?;
        }
        Ok(())
    }
}

/// Whether a text is an origin in the form that browsers send.
fn is_origin(text: &str) -> bool {
    let Ok(url) = Url::parse(text) else { return false };
    matches!(url.scheme(), "http" | "https") && url.origin().ascii_serialization() == text
}
