//! Extractors of a handler's arguments. Each one fails with a [`Problem`] that names the parameter,
//! field, line or limit.

use std::time::Duration;

use axum::body::Body;
use axum::extract::path::ErrorKind;
use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;

use super::problem::{Flaw, Kind, Problem};

/// Maximum length of a body, in bytes.
pub(crate) const BODY_MAX: usize = 1 << 20;
/// Maximum time for a body to arrive.
const BODY_TIME: Duration = Duration::from_secs(10);

/// The parameters of the path.
#[derive(Debug)]
pub(crate) struct Path<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Path::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(path_problem(rejection)),
        }
    }
}

fn path_problem(rejection: PathRejection) -> Problem {
    let PathRejection::FailedToDeserializePathParams(failed) = rejection else {
        return Problem::new(Kind::InvalidRequest, rejection.body_text());
    };
    match failed.into_kind() {
        ErrorKind::DeserializeError { key, message, .. } => Problem::field(&key, message),
        ErrorKind::ParseErrorAtKey { key, expected_type, .. } => {
            Problem::field(&key, format!("it is not of type {expected_type}"))
        }
        ErrorKind::InvalidUtf8InPathParam { key } => Problem::field(&key, "it is not UTF-8"),
        other => Problem::new(Kind::InvalidRequest, other.to_string()),
    }
}

/// The query parameters.
#[derive(Debug)]
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        if std::str::from_utf8(&percent_decoded(query.as_bytes())).is_err() {
            return Err(Problem::new(Kind::InvalidRequest, "the query is not UTF-8"));
        }
        match axum::extract::Query::try_from_uri(&parts.uri) {
            Ok(axum::extract::Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(located(&rejection.body_text())),
        }
    }
}

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        check_json(&parts.headers)?;
        parse(&read(&parts.headers, body).await?).map(Self)
    }
}

/// An optional JSON body; without one the default applies.
#[derive(Debug)]
pub(crate) struct JsonOrNothing<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for JsonOrNothing<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let bytes = read(&parts.headers, body).await?;
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(T::default()));
        }
        check_json(&parts.headers)?;
        parse(&bytes).map(Self)
    }
}

fn check_json(headers: &HeaderMap) -> Result<(), Problem> {
    match media_type(headers)?.as_deref() {
        Some("application/json") => Ok(()),
        Some(other) => Err(unsupported(other, "application/json")),
        None => Err(unsupported("missing", "application/json")),
    }
}

/// Parses a JSON object.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // The deserializer would accept a list as the fields in their order.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(Problem::new(Kind::InvalidRequest, "the body is a list; send a JSON object"));
    }
    match axum::Json::from_bytes(bytes) {
        Ok(axum::Json(value)) => Ok(value),
        Err(JsonRejection::JsonSyntaxError(error)) => {
            let text = error.body_text();
            let text = text.rsplit_once(": ").map_or(&*text, |(_, text)| text);
            Err(Problem::new(Kind::InvalidRequest, format!("the body is not JSON: {text}")))
        }
        Err(error) => Err(located(&error.body_text())),
    }
}

/// Refuses a body, because the route would ignore its content. An empty JSON object is allowed.
#[derive(Debug)]
pub(crate) struct NoBody;

impl<S: Send + Sync> FromRequest<S> for NoBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let bytes = read(&parts.headers, body).await?;
        match bytes.trim_ascii() {
            b"" | b"{}" => Ok(Self),
            _ => Err(Problem::new(
                Kind::InvalidRequest,
                "this request takes no body; its parameters are in the path and the query",
            )),
        }
    }
}

/// Reads a body within [`BODY_MAX`] and [`BODY_TIME`].
pub(crate) async fn read(headers: &HeaderMap, body: Body) -> Result<Bytes, Problem> {
    collect(headers, body, BODY_MAX).await
}

/// Reads a body of at most `max` bytes within [`BODY_TIME`].
pub(super) async fn collect(headers: &HeaderMap, body: Body, max: usize) -> Result<Bytes, Problem> {
    if announced(headers).is_some_and(|bytes| bytes > max as u64) {
        return Err(too_large(max));
    }
    match tokio::time::timeout(BODY_TIME, Limited::new(body, max).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(max)),
        Ok(Err(_)) => Err(Problem::new(
            Kind::InvalidRequest,
            "the body ended early, or its chunks are malformed",
        )),
        Err(_) => {
            let detail = format!("the body did not arrive within {BODY_TIME:?}");
            Err(closing(Problem::new(Kind::BodyTooSlow, detail)))
        }
    }
}

/// Refuses bodies whose announced length is too large, on every route.
pub(crate) async fn refuse_large(request: Request, next: Next) -> Response {
    match announced(request.headers()) {
        Some(bytes) if bytes > BODY_MAX as u64 => too_large(BODY_MAX).into_response(),
        _ => next.run(request).await,
    }
}

