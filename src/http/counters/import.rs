//! The import of counters: one line per ad.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::acting::number;
use super::super::auth::Caller;
use super::super::docs::{Body as BodyProblems, OfImports};
use super::super::extract::{self, Path, Query};
use super::super::problem::{Flaw, Kind, Problem};
use super::export::NDJSON;
use super::replace::days_schema;
use super::{BotPath, IdempotencyKey};
use crate::counters::import::ImportError;
use crate::counters::view::{self, BAD_MAX, BadLine};
use crate::trail::Action;

/// Maximum line number. JSON numbers of this size are still exact.
const LINE_MAX: u64 = 1_000_000_000_000;
/// Maximum number of bad lines in an answer.
const TOLD: usize = 100;
/// `Retry-After` while replacements wait to be written, in seconds.
const WAITING_SECONDS: u32 = 1;
/// `Retry-After` while Redis is nearly full, in seconds.
const FULL_SECONDS: u32 = 5;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ImportQuery {
    /// The number of the first line of the body in the whole import. Default: 1.
    #[param(minimum = 1, maximum = 1_000_000_000_000_u64, default = 1)]
    line: Option<u64>,
}

/// One line of an import.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only its schema is used: lines are read one by one")]
pub(super) struct ImportLine {
    /// 1 to 128 bytes without control characters.
    #[schema(min_length = 1, max_length = 128)]
    ad: String,
    /// The total of the ad.
    #[schema(minimum = 0, maximum = 1_000_000_000_000_000_u64)]
    total: u64,
    /// Views by day, from 2000-01-01 to the day after today; their sum must not exceed the total.
    #[schema(schema_with = days_schema, required = false)]
    days: BTreeMap<String, u64>,
}

/// The progress of an import.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ImportProgress {
    /// Number of lines imported by this request.
    imported: u64,
    /// Number of lines of this request that an earlier request with the same key had imported.
    skipped: u64,
    /// The number of the next line to send. If it is not above the last line of this request, there
    /// was no room for the others, or Redis failed: send the lines from this number on.
    next: u64,
}

/// Import history
///
/// Each line, like `{"ad":"x","total":9,"days":{"2026-11-01":3}}`, replaces all views counted for
/// its ad, as `PUT` does. `Idempotency-Key` names the import. Over all requests with this key for
/// this bot, each line is imported once, in the order of the line numbers. This holds for 7 days
/// after the last request. Repeating a request, as a whole or in part, imports nothing twice. If a
/// line is bad, the whole request is refused, and `errors` names the bad lines, at most 100. After
/// 1,000 bad lines, the others are not checked.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/counters/import", tag = "counters",
    operation_id = "importCounters",
    params(
        BotPath, ImportQuery,
        (
            "Idempotency-Key" = String, Header, min_length = 1, max_length = 255,
            pattern = "^[!-~]+$", description = "The name of the import, the same in all its requests",
        ),
    ),
    request_body(content = ImportLine, content_type = NDJSON, description = "Lines, at most 1 MiB"),
    responses(
        (status = 200, description = "Imported, up to `next`", body = ImportProgress),
        OfImports, BodyProblems,
    )
)]
pub(super) async fn import(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    Query(ImportQuery { line }): Query<ImportQuery>,
    key: IdempotencyKey,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ImportProgress>, Problem> {
    if extract::media_type(&headers)?.as_deref() != Some(NDJSON) {
        let detail = format!("the content-type is not {NDJSON}");
        return Err(Problem::new(Kind::MediaType, detail));
    }
    let Some(key) = key.as_str() else {
        let detail = "it is missing; send a name for this import";
        return Err(Problem::field("Idempotency-Key", detail));
    };
    let first = line.unwrap_or(1);
    if !(1..=LINE_MAX).contains(&first) {
        let detail = format!("it is {first}; write a whole number from 1 to {LINE_MAX}");
        return Err(Problem::field("line", detail));
    }
    let text = extract::read(&headers, body).await?;
    let counters = api.counters_of(&bot, &caller)?;
    let lines = view::lines(&text, first, &counters.days()).map_err(|bad| refused(&bad))?;
    if lines.is_empty() {
        return Err(Problem::new(Kind::InvalidRequest, "the body has no line; send at least one"));
    }
    let work = async { Ok(counters.import(&bot, key, &lines).await?) };
    let action = Action::new("import counters").in_built_in(crate::counters::PIPELINE);
    let action = action.of_bot(Some(&bot)).target(key).often();
    let progress = api.act(&caller, action, work, |done| number(&done.imported)).await?;
    let next = progress.last + 1;
    Ok(Json(ImportProgress { imported: progress.imported, skipped: progress.skipped, next }))
}

fn refused(bad: &[(u64, BadLine)]) -> Problem {
    let count = bad.len();
    let told = if count > TOLD { format!(" (the first {TOLD} are listed)") } else { String::new() };
    let lines = match count {
        1 => "line",
        BAD_MAX.. => "lines or more",
        _ => "lines",
    };
    let detail =
        format!("{count} {lines} cannot be used{told}; nothing of this request was imported");
    let flaws = bad.iter().take(TOLD).map(|(number, reason)| Flaw {
        index: None,
        field: Some(format!("line {number}")),
        detail: reason.to_string(),
    });
    Problem::new(Kind::InvalidRequest, detail).errors(flaws.collect())
}

impl From<ImportError> for Problem {
    fn from(error: ImportError) -> Self {
        let detail = format!("nothing was imported: {error}");
        match error {
            ImportError::Redis(error) => error.into(),
            ImportError::Gap { .. } => Self::new(Kind::ImportGap, detail),
            ImportError::Waiting { .. } => {
                Self::new(Kind::Busy, detail).retry_after(WAITING_SECONDS)
            }
            ImportError::Full { .. } => Self::new(Kind::Full, detail).retry_after(FULL_SECONDS),
        }
    }
}
