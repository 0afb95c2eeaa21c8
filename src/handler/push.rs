//! The built-in handler `push`: posts slices to a receiver in any language.
//!
//! Sends `POST url` with `{"pipeline","bot","lease","fence","attempt","events":[…]}`, signed by
//! Standard Webhooks, with a new `webhook-id` per delivery. The answer of the receiver decides:
//!
//! | answer | meaning |
//! |---|---|
//! | 200 or 204, without `ack` | all events are done; JSON that cannot be read is a failure |
//! | 200 `{"ack":k}` | the first k are done, the rest is retried in order |
//! | 200 `{"ack":k,"retry_after":s}` | the first k are done, the rest is sent in order after s seconds; no attempt is counted |
//! | 202 | the receiver completes the lease later, by `/v1/leases/{lease}` |
//! | 429 or 503 with `Retry-After`; no connection | the bot is parked, no attempt is counted |
//! | any other answer, including redirects; no answer | retried in order with backoff |

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use super::{Answer, AnyHandler, Environment, Failure, Handling, Outcomes, Slice};
use crate::event::Event;
use crate::id::{BotId, PipelineName};
use crate::outbound::answer::excerpt;
use crate::outbound::sign::{self, MessageId, Purpose, Secret};
use crate::outbound::{
    self, CheckedUrl, Cut, HeaderMap, Method, Outbound, OutboundError, Request, StatusCode,
};
use crate::trace::{self, SliceTrace, Span};

/// The push times out before the worker, which knows less about the cause: earlier by a twentieth
/// of the timeout, and at most by this.
const EARLIER: Duration = Duration::from_millis(250);

/// Maximum wait for a place at the receiver: the time in the signature must not become too old.
const PLACE: Duration = Duration::from_secs(60);

/// Maximum pause that an answer may ask for, in seconds: a day, as for `Retry-After`.
const PAUSE_MAX_SECONDS: f64 = 86_400.0;
/// Minimum pause after an answer that acknowledges nothing: less would be a busy loop.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// Posts the slices of one pipeline to one URL.
#[derive(Debug)]
pub(crate) struct PushHandler {
    outbound: Outbound,
    url: CheckedUrl,
    secrets: Vec<Secret>,
    timeout: Duration,
}

#[derive(Serialize)]
struct Body<'a> {
    pipeline: &'a PipelineName,
    bot: &'a BotId,
    lease: &'a str,
    fence: u64,
    attempt: u32,
    events: Vec<&'a Event>,
}

impl PushHandler {
    /// `timeout` is the pipeline's `handler_timeout`.
    pub(crate) fn new(
        outbound: Outbound,
        url: CheckedUrl,
        secrets: Vec<Secret>,
        timeout: Duration,
    ) -> Self {
        let timeout = timeout.saturating_sub((timeout / 20).min(EARLIER));
        Self { outbound, url, secrets, timeout }
    }

    async fn push(
        &self,
        environment: &Environment,
        slice: &Slice,
        capability: &str,
    ) -> Result<Answer, Failure> {
        let started = Instant::now();
        let body = Body {
            pipeline: &environment.pipeline,
            bot: &slice.bot,
            lease: capability,
            fence: slice.fence.get(),
            attempt: slice.attempt,
            events: slice.events.iter().map(|delivery| &delivery.event).collect(),
        };
        let body = serde_json::to_vec(&body).map_err(|error| {
            Failure::unknown(format!("the events cannot be serialised as JSON: {error}"))
        })?;
        let id = MessageId::unique();
        let now = environment.clock.now();
        let whose = (Purpose::PUSH, &slice.bot);
        let mut headers = sign::headers(&self.secrets, whose, &id, now, &body, sign::JSON);
        let mut span = self.trace(slice, &mut headers);
        let request = Request {
            bot: &slice.bot,
            method: Method::POST,
            url: &self.url,
            headers,
            body,
            deadline: started + self.timeout,
            // A connection may take half of the `handler_timeout` behind the wait.
            place_by: started + (self.timeout * 2 / 5).min(PLACE),
            keep_connection: true,
            tell_deadline: true,
        };
        let answered = self.outbound.call(request).await;
        if let Some(span) = &mut span {
            match &answered {
                Ok(answer) => trace::http_answer(span, answer.status.as_u16()),
                Err(error) => span.fail(error.to_string()),
            }
        }
        drop(span);
        match answered {
            Ok(answer) => {
                let judged = judge(&answer, slice.events.len(), environment.clock.now());
                noted(judged, &answer)
            }
            Err(error) => Err(self.unanswered(&error)),
        }
    }

