//! What the client library tells: its log, its errors, and its question for a token.

use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rdkafka::ClientContext;
use rdkafka::TopicPartitionList;
use rdkafka::client::OAuthToken;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode as Code;
use serde::Deserialize;
use tracing::{debug, error, warn};

use super::settings::{KafkaLogin, KafkaSettings};
use crate::clock::{Clock as _, SystemClock, millis};
use crate::telemetry::PerReason;

/// How long a token without an expiry is used.
const TOKEN_LASTS: Duration = Duration::from_secs(300);
/// Lines of the client library that were logged, by kind: a cluster that is away causes many.
static LINES: PerReason = PerReason::new();

/// What one client library's client tells. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Context(Arc<Told>);

#[derive(Debug)]
struct Told {
    bus: String,
    token_file: Option<PathBuf>,
    /// Why the last connection failed, since one succeeded.
    last: Mutex<Option<String>>,
    /// No broker can be reached.
    down: AtomicBool,
    /// A broker rejected the login.
    refused: AtomicBool,
    /// Where the partition ends whose end was reached last.
    end: AtomicI64,
}

impl Context {
    pub(super) fn new(settings: &KafkaSettings) -> Self {
        let token_file = match &settings.login {
            Some(KafkaLogin::Token(file)) => Some(file.clone()),
            _ => None,
        };
        Self(Arc::new(Told {
            bus: settings.bus(),
            token_file,
            last: Mutex::new(None),
            down: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            end: AtomicI64::new(-1),
        }))
    }

    /// The kind and the address, without credentials.
    pub(super) fn bus(&self) -> &str {
        &self.0.bus
    }

    /// Why the last connection failed; `None` if one succeeded since.
    pub(super) fn told(&self) -> Option<String> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether no broker can be reached.
    pub(super) fn is_down(&self) -> bool {
        self.0.down.load(Ordering::Relaxed)
    }

    /// Whether a broker rejected the login.
    pub(super) fn is_refused(&self) -> bool {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// A broker answered.
    pub(super) fn answered(&self) {
        // Read first: this is called for every batch.
        if self.is_down() || self.is_refused() || self.told().is_some() {
            self.0.down.store(false, Ordering::Relaxed);
            self.0.refused.store(false, Ordering::Relaxed);
            *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The offset of the end that the last error `PartitionEOF` reported. The caller of the poll that
    /// returned that error must ask before its next poll. `None` if the library did not say it.
    pub(super) fn end(&self) -> Option<i64> {
        let end = self.0.end.swap(-1, Ordering::Relaxed);
        (end >= 0).then_some(end)
    }
}

/// The offset in `Fetch from broker 1 reached end of partition at offset 7 (HighwaterMark 7)`. The
/// binding passes it on only in this text; the version of librdkafka is fixed, and a test reads it.
/// Without it, the lag would not end behind a transaction.
fn end_in(reason: &str) -> Option<i64> {
    let (_, behind) = reason.split_once("end of partition at offset ")?;
    behind.split(' ').next()?.parse().ok()
}

impl ClientContext for Context {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn log(&self, level: RDKafkaLogLevel, fac: &str, message: &str) {
        let bus = self.bus();
        let kind = match fac {
            "FAIL" | "ERROR" => "connection",
            "FETCH" | "CONSUME" => "fetch",
            "OAUTHBEARER" | "SASLREFRESH" => "login",
            "REQTMOUT" => "timeout",
            _ => "other",
        };
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error
            | RDKafkaLogLevel::Warning => {
                if let Some(suppressed) = LINES.take(kind) {
                    warn!(bus, fac, message, suppressed, "the Kafka client reports a problem");
                }
            }
            _ => debug!(bus, fac, message, "the Kafka client reports"),
        }
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(Code::PartitionEOF) => {
                self.0.end.store(end_in(reason).unwrap_or(-1), Ordering::Relaxed);
                return;
            }
            Some(Code::AllBrokersDown) => {
                self.0.down.store(true, Ordering::Relaxed);
                // "2/2 brokers are down" says less than why.
                if self.told().is_some() {
                    return;
                }
            }
            Some(Code::Authentication) => self.0.refused.store(true, Ordering::Relaxed),
            _ => {}
        }
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
        debug!(bus = self.bus(), %error, reason, "the Kafka client reports an error");
    }

    fn generate_oauth_token(&self, _: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        let file = self.0.token_file.as_deref().ok_or("no token file is configured")?;
        let token = std::fs::read_to_string(file).map_err(|source| {
            error!(file = %file.display(), %source, "cannot read the token for Kafka");
            format!("cannot read the token in {}: {source}", file.display())
        })?;
        Ok(parsed_token(token.trim(), millis(SystemClock.now())))
    }
}

impl ConsumerContext for Context {
    fn commit_callback(&self, result: KafkaResult<()>, _: &TopicPartitionList) {
        if let Err(error) = result {
            // Only tools that show the lag read these offsets.
            if let Some(suppressed) = LINES.take("commit") {
                warn!(bus = self.bus(), %error, suppressed, "cannot commit offsets");
            }
        }
    }
}

/// What a token of the usual kind (JWT) says of itself.
#[derive(Deserialize, Default)]
struct Claims {
    sub: Option<String>,
    /// Seconds since 1970.
    exp: Option<u64>,
}

fn parsed_token(token: &str, now_ms: u64) -> OAuthToken {
    let claims = token.split('.').nth(1);
    let claims = claims.and_then(|claims| URL_SAFE_NO_PAD.decode(claims).ok());
    let claims: Claims =
        claims.and_then(|claims| serde_json::from_slice(&claims).ok()).unwrap_or_default();
    let until = claims.exp.map_or_else(
        || now_ms.saturating_add(millis(TOKEN_LASTS)),
        |seconds| seconds.saturating_mul(1_000),
    );
    OAuthToken {
        token: token.to_owned(),
        principal_name: claims.sub.unwrap_or_else(|| "fairlane".to_owned()),
        lifetime_ms: i64::try_from(until).unwrap_or(i64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_an_end_is_read_from_its_text() {
        let text = "Fetch from broker 1 reached end of partition at offset 7 (HighwaterMark 9)";
        assert_eq!(end_in(text), Some(7));
        assert_eq!(end_in("Broker: No more messages"), None);
    }

    #[test]
    fn a_token_tells_how_long_it_lasts_and_any_other_lasts_five_minutes() {
        let claims = URL_SAFE_NO_PAD.encode(r#"{"sub":"svc","exp":1800000000}"#);
        let token = parsed_token(&format!("e30.{claims}.sig"), 5);
        assert_eq!((token.principal_name.as_str(), token.lifetime_ms), ("svc", 1_800_000_000_000));
        let token = parsed_token("opaque", 5);
        assert_eq!((token.principal_name.as_str(), token.lifetime_ms), ("fairlane", 300_005));
    }
}
