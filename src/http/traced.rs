//! The trace contexts and spans of published events.

use std::fmt::Display;

use axum::http::HeaderMap;

use super::Api;
use super::cloudevents::Events;
use crate::event::EVENT_MAX_BYTES;
use crate::trace::{Entering, Span};

/// The spans of the events of a request. They end when this is dropped.
pub(super) struct Traced {
    request: Entering,
    /// Those of the events with their own contexts.
    own: Vec<Span>,
}

impl Traced {
    /// Puts the context of the request into the events that have no own one.
    pub(super) fn of(api: &Api, headers: &HeaderMap, events: &mut Events<'_>) -> Self {
        let (tracer, place) = (&api.tracer, api.bus.name());
        let own = events.own.iter().filter_map(|(at, own)| {
            Entering::of_event(tracer, own.as_ref()?, place, &events.bots[*at])
        });
        let own = own.collect();
        let without = events.texts.len() - events.own.len();
        if without == 0 {
            return Self { request: Entering::default(), own };
        }
        let mut request = Entering::by(tracer, headers, place);
        request.brings(without);
        if let [bot] = &*events.bots {
            request = request.about(bot);
        }
        if let Some(context) = &request.context {
            let mut own = events.own.iter().map(|(at, _)| *at).peekable();
            for (at, text) in events.texts.iter_mut().enumerate() {
                if own.next_if_eq(&at).is_none()
                    && let Some(written) = context.written_into(text, EVENT_MAX_BYTES)
                {
                    *text = written.into();
                }
            }
        }
        Self { request, own }
    }

    /// The events were not stored.
    pub(super) fn fail(&mut self, error: &impl Display) {
        let reason = error.to_string();
        self.own.iter_mut().for_each(|span| span.fail(reason.clone()));
        self.request.fail(reason);
    }
}
