//! One send: the recheck, the call, the interpretation of the answer, and the retry.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use tokio::time::Instant;

use crate::notifications::record::{Begun, Ending};
use crate::notifications::{PIPELINE, SIGNED};
use crate::outbound::breakers::{Breakers, Outcome, Permission, Target};
use crate::outbound::headers::HeaderSets;
use crate::outbound::sign::{self, Secret};
use crate::outbound::{
    Answer, CheckedUrl, Cut, HeaderMap, Method, Outbound, OutboundError, Request, StatusCode,
};
use crate::trace::{self, Span, TraceContext, Tracer};

/// Timeout of the recheck.
const RECHECK: Duration = Duration::from_secs(5);
/// Timeout of the call.
const SEND: Duration = Duration::from_secs(15);
/// Maximum length of a recheck answer that can be `ok`, in bytes.
const OK_MAX_BYTES: usize = 64;
/// Pauses before the attempts after the first one; the last pause repeats.
const PAUSES: [Duration; 7] = [
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(2 * 60),
    Duration::from_secs(10 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3_600),
    Duration::from_secs(6 * 3_600),
];
/// Each pause varies at random by this fraction.
const JITTER: f64 = 0.2;
/// Pause if the host has its maximum number of requests although its breaker allowed the call.
/// Other components call the host too.
const CROWDED: Duration = Duration::from_millis(200);

/// The resources of sends.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) outbound: Outbound,
    pub(super) gates: Arc<Breakers>,
    pub(super) secrets: Vec<Secret>,
    pub(super) sets: HeaderSets,
    pub(super) tracer: Tracer,
}

impl Calls {
    /// Sends a notification, at `now` since 1970. Each call of it ends by `until`.
    pub(super) async fn send(&self, begun: &Begun, now: Duration, until: Instant) -> Ending {
        match self.try_send(begun, now, until).await {
            Ok(()) => Ending::Sent,
            Err(ending) => ending,
        }
    }

    async fn try_send(&self, begun: &Begun, now: Duration, until: Instant) -> Result<(), Ending> {
        let url = self.url(&begun.url)?;
        let more = self.more(begun, &url).map_err(Ending::Dead)?;
        let traced = TraceContext::from_text(&begun.trace);
        let traced = traced.as_ref();
        if let Some(traced) = traced.filter(|_| begun.attempts == 1) {
            let since = Duration::from_millis(begun.ready_ms);
            let what = (&begun.bot, &*begun.id.to_string());
            drop(trace::waited(&self.tracer, traced, PIPELINE, what, since));
        }
        let (id, whose) = (begun.id.message(), (SIGNED, &begun.bot));
        if !begun.recheck.is_empty() {
            let recheck = self.url(&begun.recheck)?;
            // Skips the recheck of a notification that cannot be sent now.
            let (target, again) = (Target::from(&url), begun.postponed);
            if let Some(after) = self.gates.shut(&begun.bot, &target, again, Instant::now()) {
                return Err(Ending::Postpone(after, left_alone(&url)));
            }
            let mut headers = sign::headers(&self.secrets, whose, &id, now, b"", "");
            // The recheck may go to another host. It gets the headers only if the set allows that
            // host.
            headers.extend(self.more(begun, &recheck).unwrap_or_default());
            let call = (Method::GET, headers, Vec::new());
            let answer = self.call(begun, &recheck, call, (RECHECK, until), traced).await?;
            rechecked(&answer, begun.attempts, now)?;
        }
        let method = begun
            .method
            .parse()
            .map_err(|_| Ending::Dead(format!("{:?} is not an HTTP method", begun.method)))?;
        let body = begun.body.clone().into_bytes();
        let media = media(&body);
        let mut headers = sign::headers(&self.secrets, whose, &id, now, &body, media);
        headers.extend(more);
        let answer = self.call(begun, &url, (method, headers, body), (SEND, until), traced).await?;
        sent(&answer, begun.attempts, now)
    }

    /// The additional headers. The configuration may have changed since the notification was
    /// scheduled.
    fn more(&self, begun: &Begun, url: &CheckedUrl) -> Result<HeaderMap, String> {
        if begun.headers.is_empty() {
            return Ok(HeaderMap::new());
        }
        let headers = self.sets.of(&begun.headers, &begun.bot, url).cloned();
        headers.map_err(|problem| format!("headers_from {problem}"))
    }

    /// Checks a URL again. The address rules may have become stricter since the notification was
    /// scheduled.
    fn url(&self, text: &str) -> Result<CheckedUrl, Ending> {
        CheckedUrl::parse(text, self.outbound.tenants())
            .map_err(|error| Ending::Dead(format!("the URL cannot be used: {error}")))
    }

