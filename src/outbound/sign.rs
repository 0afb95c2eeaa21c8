//! Signatures by Standard Webhooks (<https://www.standardwebhooks.com>): a receiver can verify that
//! a request is from Fairlane and unchanged.
//!
//! A secret is written as `whsec_` and base64. Each bot has its own key, HMAC-SHA256 of the secret
//! and the bot's id, so a receiver of one bot cannot sign for another one. Every secret signs each
//! request, so that secrets can be rotated.

use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use sha2::Sha256;
use subtle::{Choice, ConstantTimeEq as _};

use crate::id::BotId;

/// The header with the id of the delivery.
pub const ID: &str = "webhook-id";
/// The header with the time of the delivery, in seconds since 1970.
pub const TIMESTAMP: &str = "webhook-timestamp";
/// The header with the signatures.
pub const SIGNATURE: &str = "webhook-signature";

/// The media type of JSON.
pub const JSON: &str = "application/json";

const PREFIX: &str = "whsec_";
/// Shortest and longest secret, in bytes, by the specification.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Padding is optional, as in the libraries of the specification.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Why a text is not a secret. Never quotes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The prefix is missing.
    #[error("does not start with {PREFIX}; `echo whsec_$(openssl rand -base64 32)` makes one")]
    Prefix,
    /// Not base64.
    #[error("is not base64 after {PREFIX}; `echo whsec_$(openssl rand -base64 32)` makes one")]
    Base64,
    /// Too short or too long.
    #[error("has {0} bytes; 24 to 64 are allowed")]
    Length(usize),
}

/// A key that signs. Never printed by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Parses `whsec_` and base64.
    ///
    /// # Errors
    /// If the text has another form, or does not decode to 24 to 64 bytes.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let text = text.strip_prefix(PREFIX).ok_or(SecretError::Prefix)?;
        let bytes = LENIENT.decode(text).map_err(|_| SecretError::Base64)?;
        if !BYTES.contains(&bytes.len()) {
            return Err(SecretError::Length(bytes.len()));
        }
        Ok(Self(bytes.into()))
    }

    /// The key of one bot.
    #[must_use]
    pub fn of_bot(&self, bot: &BotId) -> Self {
        Self(self.mac([bot.as_str().as_bytes()]).into())
    }

    /// `whsec_` and base64: for the receiver, never for a log.
    #[must_use]
    pub fn expose(&self) -> String {
        format!("{PREFIX}{}", STANDARD.encode(&self.0))
    }

    fn mac<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

/// The value of [`SIGNATURE`]: one signature per key, in their order. `timestamp` is in seconds
/// since 1970.
#[must_use]
pub fn sign(keys: &[Secret], id: &str, timestamp: u64, body: &[u8]) -> String {
    let timestamp = timestamp.to_string();
    let signatures = keys.iter().map(|key| {
        let mac = key.mac([id.as_bytes(), b".", timestamp.as_bytes(), b".", body]);
        format!("v1,{}", STANDARD.encode(mac))
    });
    signatures.collect::<Vec<_>>().join(" ")
}

/// Why a request is not authentic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsigned {
    /// One of the three headers is missing.
    None,
    /// Its time differs from the receiver's clock by more than five minutes.
    Old,
    /// No signature matches one of the keys.
    Wrong,
}

/// Maximum difference between the time of a request and the receiver's clock, as the specification
/// advises.
const TOLERANCE: Duration = Duration::from_secs(300);

/// Verifies that one of `keys` signed a request, at `now` since 1970. For receivers.
///
/// # Errors
/// Says why the request is not authentic.
pub fn check(
    keys: &[Secret],
    headers: &HeaderMap,
    body: &[u8],
    now: Duration,
) -> Result<(), Unsigned> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let (Some(id), Some(time), Some(given)) = (text(ID), text(TIMESTAMP), text(SIGNATURE)) else {
        return Err(Unsigned::None);
    };
    let time = time.parse::<u64>().map_err(|_| Unsigned::Wrong)?;
    if now.abs_diff(Duration::from_secs(time)) > TOLERANCE {
        return Err(Unsigned::Old);
    }
    let ours: Vec<String> =
        keys.iter().map(|key| sign(std::slice::from_ref(key), id, time, body)).collect();
    // All signatures are compared, each in constant time.
    let mut found = Choice::from(0);
    for given in given.split(' ') {
        for ours in &ours {
            found |= ours.as_bytes().ct_eq(given.as_bytes());
        }
    }
    if found.into() { Ok(()) } else { Err(Unsigned::Wrong) }
}

