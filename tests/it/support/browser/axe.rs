//! The rules of axe-core, run in the page. `.ci/setup test` installs them.

use std::path::Path;

use serde::Deserialize;

use super::Page;

/// A rule that the page breaks.
#[derive(Debug, Deserialize)]
pub(crate) struct Violation {
    /// `minor`, `moderate`, `serious` or `critical`.
    pub(crate) impact: String,
    /// The rule, what it says, and the first elements that break it.
    pub(crate) about: String,
}

/// Runs every rule. The text is empty unless a rule is broken.
const RUN: &str = "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) =>
  violations.map(({ id, impact, help, nodes }) => ({
    impact: impact ?? 'minor',
    about: `${id}: ${help}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 160)).join(' ')}`,
  })))";

impl Page {
    /// The rules of axe-core that the current page breaks.
    pub(crate) async fn violations(&self) -> Vec<Violation> {
        if !self.eval::<bool>("typeof axe === 'object'").await {
            let loaded = format!("{}; typeof axe", source());
            assert_eq!(self.eval::<String>(&loaded).await, "object");
        }
        self.eval(RUN).await
    }
}

fn source() -> &'static str {
    static SOURCE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    SOURCE.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
        let file = target.join("axe/axe.min.js");
        std::fs::read_to_string(&file).unwrap_or_else(|error| {
            let remedy = "run `bash .ci/setup test`, or `make test`, which does";
            panic!("{}: {error}: {remedy}", file.display())
        })
    })
}