    async fn call(
        &self,
        begun: &Begun,
        url: &CheckedUrl,
        (method, mut headers, body): (Method, HeaderMap, Vec<u8>),
        (within, until): (Duration, Instant),
        traced: Option<&TraceContext>,
    ) -> Result<Answer, Ending> {
        let now = Instant::now();
        if now + within > until {
            // The process was suspended. Another process may start this send before the call would end.
            let reason = "the process was suspended and could not call in time";
            return Err(Ending::Postpone(Duration::ZERO, reason.to_owned()));
        }
        let pass = match self.gates.ask(&begun.bot, Target::from(url), begun.postponed, now) {
            Permission::Go(pass) => pass,
            Permission::Open(after) => {
                return Err(Ending::Postpone(after, left_alone(url)));
            }
            Permission::Full(after) => {
                let (host, port) = (url.host(), url.port());
                let reason = format!(
                    "{host}:{port} has its maximum number of requests, or this bot its part of it"
                );
                return Err(Ending::Postpone(after, reason));
            }
        };
        let (deadline, tell_deadline) = (now + within, false);
        let mut span = traced.and_then(|traced| {
            let call = trace::called(&self.tracer, traced, PIPELINE, &begun.bot)?;
            let call = call.with("messaging.message.id", begun.id.to_string());
            Some(trace::http_call(call, method.as_str(), url.host(), url.port()))
        });
        if let Some(context) = span.as_ref().map(Span::context).or(traced) {
            context.add_to(&mut headers);
        }
        let request = Request {
            bot: &begun.bot,
            method,
            url,
            headers,
            body,
            deadline,
            place_by: now + CROWDED,
            keep_connection: pass.keeps_connection(),
            tell_deadline,
        };
        let answer = self.outbound.call(request).await;
        if let Some(span) = &mut span {
            match &answer {
                Ok(answer) => trace::http_answer(span, answer.status.as_u16()),
                Err(error) => span.fail(error.to_string()),
            }
        }
        drop(span);
        match answer {
            Ok(answer) => {
                // The status counts for the notification. A host that hangs within its answers is not well.
                let hangs = matches!(answer.cut, Some(Cut::TimedOut | Cut::Broken(_)));
                let failed = answer.status.is_server_error() || hangs;
                let outcome = if failed { Outcome::Failed } else { Outcome::Answered };
                pass.say(outcome, Instant::now());
                Ok(answer)
            }
            Err(error @ OutboundError::Refused(_)) => Err(Ending::Dead(error.to_string())),
            Err(error @ OutboundError::Busy { .. }) => {
                Err(Ending::Postpone(CROWDED, error.to_string()))
            }
            Err(error @ OutboundError::Lookups { after }) => {
                Err(Ending::Postpone(after, error.to_string()))
            }
            Err(error) => {
                let cut_off = matches!(error, OutboundError::NotReached(_));
                let outcome = if cut_off { Outcome::Unreached } else { Outcome::Failed };
                pass.say(outcome, Instant::now());
                let reason = match error {
                    OutboundError::TimedOut => format!("no answer within {} s", within.as_secs()),
                    error => error.to_string(),
                };
                Err(Ending::Retry(pause(begun.attempts), reason))
            }
        }
    }
}

fn left_alone(url: &CheckedUrl) -> String {
    format!("{}:{} failed too often; its circuit breaker is open", url.host(), url.port())
}

/// Derives the media type from the body.
fn media(body: &[u8]) -> &'static str {
    if body.is_empty() {
        ""
    } else if serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok() {
        sign::JSON
    } else {
        "text/plain; charset=utf-8"
    }
}

/// Interprets the answer of a recheck.
fn rechecked(answer: &Answer, attempts: u32, now: Duration) -> Result<(), Ending> {
    let status = answer.status;
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return Err(again(answer, attempts, now, "the recheck: "));
    }
    if status.is_success()
        && let Some(cut @ (Cut::TimedOut | Cut::Broken(_))) = &answer.cut
    {
        return Err(Ending::Retry(pause(attempts), format!("the recheck: {cut}")));
    }
    let is_ok = status.is_success()
        && answer.cut.is_none()
        && answer.body.len() <= OK_MAX_BYTES
        && answer.body.trim_ascii().eq_ignore_ascii_case(b"ok");
    if is_ok { Ok(()) } else { Err(Ending::Refused(format!("the recheck: {}", answer.refusal()))) }
}

/// Interprets the answer of the receiver.
fn sent(answer: &Answer, attempts: u32, now: Duration) -> Result<(), Ending> {
    match answer.status {
        status if status.is_success() => Ok(()),
        StatusCode::GONE => Err(Ending::Dead(answer.refusal())),
        _ => Err(again(answer, attempts, now, "")),
    }
}