    /// Tells the receiver the trace: the span of this call, or what the events carry.
    fn trace(&self, slice: &Slice, headers: &mut HeaderMap) -> Option<Span> {
        let Some(span) = slice.trace.as_ref().and_then(|trace| trace.call()) else {
            let events = slice.events.iter().map(|delivery| &delivery.event);
            SliceTrace::passed_on(events)?.add_to(headers);
            return None;
        };
        span.context().add_to(headers);
        Some(trace::http_call(span, "POST", self.url.host(), self.url.port()))
    }

    fn unanswered(&self, error: &OutboundError) -> Failure {
        match error {
            OutboundError::TimedOut => {
                let limit = humantime::format_duration(self.timeout);
                Failure::timed_out(format!(
                    "the receiver took longer than {limit} (handler_timeout)"
                ))
            }
            error if error.is_unreached() => {
                Failure::unavailable(0, format!("the receiver cannot be reached: {error}"))
            }
            error => Failure::unknown(format!("the receiver did not answer: {error}")),
        }
    }
}

impl AnyHandler for PushHandler {
    fn handle_boxed<'a>(
        &'a self,
        environment: &'a Environment,
        slice: &'a Slice,
        capability: &'a str,
    ) -> Handling<'a> {
        Box::pin(self.push(environment, slice, capability))
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn committed(&self, _: &Slice, _: usize) {}
}

/// Interprets an answer to a slice of `n` events. `now` is the time since 1970.
fn judge(answer: &outbound::Answer, n: usize, now: Duration) -> Result<Answer, Failure> {
    match answer.status {
        StatusCode::ACCEPTED => Ok(Answer::Accepted),
        StatusCode::OK | StatusCode::NO_CONTENT => acknowledged(answer, n),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            match answer.retry_after(now) {
                // It says nothing about when to come back: the pause grows as without a connection.
                Some(Duration::ZERO) => Err(Failure::unavailable(0, answer.refusal())),
                Some(pause) => {
                    let pause = pause.max(PAUSE_MIN);
                    Err(Failure::unavailable(0, answer.refusal()).retry_after(pause))
                }
                None => Err(Failure::unknown(answer.refusal())),
            }
        }
        _ => Err(Failure::unknown(answer.refusal())),
    }
}

/// Adds the answer of the receiver, for operators.
fn noted(judged: Result<Answer, Failure>, answer: &outbound::Answer) -> Result<Answer, Failure> {
    match judged {
        Ok(Answer::Settled(mut outcomes)) => {
            // A body says little when all is done.
            let all = outcomes.settled.is_none();
            outcomes.response = Some(if all { answer.status_alone() } else { answer.response() });
            Ok(Answer::Settled(outcomes))
        }
        Ok(Answer::Accepted) => Ok(Answer::Accepted),
        Err(failure) => Err(Failure { response: Some(answer.response()), ..failure }),
    }
}

fn acknowledged(answer: &outbound::Answer, n: usize) -> Result<Answer, Failure> {
    let body = answer.whole().map_err(|cut| {
        let reason = format!("the receiver answered {}: {cut}", answer.status.as_u16());
        if *cut == Cut::TimedOut { Failure::timed_out(reason) } else { Failure::unknown(reason) }
    })?;
    let all = Ok(Answer::Settled(Outcomes::done()));
    let fields = match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => fields,
        Err(error) if may_say_ack(body) => {
            let (status, said) = (answer.status.as_u16(), excerpt(body));
            return Err(Failure::unknown(format!(
                "the receiver answered {status} with JSON that cannot be read ({error}): {said}; it must send one JSON object and nothing else, or a text that neither starts with {{ nor contains \"ack\""
            )));
        }
        _ => return all,
    };
    let pause = fields.get("retry_after").map(pause).transpose()?;
    let Some(ack) = fields.get("ack") else {
        // Without the number, a pause says that not all are done.
        return match pause {
            Some(_) => Err(Failure::unknown("the receiver asked for a pause (retry_after), and did not say how many events are done (ack)".to_owned())),
            None => all,
        };
    };
    let count = ack.as_u64().and_then(|count| usize::try_from(count).ok());
    match count {
        Some(count) if count == n => all,
        Some(count) if count < n => match pause {
            Some(rest) => {
                let at_least = if count == 0 { PAUSE_MIN } else { Duration::ZERO };
                Ok(Answer::Settled(Outcomes::first(count).rest_after(rest.max(at_least))))
            }
            None => Err(Failure::transient(count, acknowledgement(count, n))),
        },
        _ => {
            let ack = excerpt(ack.to_string().as_bytes());
            let allowed = format!("it must be a whole number from 0 to {n}");
            Err(Failure::unknown(format!("the receiver acknowledged {ack}; {allowed}")))
        }
    }
}

