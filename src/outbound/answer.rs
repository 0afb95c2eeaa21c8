//! Interprets an answer beyond its status.

use std::time::Duration;

use httpdate::parse_http_date;

use super::Answer;

/// Maximum pause that a receiver may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(86_400);
/// Maximum length of the excerpt of an answer in the reason of a failure, in bytes.
const EXCERPT: usize = 200;
/// The same of an answer that is kept for operators.
const RESPONSE: usize = 512;

/// An answer as it is kept for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    /// Its status code.
    pub(crate) status: u16,
    /// The start of its body, up to 512 bytes, without control characters.
    pub(crate) body: String,
}

impl Answer {
    /// The reason of a failure with this answer.
    #[must_use]
    pub fn refusal(&self) -> String {
        let mut text = format!("the receiver answered {}", self.status.as_u16());
        if self.status.is_redirection() {
            text.push_str(", and redirects are not followed");
        }
        let said = excerpt(&self.body);
        if !said.is_empty() {
            text.push_str(": ");
            text.push_str(&said);
        }
        text
    }

    /// The status and the start of the body, for operators.
    pub(crate) fn response(&self) -> Response {
        let body = String::from_utf8_lossy(&self.body[..self.body.len().min(RESPONSE)]);
        let body = body.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        Response { status: self.status.as_u16(), body }
    }

    /// The status without the body.
    pub(crate) fn status_alone(&self) -> Response {
        Response { status: self.status.as_u16(), body: String::new() }
    }

    /// The pause in the header `retry-after`: seconds or a date, at most a day. `now` is the time
    /// since 1970.
    #[must_use]
    pub fn retry_after(&self, now: Duration) -> Option<Duration> {
        let text = self.headers.get("retry-after")?.to_str().ok()?.trim();
        let pause = if let Ok(seconds) = text.parse() {
            Duration::from_secs(seconds)
        } else {
            let at = parse_http_date(text).ok()?.duration_since(std::time::UNIX_EPOCH);
            at.unwrap_or_default().saturating_sub(now)
        };
        Some(pause.min(RETRY_AFTER_MAX))
    }
}

/// The start of the body, on one line.
#[must_use]
pub(crate) fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(EXCERPT)]);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.trim().to_owned()
}