fn again(answer: &Answer, attempts: u32, now: Duration, what: &str) -> Ending {
    let asked = answer.retry_after(now).unwrap_or_default();
    Ending::Retry(pause(attempts).max(asked), format!("{what}{}", answer.refusal()))
}

/// The pause after this number of attempts.
fn pause(attempts: u32) -> Duration {
    let at = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX);
    let pause = PAUSES[at.min(PAUSES.len() - 1)];
    pause.mul_f64(rand::rng().random_range(1.0 - JITTER..=1.0 + JITTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn answer(status: u16, body: &str) -> Answer {
        Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers: HeaderMap::new(),
            body: body.as_bytes().to_vec(),
            cut: None,
        }
    }

    #[test]
    fn a_recheck_says_ok_in_any_case_and_nothing_else() {
        for ok in ["ok", "OK", "Ok\n", "\r\n oK \t"] {
            assert_eq!(rechecked(&answer(200, ok), 1, NOW), Ok(()), "{ok:?}");
        }
        let padded = format!("ok{}", " ".repeat(63));
        for no in ["", "Error", "ok!", "o k", "\"ok\"", &padded] {
            let ending = rechecked(&answer(200, no), 1, NOW).unwrap_err();
            assert!(matches!(ending, Ending::Refused(_)), "{no:?}: {ending:?}");
        }
        for status in [201, 204, 301, 400, 404, 410, 500, 503, 429] {
            let ending = rechecked(&answer(status, "ok"), 1, NOW);
            match status {
                201 | 204 => assert_eq!(ending, Ok(())),
                429 | 500.. => assert!(matches!(ending, Err(Ending::Retry(..))), "{status}"),
                _ => assert!(matches!(ending, Err(Ending::Refused(_))), "{status}"),
            }
        }
        let cut = |cut| Answer { cut: Some(cut), ..answer(200, "ok") };
        assert!(matches!(rechecked(&cut(Cut::TooBig), 1, NOW), Err(Ending::Refused(_))));
        for half in [Cut::TimedOut, Cut::Broken("reset".to_owned())] {
            let ending = rechecked(&cut(half.clone()), 1, NOW);
            assert!(matches!(ending, Err(Ending::Retry(..))), "it may have been an ok: {half}");
        }
    }

    #[test]
    fn any_success_is_sent_gone_is_final_and_the_rest_is_tried_again() {
        for status in [200, 201, 202, 204, 299] {
            assert_eq!(sent(&answer(status, ""), 1, NOW), Ok(()));
            let half = Answer { cut: Some(Cut::TimedOut), ..answer(status, "a") };
            assert_eq!(sent(&half, 1, NOW), Ok(()), "the status says it");
        }
        assert!(matches!(sent(&answer(410, ""), 1, NOW), Err(Ending::Dead(_))));
        for status in [301, 302, 400, 401, 404, 408, 429, 500, 502, 503] {
            let ending = sent(&answer(status, "why"), 1, NOW).unwrap_err();
            let Ending::Retry(pause, reason) = ending else { panic!("{status}: {ending:?}") };
            assert!((4.0..=6.0).contains(&pause.as_secs_f64()), "{pause:?}");
            assert!(reason.contains(&status.to_string()) && reason.contains("why"), "{reason}");
        }
    }

    #[test]
    fn pauses_grow_by_the_table_and_are_at_least_as_long_as_the_receiver_asks() {
        for (attempts, seconds) in
            [(1, 5), (2, 30), (3, 120), (4, 600), (5, 1_800), (6, 7_200), (7, 21_600), (99, 21_600)]
        {
            let seconds = f64::from(seconds);
            for _ in 0..100 {
                let pause = pause(attempts).as_secs_f64();
                assert!((seconds * 0.8..=seconds * 1.2).contains(&pause), "{attempts}: {pause}");
            }
        }
        let mut busy = answer(503, "");
        busy.headers.insert("retry-after", "77".parse().unwrap());
        let Err(Ending::Retry(pause, _)) = sent(&busy, 1, NOW) else { panic!("a retry") };
        assert_eq!(pause, Duration::from_secs(77));
    }

    #[test]
    fn a_body_is_json_if_it_reads_as_such() {
        for (body, expected) in [("", ""), ("{\"a\":1}", sign::JSON), ("[]", sign::JSON)] {
            assert_eq!(media(body.as_bytes()), expected);
        }
        assert_eq!(media(b"a=1&b=2"), "text/plain; charset=utf-8");
    }
}
