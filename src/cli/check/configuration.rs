//! Problems of the configuration that do not prevent loading it.

use super::{Exit, Finding};
use crate::cli::output::count;
use crate::config::{AUTOMATION, COUNTER, Config, ConfigError, NOTIFY, PUSH, PipelineConfig};
use crate::expression::{Filter, Sees};
use crate::id::PipelineName;
use crate::outbound::CheckedUrl;
use crate::pool::Lanes;
use crate::products::is_product;

/// The built-in handlers.
const BUILT_IN: [&str; 5] = [AUTOMATION, COUNTER, "log", NOTIFY, PUSH];

/// The finding for a configuration that cannot be loaded.
pub(super) fn refused(error: &ConfigError) -> Finding {
    Finding::fail(
        "configuration",
        error.to_string(),
        "nothing starts with it, and nothing else can be checked",
        "correct that setting",
    )
    .exits(Exit::Usage)
}

pub(super) fn check(config: &Config) -> Vec<Finding> {
    let redis = config.redis.url.as_ref().map_or_else(
        || format!("a private Redis under {}", config.data_dir.display()),
        ToString::to_string,
    );
    let from = config.file.as_ref().map_or_else(
        || "no file, defaults and environment".to_owned(),
        |file| file.display().to_string(),
    );
    let mut findings = vec![Finding::ok("configuration", format!("{from}; {redis}"))];
    let mut handled = false;
    for (name, pipeline) in config.pipelines.iter().filter(|(_, pipeline)| pipeline.enabled) {
        if (name.is(crate::counters::PIPELINE) || name.is(crate::automations::PIPELINE))
            && config.mongodb.url.is_none()
        {
            findings.push(without_mongodb(name, config));
        } else {
            findings.push(check_pipeline(name, pipeline));
            handled = true;
        }
    }
    if !handled {
        findings.push(Finding::warn(
            "pipelines",
            "none is enabled",
            "events stay on the bus and nothing handles them",
            "add a section [pipelines.NAME]; `fairlane config` prints one",
        ));
    }
    let sections = config.products.keys().filter(|name| !is_product(name));
    findings.extend(sections.map(|name| {
        Finding::warn(
            format!("products.{name}"),
            "is no product of this program",
            "`fairlane serve` does not start with it",
            "run this configuration with the program that adds the product, or correct the name",
        )
    }));
    if targets(config).next().is_some() {
        findings.push(check_secrets(config));
    }
    findings
}

/// The finding for a pipeline whose store is MongoDB, without `mongodb.url`.
fn without_mongodb(name: &PipelineName, config: &Config) -> Finding {
    let found = match config.redis.url {
        Some(_) => "does not run: it needs mongodb.url",
        None => "runs where a private MongoDB can be started: see mongodb",
    };
    Finding::ok(format!("pipeline {name}"), found)
}

/// The enabled pipelines that push, and their targets.
pub(super) fn targets(config: &Config) -> impl Iterator<Item = (&PipelineName, &CheckedUrl)> {
    config.pipelines.iter().filter_map(|(name, pipeline)| {
        let pushes = pipeline.enabled && pipeline.handler == PUSH;
        Some((name, pipeline.url.as_ref().filter(|_| pushes)?))
    })
}

fn check_secrets(config: &Config) -> Finding {
    let check = "callbacks";
    match config.callbacks.secrets.len() as u64 {
        0 => Finding::warn(
            check,
            "no secrets: calls are not signed",
            "a receiver cannot tell them from forged ones",
            "set callbacks.secrets to \"whsec_…\"; `fairlane secret --bot BOT` prints what its receiver needs",
        ),
        secrets => {
            Finding::ok(check, format!("calls are signed with {}", count(secrets, "secret")))
        }
    }
}

fn check_pipeline(name: &PipelineName, pipeline: &PipelineConfig) -> Finding {
    let check = format!("pipeline {name}");
    if let Some(Err(error)) =
        pipeline.filter.as_deref().map(|text| Filter::compile(text, Sees::Event))
    {
        return Finding::fail(
            check,
            error.to_string(),
            "`fairlane serve` does not start with it",
            format!("correct pipelines.{name}.filter"),
        )
        .exits(Exit::Usage);
    }
    let concurrency = pipeline.concurrency.get();
    if let Err(error) = Lanes::new(&pipeline.order_by, concurrency) {
        return Finding::fail(
            check,
            error.to_string().replace("the filter", "the expression"),
            "`fairlane serve` does not start with it",
            format!("correct pipelines.{name}.order_by"),
        )
        .exits(Exit::Usage);
    }
    let filtered = if pipeline.filter.is_some() { ", filtered" } else { "" };
    let (handler, events) = (&pipeline.handler, pipeline.events.join(", "));
    if handler == PUSH {
        let Some(url) = &pipeline.url else {
            let why = "`fairlane serve` does not start with it";
            let remedy = format!("set pipelines.{name}.url to the receiver's URL");
            let finding = Finding::fail(check, "handler push without a url", why, remedy);
            return finding.exits(Exit::Usage);
        };
        return Finding::ok(check, format!("pushes to {url}, events {events}{filtered}"));
    }
    if !BUILT_IN.contains(&handler.as_str()) {
        return Finding::warn(
            check,
            format!("handler {handler} is neither log nor push, which fairlane has itself"),
            "`fairlane serve` does not start with it",
            "run this pipeline with the program that registers the handler, or correct its name",
        );
    }
    if handler == AUTOMATION {
        return Finding::ok(
            check,
            format!("evaluates the rules of bots, events {events}{filtered}"),
        );
    }
    if handler == NOTIFY {
        return Finding::ok(check, "sends delayed notifications");
    }
    Finding::ok(check, format!("handler {handler}, events {events}{filtered}"))
}
