//! The metrics of the HTTP interface.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::UnusableProxyHeader;
use crate::metrics::{
    HTTP_ANSWER_SECONDS, HTTP_BODY_SECONDS, HTTP_CONNECTIONS, HTTP_CONNECTIONS_REFUSED,
    HTTP_HANDLER_SECONDS, HTTP_PROXY_ERRORS, HTTP_REQUESTS, HTTP_SECONDS,
};

/// An HTTP request, by the status code of its answer. `route` is a template, never a path.
pub(crate) fn http_answered(route: String, code: u16) {
    counter!(HTTP_REQUESTS, "route" => route, "code" => code.to_string()).increment(1);
}

/// The time that bodies of a route take to arrive.
pub(crate) fn http_body(route: &str) -> Histogram {
    histogram!(HTTP_BODY_SECONDS, "route" => route.to_owned())
}

/// The times of the requests of a route.
pub(crate) struct HttpRouteMetrics {
    /// First byte of the request to last byte of the answer.
    pub(crate) whole: Histogram,
    /// Start of the handler to head of the answer.
    pub(crate) handler: Histogram,
    /// Head of the answer to its last byte.
    pub(crate) answer: Histogram,
}

/// The handles of a route. `route` is a template, never a path.
pub(crate) fn http_route(route: &str) -> HttpRouteMetrics {
    HttpRouteMetrics {
        whole: histogram!(HTTP_SECONDS, "route" => route.to_owned()),
        handler: histogram!(HTTP_HANDLER_SECONDS, "route" => route.to_owned()),
        answer: histogram!(HTTP_ANSWER_SECONDS, "route" => route.to_owned()),
    }
}

/// Connections of one listener: how many are open, and how many were refused.
pub(crate) fn connections(listener: &'static str) -> (Gauge, Counter) {
    let gauge = gauge!(HTTP_CONNECTIONS, "listener" => listener);
    let refused = counter!(HTTP_CONNECTIONS_REFUSED, "listener" => listener);
    // After a reload, connections of another instance are open.
    gauge.increment(0.0);
    refused.absolute(0);
    (gauge, refused)
}

/// Connections of one listener without a valid PROXY protocol header.
pub(crate) fn unusable_header(listener: &'static str, reason: UnusableProxyHeader) -> Counter {
    let reason = reason.as_str();
    let counter = counter!(HTTP_PROXY_ERRORS, "listener" => listener, "reason" => reason);
    counter.absolute(0);
    counter
}
