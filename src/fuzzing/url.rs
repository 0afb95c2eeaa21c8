//! The check of URLs, against what the client makes of them.

use std::net::IpAddr;
use std::sync::Arc;

use reqwest::Method;

use crate::mongo::MongoUrl;
use crate::outbound::{CheckedUrl, Policy};
use crate::redis::RedisUrl;

/// A URL of a tenant or of the configuration.
///
/// # Panics
/// If the client would connect to another host or port than those that were checked, or if a tenant may
/// name an address that is not public.
pub fn url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // They are parsed by other rules, and hide their passwords.
    if let Ok(url) = RedisUrl::parse(text) {
        assert!(!format!("{url:?}").is_empty());
    }
    if let Ok(url) = MongoUrl::parse(text) {
        assert!(!format!("{url:?}").is_empty());
    }
    let tenants = Policy::Tenant(Arc::default());
    let operators = CheckedUrl::parse(text, &Policy::Operator);
    match CheckedUrl::parse(text, &tenants) {
        Ok(checked) => {
            connects_to_what_was_checked(&checked);
            assert!(operators.is_ok(), "operators may name what tenants may: {text:?}");
            assert!(checked.literal().is_none_or(|address| tenants.allows(address)));
            let host = checked.host().trim_end_matches('.');
            assert!(host != "localhost" && !host.ends_with(".localhost"), "{text:?}");
            assert!(!checked.is_operators());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(checked) = operators {
        connects_to_what_was_checked(&checked);
        assert!(checked.is_operators());
    }
}

fn connects_to_what_was_checked(checked: &CheckedUrl) {
    let url = checked.expose();
    assert!(matches!(url.scheme(), "http" | "https"));
    let again = CheckedUrl::parse(url.as_str(), &Policy::Operator).expect("it is accepted again");
    assert_eq!(again.expose(), url);
    // A log shows neither the query, nor a name or password.
    let shown = format!("{checked} {checked:?}");
    assert!(!shown.contains(['?', '@']) || url.path().contains('@'), "{shown}");

    let request = reqwest::Request::new(Method::GET, url.clone());
    let sent =
        axum::http::Request::<reqwest::Body>::try_from(request).expect("the client sends it");
    let uri = sent.uri();
    assert_eq!(uri.scheme_str(), Some(url.scheme()));
    assert_eq!(uri.host(), Some(checked.host()));
    let default = if url.scheme() == "https" { 443 } else { 80 };
    assert_eq!(uri.port_u16().unwrap_or(default), checked.port());
    assert_eq!(
        uri.path_and_query().map(hyper::http::uri::PathAndQuery::as_str),
        Some(&url[url::Position::BeforePath..])
    );
    // The connector takes a host that is an address as that address, and resolves any other one.
    let host = uri.host().unwrap_or_default();
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    assert_eq!(plain.parse::<IpAddr>().ok(), checked.literal(), "{host:?}");
}