/// Whether a body that is not JSON may be meant to say how many events are done: an object that is cut off or
/// has a text around it.
fn may_say_ack(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    let text = text.trim_start_matches('\u{feff}').trim_ascii_start();
    text.starts_with('{') || text.contains("\"ack\"")
}

/// The pause in an answer, in seconds.
fn pause(value: &Value) -> Result<Duration, Failure> {
    let seconds = value.as_f64().filter(|seconds| (0.0..=PAUSE_MAX_SECONDS).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        let asked = excerpt(value.to_string().as_bytes());
        Failure::unknown(format!("the receiver asked for a pause of {asked} (retry_after); it must be a number of seconds from 0 to {PAUSE_MAX_SECONDS}"))
    })
}

/// The reason for retrying the event after the first `count` of `n`.
pub(crate) fn acknowledgement(count: usize, n: usize) -> String {
    format!("the receiver acknowledged {count} of {n} events")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_445_412_000);

    fn answer(status: u16, body: &str) -> outbound::Answer {
        outbound::Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers: HeaderMap::new(),
            body: body.as_bytes().to_vec(),
            cut: None,
        }
    }

    fn asking(status: u16, pause: &str) -> Result<Answer, Failure> {
        let mut answer = answer(status, "busy");
        answer.headers.insert("retry-after", pause.parse().unwrap());
        judge(&answer, 3, NOW)
    }

    fn judged(status: u16, body: &str) -> Result<Answer, Failure> {
        judge(&answer(status, body), 3, NOW)
    }

    #[test]
    fn a_success_without_details_settles_every_event() {
        for body in ["", " ", "ok", "null", "[1]", "{}", r#"{"x":1}"#, r#"{"ack":3}"#] {
            assert_eq!(judged(200, body), Ok(Answer::Settled(Outcomes::done())), "{body}");
        }
        assert_eq!(judged(204, ""), Ok(Answer::Settled(Outcomes::done())));
        assert_eq!(judged(202, r#"{"ack":1}"#), Ok(Answer::Accepted));
    }

    #[test]
    fn an_acknowledged_part_is_done_and_the_next_event_failed() {
        for count in 0..3 {
            let reason = format!("the receiver acknowledged {count} of 3 events");
            let failure = Failure::transient(count, reason);
            assert_eq!(judged(200, &format!(r#"{{"ack":{count}}}"#)), Err(failure));
        }
    }

    #[test]
    fn the_rest_of_a_part_comes_after_the_pause_that_the_receiver_asks_for() {
        // Without progress, the receiver is asked again after a second at the earliest.
        let cases = [(0, "2.5", 2_500), (0, "0", 1_000), (1, "0", 0), (2, "86400", 86_400_000)];
        for (count, text, ms) in cases {
            let body = format!(r#"{{"ack":{count},"retry_after":{text}}}"#);
            let rest = Duration::from_millis(ms);
            let outcomes = Outcomes::first(count).rest_after(rest);
            assert_eq!(judged(200, &body), Ok(Answer::Settled(outcomes)));
        }
        let all = judged(200, r#"{"ack":3,"retry_after":9}"#);
        assert_eq!(all, Ok(Answer::Settled(Outcomes::done())), "no event is left");
        for text in ["-1", "86401", "null", "\"2\"", "[1]"] {
            let failure = judged(200, &format!(r#"{{"ack":1,"retry_after":{text}}}"#)).unwrap_err();
            assert!(failure.reason.contains("seconds from 0 to 86400"), "{failure:?}");
        }
        let failure = judged(200, r#"{"retry_after":1}"#).unwrap_err();
        assert!(failure.reason.contains("how many events are done (ack)"), "{failure:?}");
    }

    #[test]
    fn an_impossible_acknowledgement_is_a_failure_that_says_so() {
        for ack in ["4", "-1", "1.0", "\"1\"", "null", "[]", "18446744073709551616"] {
            let failure = judged(200, &format!(r#"{{"ack":{ack}}}"#)).unwrap_err();
            assert!(failure.reason.contains("must be a whole number from 0 to 3"), "{failure:?}");
            assert_eq!(failure, Failure::unknown(failure.reason.clone()));
        }
    }

    #[test]
    fn an_answer_without_its_whole_body_is_judged_by_its_status_unless_that_is_200() {
        let half = |status, cut| outbound::Answer { cut: Some(cut), ..answer(status, "{") };
        let broken = || Cut::Broken("reset".to_owned());
        for cut in [Cut::TooBig, Cut::TimedOut, broken()] {
            assert_eq!(judge(&half(202, cut.clone()), 3, NOW), Ok(Answer::Accepted), "{cut}");
            let mut busy = half(503, cut.clone());
            busy.headers.insert("retry-after", "7".parse().unwrap());
            assert!(judge(&busy, 3, NOW).unwrap_err().is_unavailable(), "{cut}");
            let failure = judge(&half(200, cut.clone()), 3, NOW).unwrap_err();
            assert!(failure.reason.contains(&cut.to_string()), "{failure:?}");
            assert_eq!(failure.timed_out, cut == Cut::TimedOut);
        }
    }

    #[test]
    fn a_success_with_json_that_cannot_be_read_is_no_acknowledgement_of_all_events() {
        for body in [
            r#"{"ack":2"#,
            " {\"ack\":2}\nbye",
            "\u{feff}{\"ack\":2}",
            "<br>Notice: x {\"ack\":2}",
            "{oops}",
        ] {
            let failure = judged(200, body).unwrap_err();
            assert!(failure.reason.contains("JSON that cannot be read"), "{failure:?}");
            assert_eq!(failure, Failure::unknown(failure.reason.clone()));
        }
        for body in ["OK, thanks", "<html>done</html>", "[1", "ack"] {
            assert_eq!(judged(200, body), Ok(Answer::Settled(Outcomes::done())), "{body}");
        }
    }

    #[test]
    fn a_receiver_that_asks_for_a_pause_is_unavailable_and_gets_it() {
        let cases =
            [("7", 7), ("1", 1), ("999999999", 86_400), ("Wed, 21 Oct 2015 07:28:00 GMT", 480)];
        for status in [429, 503] {
            for (text, seconds) in cases {
                let reason = format!("the receiver answered {status}: busy");
                let pause = Duration::from_secs(seconds);
                let failure = Failure::unavailable(0, reason).retry_after(pause);
                assert_eq!(asking(status, text), Err(failure), "{text}");
            }
            for text in ["0", "Wed, 21 Oct 2015 07:00:00 GMT"] {
                let reason = format!("the receiver answered {status}: busy");
                assert_eq!(asking(status, text), Err(Failure::unavailable(0, reason)), "{text}");
            }
            for text in ["", "soon", "-1", "1.5"] {
                assert!(!asking(status, text).unwrap_err().is_unavailable(), "{text}");
            }
        }
        assert!(!asking(500, "7").unwrap_err().is_unavailable());
    }

    #[test]
    fn any_other_answer_is_retried_with_its_start_as_the_reason() {
        let long = "x".repeat(900);
        let cases = [
            (500, "line\r\none\0", "the receiver answered 500: line  one"),
            (404, "", "the receiver answered 404"),
            (201, "made", "the receiver answered 201: made"),
            (302, "", "the receiver answered 302, and redirects are not followed"),
            (500, &long, &format!("the receiver answered 500: {}", "x".repeat(200))),
        ];
        for (status, body, reason) in cases {
            assert_eq!(judged(status, body), Err(Failure::unknown(reason.to_owned())));
        }
    }
}
