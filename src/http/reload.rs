//! The route that reloads the configuration of the process.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::docs::OfReload;
use super::extract::NoBody;
use super::problem::{Kind, Problem};
use crate::reload::{ReloadError, Reloaded};
use crate::trail::Action;

/// `Retry-After` after a new instance did not start, or if this process stops, in seconds.
const AGAIN_SECONDS: u32 = 10;

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(reload))
}

impl From<ReloadError> for Problem {
    fn from(error: ReloadError) -> Self {
        let detail = error.to_string();
        match error {
            ReloadError::Refused(_) => Self::new(Kind::InvalidRequest, detail),
            ReloadError::Unsupported => Self::new(Kind::NoReload, detail),
            ReloadError::NotReady(_) | ReloadError::Stops => {
                Self::new(Kind::Starting, detail).retry_after(AGAIN_SECONDS)
            }
        }
    }
}

/// Reload the configuration
///
/// Reads the configuration and the files that it names again, as on SIGHUP: pipelines, limits, tokens,
/// secrets, certificates, buses. Answers when the new settings are in force in this process. No lease is
/// lost and no connection refused. A configuration that cannot be used changes nothing, and the answer
/// says why. Needs a token of all bots.
#[utoipa::path(
    post, path = "/v1/reload", tag = "pipelines", operation_id = "reload",
    responses((status = 200, description = "The new settings are in force", body = Reloaded), OfReload)
)]
async fn reload(
    State(api): State<Arc<Api>>,
    caller: Caller,
    NoBody: NoBody,
) -> Result<Json<Reloaded>, Problem> {
    caller.check_all_bots()?;
    let reloads = api.reloads.as_ref().ok_or(ReloadError::Unsupported)?;
    let accepted = reloads.request().await?;
    let tasks = api.trail.tasks().clone();
    // In a task: the reload does not end with its request, and the trail gets its result.
    let reloading = tasks.spawn(async move {
        let work = async { Ok(accepted.answer().await?) };
        let told = |done: &Reloaded| match done.changed.as_slice() {
            [] => "done: no setting changed".to_owned(),
            changed => format!("done: {}", changed.join(", ")),
        };
        api.act(&caller, Action::new("reload"), work, told).await
    });
    let failed =
        |_| Problem::new(Kind::Internal, "the reload failed; the log of this server says why");
    reloading.await.map_err(failed)?.map(Json)
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderValue, header};
    use axum::response::IntoResponse as _;

    use super::*;

    #[test]
    fn an_instance_that_does_not_start_is_tried_again_later() {
        let error = ReloadError::NotReady("it has ended".to_owned());
        let response = Problem::from(error).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()[header::RETRY_AFTER], HeaderValue::from(AGAIN_SECONDS));
    }
}
