//! The properties of every route for admission control: its class and its maximum body size.

use std::collections::HashMap;
use std::sync::OnceLock;

use ::metrics::Counter;
use axum::extract::MatchedPath;
use axum::http::{Extensions, Method};
use axum::response::Response;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::extract::BODY_MAX;
use super::metrics;
use super::stopwatch::{Meters, Stopwatch};
use crate::admission::{Class, Operation, Reason};

/// Maximum size of bodies with a few parameters.
const SMALL: usize = 16 << 10;
/// Maximum size of bodies with a rule or a profile.
const MEDIUM: usize = 256 << 10;

/// A route: method (`*`: all others), template, class, maximum body size in bytes.
pub type Row = (&'static str, &'static str, Class, usize);

/// Every route.
pub(crate) const ROUTES: &[Row] = &[
    // Health checks, and leases: work in progress finishes before new work starts.
    ("*", "/healthz", Class::P0, SMALL),
    ("*", "/readyz", Class::P0, SMALL),
    ("*", "/v1/leases/{lease}/complete", Class::P0, SMALL),
    ("*", "/v1/leases/{lease}/fail", Class::P0, SMALL),
    ("*", "/v1/leases/{lease}/extend", Class::P0, SMALL),
    // A user waits for the answer.
    ("*", "/v1/bots/{bot}/counters/{ad}/views", Class::P1, SMALL),
    ("*", "/v1/bots/{bot}/counters", Class::P1, SMALL),
    ("*", "/v1/bots/{bot}/counters/query", Class::P1, MEDIUM),
    ("*", "/v1/bots/{bot}/counters/{ad}/daily", Class::P1, SMALL),
    ("*", "/v1/bots/{bot}/counters/{ad}/reset", Class::P1, SMALL),
    ("DELETE", "/v1/bots/{bot}/counters/{ad}", Class::P1, SMALL),
    ("*", "/user_online", Class::P1, SMALL),
    ("*", "/v1/notifications/{notification}", Class::P1, SMALL),
    ("*", "/v1/notifications/stats", Class::P1, SMALL),
    ("*", "/v1/bots/{bot}/automations/{rule}", Class::P1, MEDIUM),
    ("*", "/v1/bots/{bot}/subscribers/{subscriber}", Class::P1, MEDIUM),
    ("*", "/v1/admission", Class::P1, SMALL),
    // An operator acts, especially during an overload.
    ("*", "/v1/problems", Class::P1, SMALL),
    ("*", "/v1/audit", Class::P1, SMALL),
    ("*", "/v1/reload", Class::P1, SMALL),
    ("*", "/v1/pipelines", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/pause", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/resume", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}/attempts", Class::P1, SMALL),
    ("*", "/v1/events/{event}", Class::P3, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}/pause", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}/resume", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}/release", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots/{bot}/queue", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/dead/{id}", Class::P1, SMALL),
    ("*", "/v1/pipelines/{pipeline}/dead/{id}/redrive", Class::P1, SMALL),
    ("*", "/", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/pause", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/resume", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/dead", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/dead/{id}", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/dead/{id}/redrive", Class::P1, SMALL),
    ("*", "/pipelines/{pipeline}/dead/{id}/drop", Class::P1, SMALL),
    ("*", "/runbook", Class::P1, SMALL),
    ("*", "/events", Class::P3, SMALL),
    ("*", "/events/{event}", Class::P3, SMALL),
    // A form has up to nine bytes for each character.
    ("*", "/publish", Class::P1, BODY_MAX),
    ("*", "/audit", Class::P1, SMALL),
    ("*", "/bots", Class::P1, SMALL),
    ("*", "/bots/{bot}", Class::P1, SMALL),
    ("*", "/bots/{bot}/rules", Class::P1, SMALL),
    ("*", "/bots/{bot}/scheduled", Class::P1, SMALL),
    ("*", "/notifications/{notification}/cancel", Class::P1, SMALL),
    ("*", "/notifications/{notification}/send", Class::P1, SMALL),
    ("*", "/bots/{bot}/rule", Class::P2, BODY_MAX),
    ("*", "/bots/{bot}/{pipeline}/pause", Class::P1, SMALL),
    ("*", "/bots/{bot}/{pipeline}/resume", Class::P1, SMALL),
    ("*", "/bots/{bot}/{pipeline}/release", Class::P1, SMALL),
    ("*", "/bots/{bot}/{pipeline}/purge", Class::P1, SMALL),
    ("*", "/bots/{bot}/{pipeline}/set", Class::P1, SMALL),
    ("*", "/counters", Class::P1, SMALL),
    ("*", "/notifications", Class::P1, SMALL),
    ("*", "/notifications/dead/{id}/redrive", Class::P1, SMALL),
    ("*", "/login", Class::P1, SMALL),
    ("*", "/logout", Class::P1, SMALL),
    ("*", "/theme", Class::P1, SMALL),
    ("*", "/style.css", Class::P1, SMALL),
    ("*", "/live.js", Class::P1, SMALL),
    ("*", "/icon.svg", Class::P1, SMALL),
    // The client can retry.
    ("*", "/v1/events", Class::P2, BODY_MAX),
    ("*", "/send_delayed", Class::P2, BODY_MAX),
    ("*", "/v1/bots/{bot}/automations/test", Class::P2, MEDIUM),
    // The client can wait.
    ("PUT", "/v1/bots/{bot}/counters/{ad}", Class::P3, BODY_MAX),
    ("*", "/v1/bots/{bot}/counters/export", Class::P3, SMALL),
    ("*", "/v1/bots/{bot}/counters/import", Class::P3, BODY_MAX),
    ("*", "/v1/bots/{bot}/automations", Class::P3, SMALL),
    ("*", "/v1/pipelines/{pipeline}/bots", Class::P3, SMALL),
    ("*", "/v1/pipelines/{pipeline}/replay", Class::P3, SMALL),
    ("*", "/v1/pipelines/{pipeline}/dead", Class::P3, SMALL),
    ("*", "/v1/pipelines/{pipeline}/dead/redrive", Class::P3, SMALL),
    ("*", "/notifications/dead/redrive", Class::P3, SMALL),
    ("*", "/pipelines/{pipeline}/dead/redrive", Class::P3, SMALL),
    ("*", "/pipelines/{pipeline}/dead/drop", Class::P3, SMALL),
    ("*", "/pipelines/{pipeline}/dead/chosen", Class::P1, SMALL),
    ("*", "/openapi.json", Class::P3, SMALL),
    ("*", "/docs", Class::P3, SMALL),
    ("*", "/docs/", Class::P3, SMALL),
    ("*", "/docs/{*rest}", Class::P3, SMALL),
];
/// The entry for requests that match no route.
const UNMATCHED: &str = "unmatched";