/// Refuses requests that do not name the called server exactly once, as HTTP/1.1 demands: proxies in
/// front may have looked at another name than this server.
pub(crate) async fn refuse_unclear_host(request: Request, next: Next) -> Response {
    let named = request.headers().get_all(header::HOST).iter().count();
    let detail = match named {
        1 => return next.run(request).await,
        0 if request.version() < Version::HTTP_11 => return next.run(request).await,
        0 => "the header Host is missing",
        _ => "the header Host is present more than once",
    };
    closing(Problem::new(Kind::InvalidRequest, detail)).into_response()
}

pub(super) fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large(max: usize) -> Problem {
    let detail = format!("the body has more than {max} bytes, the maximum of this route");
    closing(Problem::new(Kind::BodyTooLarge, detail))
}

/// Closes the connection after the answer, so that the rest of the body is not read.
fn closing(problem: Problem) -> Problem {
    problem.header(header::CONNECTION, HeaderValue::from_static("close"))
}

/// The media type of a body in lower case, without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(None) };
    let unreadable = || Problem::new(Kind::MediaType, "content-type cannot be read");
    let mut parts = value.to_str().map_err(|_| unreadable())?.split(';');
    let media = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
    for parameter in parts {
        let Some((name, value)) = parameter.split_once('=') else { continue };
        let value = value.trim().trim_matches('"');
        let ours = ["utf-8", "utf8", "us-ascii"];
        if name.trim().eq_ignore_ascii_case("charset")
            && !ours.iter().any(|ours| value.eq_ignore_ascii_case(ours))
        {
            return Err(Problem::new(Kind::MediaType, "the charset is not UTF-8"));
        }
    }
    Ok(Some(media))
}

/// The problem for a body of another media type than `wanted`.
pub(crate) fn unsupported(found: &str, wanted: &str) -> Problem {
    Problem::new(Kind::MediaType, format!("content-type is {found}; send {wanted}"))
}

/// Converts a deserializer's error, such as `…: field: reason`, into a problem.
fn located(text: &str) -> Problem {
    let text = text.strip_prefix("Failed to deserialize ").unwrap_or(text);
    let (_, text) = text.split_once(": ").unwrap_or(("", text));
    let name =
        |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_[].-".contains(&b));
    match text.split_once(": ") {
        Some((field, detail)) if name(field) => Problem::field(field, detail),
        _ => {
            // The error names an unknown or missing field in backticks.
            let field = text.split('`').nth(1).map(str::to_owned);
            let detail = Flaw { index: None, field, detail: text.to_owned() };
            Problem::new(Kind::InvalidRequest, text).errors(vec![detail])
        }
    }
}

/// Decodes percent sequences such as `%41`; leaves everything else unchanged.
pub(crate) fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|&byte| char::from(byte).to_digit(16));
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                #[expect(clippy::cast_possible_truncation, reason = "two hexadecimal digits")]
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_sequences_are_decoded_and_everything_else_stays() {
        for (text, decoded) in [
            ("", &b""[..]),
            ("a%20b", b"a b"),
            ("%E2%82%ac", "€".as_bytes()),
            ("100%", b"100%"),
            ("%4", b"%4"),
            ("%zz%41", b"%zzA"),
            ("%ff", b"\xff"),
        ] {
            assert_eq!(percent_decoded(text.as_bytes()), decoded, "{text}");
        }
    }

    #[test]
    fn an_error_of_the_deserializer_becomes_the_field_and_its_fault() {
        for (text, field, detail) in [
            (
                "Failed to deserialize query string: limit: invalid digit found in string",
                "limit",
                "invalid digit",
            ),
            (
                "Failed to deserialize the JSON body into the target type: missing field `weight` at line 1 column 2",
                "weight",
                "missing field",
            ),
            (
                "Failed to deserialize the JSON body into the target type: weight: invalid type: string \"x\", expected u32 at line 1 column 9",
                "weight",
                "expected u32",
            ),
        ] {
            let problem = serde_json::to_value(located(text)).unwrap();
            assert_eq!(problem["errors"][0]["field"], field, "{problem}");
            assert!(problem["errors"][0]["detail"].as_str().unwrap().contains(detail), "{problem}");
        }
    }

    #[test]
    fn a_media_type_is_read_without_its_parameters_and_only_in_utf_8() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, text.parse().unwrap());
            media_type(&headers).map_err(|problem| problem.into_response().status().as_u16())
        };
        assert_eq!(
            read("Application/JSON; charset=\"UTF-8\""),
            Ok(Some("application/json".into()))
        );
        assert_eq!(read("text/plain;q=1;charset=latin1"), Err(415));
        assert_eq!(media_type(&HeaderMap::new()).unwrap(), None);
    }
}
