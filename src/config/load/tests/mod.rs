//! Settings that are read or refused, with the exact messages.

mod auth;
mod callbacks;
mod counters;
mod environment;
mod file;
mod limits;
mod notifications;
mod pipelines;
mod quotas;
mod sources;
mod tracing;

use std::io::Write as _;

use crate::config::{Config, ConfigError, PipelineConfig};
use crate::id::PipelineName;

const VALID: &str = "[pipelines.p]\nhandler = \"log\"\nevents = [\"*\"]\n";

fn refusal(text: &str) -> String {
    match Config::from_toml(text, "f.toml") {
        Ok(config) => panic!("{text:?} was accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

fn with_environment(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let variables = variables.iter().map(|&(name, text)| (name.to_owned(), text.to_owned()));
    Config::load_with(Some(file.path()), variables)
}

fn pipeline_of(config: &Config, name: &str) -> PipelineConfig {
    config.pipelines[&PipelineName::parse(name).unwrap()].clone()
}
