//! Requests to the processes of a campaign, as clients of a real deployment make them.

use std::time::Duration;

use fairlane_testkit::http::{Client, Response};
use serde_json::Value;

/// Maximum time for an answer. A client that waits longer than this tries another process.
const PATIENCE: Duration = Duration::from_secs(3);

/// The HTTP API of a process.
#[derive(Debug, Clone)]
pub(crate) struct Api(Client);

impl Api {
    pub(crate) fn at(port: u16) -> Self {
        Self(Client::new(&format!("127.0.0.1:{port}")))
    }

    pub(crate) fn address(&self) -> &str {
        &self.0.address
    }

    pub(crate) async fn is_ready(&self) -> bool {
        self.get("/readyz").await.code == 200
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "").await
    }

    /// Sends JSON. Code 0: no answer came.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[("content-type", "application/json")], &body.to_string()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        let sending = self.0.send(method, path, headers, body.as_bytes());
        tokio::time::timeout(PATIENCE, sending).await.unwrap_or_default()
    }
}

/// The JSON of an answer, or `null`.
pub(crate) fn json(answer: &Response) -> Value {
    serde_json::from_slice(&answer.body).unwrap_or_default()
}
