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

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(reload))
}

impl From<ReloadError> for Problem {
    fn from(error: ReloadError) -> Self {
        let kind = match &error {
            ReloadError::Refused(_) => Kind::InvalidRequest,
            ReloadError::Unsupported => Kind::NoReload,
            ReloadError::NotReady(_) => Kind::Starting,
        };
        Self::new(kind, error.to_string())
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
    let work = async {
        let reloads = api.reloads.as_ref().ok_or(ReloadError::Unsupported)?;
        Ok(reloads.ask().await?)
    };
    let told = |done: &Reloaded| match done.changed.as_slice() {
        [] => "done: no setting changed".to_owned(),
        changed => format!("done: {}", changed.join(", ")),
    };
    api.act(&caller, Action::new("reload"), work, told).await.map(Json)
}