/// One route, with the counters of its refusals.
pub(super) struct Route {
    pub(super) operation: Operation,
    pub(super) template: &'static str,
    pub(super) class: Class,
    pub(super) body_max: usize,
    /// Per class and reason, because a request may lower its class.
    shed: [[OnceLock<Counter>; Reason::ALL.len()]; 4],
}

impl Route {
    fn new(number: usize, template: &'static str, class: Class, body_max: usize) -> Self {
        let operation = Operation(u16::try_from(number).unwrap_or_default());
        Self { operation, template, class, body_max, shed: Default::default() }
    }

    /// Whether it is one of the health checks, which orchestrators call without a token.
    pub(super) fn is_of_health(&self) -> bool {
        matches!(self.template, "/healthz" | "/readyz")
    }

    /// Whether its path names a lease, which is a signed capability.
    pub(super) fn is_of_leases(&self) -> bool {
        self.template.starts_with("/v1/leases/")
    }

    /// Whether it reads the body of a sender without a token: only the forms of the login page.
    pub(super) fn takes_bodies_of_strangers(&self) -> bool {
        matches!(self.template, "/login" | "/theme")
    }

    /// Counts and times an answer that does not come from the handler.
    pub(super) fn answered(&self, watch: Option<&Stopwatch>, response: Response) -> Response {
        if let Some(watch) = watch {
            watch.measure(|| Meters::of(self.template));
        }
        response
    }

    /// The counter of its refusals for a reason.
    pub(super) fn shed(&self, class: Class, reason: Reason) -> &Counter {
        self.shed[class as usize][reason as usize]
            .get_or_init(|| crate::admission::metrics::shed(class, self.template, reason))
    }
}

/// All routes, by the template that the router matched.
pub(super) struct Routes {
    all: Vec<Route>,
    /// The routes of a template: each method (`*`: all others), and its index in `all`.
    places: FxHashMap<&'static str, Vec<(&'static str, usize)>>,
}

impl Routes {
    pub(super) fn new(table: &[Row]) -> Self {
        let mut all = vec![Route::new(0, UNMATCHED, Class::P2, SMALL)];
        let mut places: FxHashMap<_, Vec<_>> = HashMap::with_hasher(FxBuildHasher);
        for (method, template, class, body_max) in table {
            places.entry(*template).or_default().push((*method, all.len()));
            let route = Route::new(all.len(), template, *class, *body_max);
            // Alerts ask for the growth of these series, so they start at 0.
            for reason in Reason::of_capacity(*class) {
                route.shed(*class, *reason).absolute(0);
            }
            if *body_max == BODY_MAX {
                drop(metrics::http_body(template));
            }
            all.push(route);
        }
        Self { all, places }
    }

    /// The route of a request.
    pub(super) fn find(&self, method: &Method, extensions: &Extensions) -> &Route {
        let template = extensions.get::<MatchedPath>().map(MatchedPath::as_str);
        let places = template.and_then(|template| self.places.get(template));
        let place = places.and_then(|places| {
            let is_of = |of: &str| of == "*" || of == method.as_str();
            places.iter().find(|(of, _)| is_of(of)).map(|(_, place)| *place)
        });
        &self.all[place.unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_of_the_document_has_a_class_and_nothing_else_has_one() {
        let documented: BTreeSet<String> =
            super::super::documented().paths.paths.into_keys().collect();
        let known: BTreeSet<String> =
            ROUTES.iter().map(|(_, template, ..)| (*template).to_owned()).collect();
        let missing: Vec<_> = documented.difference(&known).collect();
        assert!(missing.is_empty(), "give these a class in ROUTES: {missing:?}");
        let gone = known.difference(&documented).filter(|template| template.starts_with("/v1/"));
        assert_eq!(gone.collect::<Vec<_>>(), Vec::<&String>::new(), "these are served no more");
    }

    #[test]
    fn of_two_methods_of_a_path_each_has_its_class() {
        let routes = Routes::new(ROUTES);
        let find = |method: &str| {
            let place = &routes.places["/v1/bots/{bot}/counters/{ad}"];
            let found = place.iter().find(|(of, _)| *of == method);
            found.map(|(_, place)| routes.all[*place].class)
        };
        assert_eq!((find("PUT"), find("DELETE")), (Some(Class::P3), Some(Class::P1)));
    }
}
