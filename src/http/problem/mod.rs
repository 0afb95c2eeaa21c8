//! Problem documents (RFC 9457): the answers to requests that fail.

mod errors;
mod kind;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

pub(crate) use self::kind::Kind;
use crate::pipeline::Protected;

/// The media type of a problem.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

/// Maximum number of entries in [`Problem::errors`]; a batch has at most as many events.
const ERRORS_MAX: usize = 1_000;

/// A problem document (RFC 9457).
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Problem {
    /// The type of the problem: a stable URN such as `urn:fairlane:problem:no-pipeline`.
    #[serde(rename = "type")]
    #[schema(example = "urn:fairlane:problem:invalid-request")]
    kind: String,
    /// The type in words; constant for each type.
    title: &'static str,
    /// The HTTP status of the answer.
    #[schema(example = 400)]
    status: u16,
    pub(super) detail: String,
    /// The individual errors, if known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<Flaw>,
    #[serde(skip)]
    pub(super) headers: Vec<(header::HeaderName, HeaderValue)>,
}

/// One error.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Flaw {
    /// The index of the event in the batch, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    /// The name of the parameter, field or attribute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// The reason of the error.
    pub(crate) detail: String,
}

impl Problem {
    /// A problem. `detail` names the fault of this request, and the remedy.
    pub(crate) fn new(kind: Kind, detail: impl Into<String>) -> Self {
        let (status, urn, title) = kind.parts();
        Self {
            kind: format!("urn:fairlane:problem:{urn}"),
            title,
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// A purge that the kind of the pipeline forbids. The product names the type of the problem.
    pub(crate) fn protected(kept: Protected) -> Self {
        let kind = format!("urn:fairlane:problem:{}", kept.code);
        Self { kind, title: kept.title, ..Self::new(Kind::Protected, kept.to_string()) }
    }

    /// An invalid parameter or field.
    pub(crate) fn field(field: &str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        let problem = Self::new(Kind::InvalidRequest, format!("{field}: {detail}"));
        problem.errors(vec![Flaw { index: None, field: Some(field.to_owned()), detail }])
    }

    pub(crate) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    pub(crate) fn title(&self) -> &'static str {
        self.title
    }

    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// A problem without a type of its own.
    pub(crate) fn of_status(status: StatusCode) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        Self {
            kind: "about:blank".to_owned(),
            title,
            status: status.as_u16(),
            detail: title.to_lowercase(),
            errors: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// Adds the individual errors, at most [`ERRORS_MAX`].
    pub(crate) fn errors(mut self, mut errors: Vec<Flaw>) -> Self {
        errors.truncate(ERRORS_MAX);
        self.errors = errors;
        self
    }

    /// Adds a header to the answer.
    pub(crate) fn header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Adds `Retry-After`, in seconds.
    pub(crate) fn retry_after(self, seconds: u32) -> Self {
        self.header(header::RETRY_AFTER, seconds.into())
    }
}

impl IntoResponse for Problem {
    fn into_response(mut self) -> Response {
        let status = self.status();
        let headers = std::mem::take(&mut self.headers);
        // Strings and numbers always serialise.
        let body = serde_json::to_vec(&self).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
        response.headers_mut().extend(headers);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_the_field() {
        let problem = serde_json::to_value(Problem::field("limit", "it is 0")).unwrap();
        assert_eq!(problem["type"], "urn:fairlane:problem:invalid-request");
        assert_eq!(problem["errors"][0]["field"], "limit");
        assert_eq!(problem["detail"], "limit: it is 0");
    }
}
