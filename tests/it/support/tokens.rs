//! Tokens for tests: each has a name and a table, and its text is its name, made longer.

use std::path::Path;

use tempfile::TempDir;

/// The files of the tokens, and the setting `auth.tokens` that names them.
pub(crate) struct Tokens {
    directory: TempDir,
    pub(crate) setting: String,
}

impl Tokens {
    /// One for each name. The second part is the rest of its table, in TOML.
    pub(crate) fn new(tokens: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tables: Vec<_> =
            tokens.iter().map(|(name, rest)| table(directory.path(), name, rest)).collect();
        Self { directory, setting: format!("[{}]", tables.join(", ")) }
    }

    /// Another text for a token.
    pub(crate) fn replace(&self, name: &str, text: &str) {
        std::fs::write(self.directory.path().join(name), text).unwrap();
    }

    /// The setting with another table for one more token.
    pub(crate) fn and(&self, name: &str, rest: &str) -> String {
        let more = table(self.directory.path(), name, rest);
        self.setting.replacen('[', &format!("[{more}, "), 1)
    }
}

fn table(directory: &Path, name: &str, rest: &str) -> String {
    let file = directory.join(name);
    std::fs::write(&file, text(name)).unwrap();
    format!("{{ name = {name:?}, token_file = {:?}, {rest} }}", file.display().to_string())
}

/// The text of a token.
pub(crate) fn text(name: &str) -> String {
    format!("{name}-0123456789abcdef")
}