/// The headers of a signed request for `bot`, at `now` since 1970. Without secrets there is no
/// signature header. An empty `media` adds no header.
#[must_use]
pub fn headers(
    secrets: &[Secret],
    bot: &BotId,
    id: &str,
    now: Duration,
    body: &[u8],
    media: &'static str,
) -> HeaderMap {
    let keys: Vec<Secret> = secrets.iter().map(|secret| secret.of_bot(bot)).collect();
    let signature = sign(&keys, id, now.as_secs(), body);
    let mut headers = HeaderMap::new();
    let mut put = |name: &'static str, value: String| {
        let value = HeaderValue::try_from(value);
        // Ids, numbers and base64 are always valid header values.
        headers.extend(value.map(|value| (HeaderName::from_static(name), value)));
    };
    if !media.is_empty() {
        put("content-type", media.to_owned());
    }
    put(ID, id.to_owned());
    put(TIMESTAMP, now.as_secs().to_string());
    if !keys.is_empty() {
        put(SIGNATURE, signature);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    /// The test vector of the libraries of the specification.
    #[test]
    fn a_signature_is_that_of_the_specification() {
        let key = Secret::parse(SECRET).unwrap();
        let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        let signed = sign(&[key], id, 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn a_receiver_accepts_a_fresh_signature_by_any_of_its_keys() {
        let other = format!("whsec_{}", STANDARD.encode([7; 24]));
        let keys = [SECRET, &other].map(|text| Secret::parse(text).unwrap());
        let (bot, now) = (BotId::parse("bot-7").unwrap(), Duration::from_secs(1_800_000_000));
        let of_bot = keys.each_ref().map(|key| key.of_bot(&bot));
        let signed = headers(&keys, &bot, "id", now, b"body", JSON);
        let seconds = Duration::from_secs;
        for key in &of_bot {
            let alone = std::slice::from_ref(key);
            assert_eq!(check(alone, &signed, b"body", now), Ok(()));
            assert_eq!(check(alone, &signed, b"body", now + seconds(300)), Ok(()));
            assert_eq!(check(alone, &signed, b"bodY", now), Err(Unsigned::Wrong));
            for off in [now + seconds(301), now.saturating_sub(seconds(301))] {
                assert_eq!(check(alone, &signed, b"body", off), Err(Unsigned::Old));
            }
        }
        assert_eq!(check(&keys, &signed, b"body", now), Err(Unsigned::Wrong), "not the bot's");
        assert_eq!(check(&[], &signed, b"body", now), Err(Unsigned::Wrong));
        let unsigned = headers(&[], &bot, "id", now, b"body", JSON);
        assert_eq!(check(&of_bot, &unsigned, b"body", now), Err(Unsigned::None));
    }

    #[test]
    fn every_secret_signs_in_their_order() {
        let other = format!("whsec_{}", STANDARD.encode([7; 24]));
        let keys = [SECRET, &other].map(|text| Secret::parse(text).unwrap());
        let alone = keys.each_ref().map(|key| sign(std::slice::from_ref(key), "id", 1, b"x"));
        assert_eq!(sign(&keys, "id", 1, b"x"), alone.join(" "));
        assert_ne!(alone[0], alone[1]);
        assert_eq!(sign(&[], "id", 1, b"x"), "");
    }

    /// Computed with the `hmac` of Python.
    #[test]
    fn the_key_of_a_bot_is_derived_from_its_id() {
        let key = Secret::parse(SECRET).unwrap().of_bot(&BotId::parse("bot-7").unwrap());
        assert_eq!(key.expose(), BOT_7);
        assert_eq!(Secret::parse(&key.expose()).unwrap(), key);
    }

    const BOT_7: &str = "whsec_h9fsI0col1K9jvcM2VuQC6OEwENXmL3tB+qphRCYQb4=";

    #[test]
    fn an_invalid_secret_is_refused_without_being_quoted() {
        let of = |bytes: usize| format!("whsec_{}", STANDARD.encode(vec![1; bytes]));
        let refused = [
            ("secret", SecretError::Prefix),
            ("WHSEC_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", SecretError::Prefix),
            ("whsec_not base64", SecretError::Base64),
            ("whsec_", SecretError::Length(0)),
            (&of(23), SecretError::Length(23)),
            (&of(65), SecretError::Length(65)),
        ];
        for (text, expected) in refused {
            assert_eq!(Secret::parse(text).unwrap_err(), expected, "{text}");
        }
        assert!(Secret::parse(&of(24)).is_ok() && Secret::parse(&of(64)).is_ok());
        assert!(Secret::parse(of(25).trim_end_matches('=')).is_ok());
    }

    #[test]
    fn a_secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::parse(SECRET).unwrap()), "Secret(***)");
    }
}
