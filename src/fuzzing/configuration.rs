//! Configurations.

use super::halves;
use crate::config::{Config, ConfigError, Origin};

const FILE: &str = "fairlane.toml";

/// A file, and after a line `%%` the variables of the environment, each in a line `NAME=value`.
///
/// # Panics
/// If a refusal does not name a place that exists, or an accepted configuration is refused when it is
/// checked again.
pub fn configuration(data: &[u8]) {
    let (file, variables) = halves(data, b"\n%%\n");
    let (Ok(file), Ok(variables)) = (std::str::from_utf8(file), std::str::from_utf8(variables))
    else {
        return;
    };
    let variables = variables.lines().filter_map(|line| line.split_once('='));
    let variables: Vec<(String, String)> =
        variables.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    match Config::from_toml_and(file, FILE, variables.clone()) {
        Ok(config) => {
            assert!(config.check().is_ok(), "{:?}", config.check());
            assert!(!format!("{config:?}").is_empty());
        }
        Err(error) => is_told_with_its_place(&error, file, &variables),
    }
}

fn is_told_with_its_place(error: &ConfigError, file: &str, variables: &[(String, String)]) {
    let text = error.to_string();
    let at = match error {
        ConfigError::Read { .. } => panic!("there is no file: {text}"),
        ConfigError::Syntax { at, .. }
        | ConfigError::Twice { at, .. }
        | ConfigError::UnknownKey { at, .. }
        | ConfigError::WrongType { at, .. }
        | ConfigError::Invalid { at, .. } => at,
    };
    match at {
        Origin::File { name, line } => {
            let lines = file.split('\n').count();
            assert!(name == FILE && (1..=lines).contains(line), "of {lines} lines: {text}");
            assert!(text.starts_with(&format!("{FILE}:{line}: ")), "{text}");
        }
        Origin::Environment(name) => {
            assert!(variables.iter().any(|(known, _)| known == name), "{text}");
        }
        Origin::Code => panic!("the defaults are not at fault: {text}"),
    }
    if let ConfigError::Twice { at: Origin::File { line, .. }, first: Some(first), .. } = error {
        assert!(first <= line, "{text}");
    }
}
