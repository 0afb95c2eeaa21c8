//! Parses the answers of the service, and counts their views.

use std::io;
use std::time::Duration;

use fairlane::clock::micros;
use fairlane::sandbox::waits;
use hdrhistogram::Histogram;

use super::exact::Ledger;
use super::plan::{Requests, What};

/// Maximum length of an unexpected answer in an error.
const SHOWN_BYTES: usize = 400;

/// A request in flight.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) due: Duration,
    pub(super) what: What,
}

/// The length of the first answer, head and body, once it is complete.
pub(super) fn whole(answer: &[u8]) -> io::Result<Option<usize>> {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let mut lines = answer[..end].split(|byte| *byte == b'\n');
    let length = lines.find_map(|line| {
        let (name, value) = line.split_at_checked(b"content-length:".len())?;
        name.eq_ignore_ascii_case(b"content-length:").then_some(value)
    });
    let length = length.and_then(|value| std::str::from_utf8(value).ok()?.trim().parse().ok());
    let Some(length) = length else {
        return Err(unexpected("an answer without content-length", answer));
    };
    let all = (end + 4).saturating_add(length);
    Ok((answer.len() >= all).then_some(all))
}

pub(super) fn unexpected(what: &str, answer: &[u8]) -> io::Error {
    let shown = &answer[..answer.len().min(SHOWN_BYTES)];
    io::Error::other(format!("{what}: {}", String::from_utf8_lossy(shown)))
}

/// The counts of the answers.
pub(super) struct Tally {
    pub(super) reads: Histogram<u64>,
    pub(super) views: Histogram<u64>,
    pub(super) last: Duration,
    pub(super) ledger: Ledger,
    pub(super) nulls: u64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
}

impl Tally {
    pub(super) fn new(ads: usize) -> Self {
        Self {
            reads: waits(),
            views: waits(),
            last: Duration::ZERO,
            ledger: Ledger::new(ads),
            nulls: 0,
            errors: 0,
            first_error: None,
        }
    }

    pub(super) fn note(
        &mut self,
        asked: &Asked,
        answer: &[u8],
        now: Duration,
        measured: bool,
        views: &Requests,
    ) {
        self.last = self.last.max(now);
        if !answer.starts_with(b"HTTP/1.1 200 ") {
            // A refused view was not counted. A failed one may have been counted.
            let refused = answer.starts_with(b"HTTP/1.1 4");
            let said = unexpected("answered", answer).to_string();
            return if refused { self.blame(&said) } else { self.lose(asked, views, &said) };
        }
        // No id contains `null`.
        let unknown = answer.windows(4).any(|window| window == b"null");
        self.nulls += u64::from(unknown);
        let waits = match asked.what {
            What::Read(_) => &mut self.reads,
            What::View(number) => {
                self.ledger.acknowledge(views.ad(number));
                &mut self.views
            }
        };
        if measured {
            waits.saturating_record(micros(now.saturating_sub(asked.due)).max(1));
        }
    }

    /// Notes a request with an unknown result.
    pub(super) fn lose(&mut self, asked: &Asked, views: &Requests, why: &str) {
        if let What::View(number) = asked.what {
            self.ledger.doubt(views.ad(number));
        }
        self.blame(why);
    }

    fn blame(&mut self, why: &str) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| why.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_when_its_body_is() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx: y\r\n\r\n{\"total\":12}";
        for length in 0..answer.len() {
            assert_eq!(whole(&answer[..length]).unwrap(), None, "{length}");
        }
        let more = [&answer[..], b"HTTP/1.1 200"].concat();
        assert_eq!(whole(&more).unwrap(), Some(answer.len()));
        let error = whole(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n").unwrap_err().to_string();
        assert!(error.starts_with("an answer without content-length: HTTP/1.1 200 OK"), "{error}");
    }
}
