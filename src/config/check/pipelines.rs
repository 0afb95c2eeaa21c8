//! `[pipelines.NAME]`, with the rules of the built-in pipelines.

use std::time::Duration;

use humantime::format_duration;

use super::bounds::{
    HOUR, MILLISECOND, MINUTE, MONTH, SECOND, TEN_YEARS, WEEK, at_least, names, number, within,
};
use super::{Fault, limits};
use crate::config::built_in::{AUTOMATION, AUTOMATIONS, COUNTER, COUNTERS, NOTIFICATIONS, NOTIFY};
use crate::config::{OnOverflow, OrderBy, PipelineConfig};
use crate::id::PipelineName;

const EVENTS_MAX: usize = 1_000;

pub(super) fn check(
    name: &PipelineName,
    pipeline: &PipelineConfig,
    prefix: &str,
    grace: Duration,
) -> Result<(), Fault> {
    check_pipeline(name, pipeline, prefix, grace)?;
    check_automating(name, pipeline, prefix)?;
    check_counting(name, pipeline, prefix)?;
    check_notifying(name, pipeline, prefix)?;
    check_age(pipeline, prefix)
}

fn check_pipeline(
    name: &PipelineName,
    p: &PipelineConfig,
    prefix: &str,
    grace: Duration,
) -> Result<(), Fault> {
    let key = |name: &str| format!("{prefix}{name}");
    if p.handler.is_empty() {
        return Err(Fault::new(key("handler"), "is not set; name a handler, such as \"log\""));
    }
    names(&key("events"), &p.events, EVENTS_MAX, "type glob")?;
    if p.enabled && p.events.is_empty() && !name.is(NOTIFICATIONS) {
        let remedy =
            "name the types of events it takes, such as [\"tag.*\"], or set enabled = false";
        return Err(Fault::new(key("events"), format!("is empty; {remedy}")));
    }
    if p.url.is_some() && p.handler != "push" {
        let problem = format!(
            "is set, but the handler is {:?}; remove it, or set handler = \"push\"",
            p.handler
        );
        return Err(Fault::new(key("url"), problem).or(key("handler")));
    }
    number(&key("batch"), p.batch.get() as u64, (1, limits::BATCH))?;
    number(&key("max_attempts"), p.max_attempts.get().into(), (1, limits::ATTEMPTS))?;
    number(&key("workers.max"), p.workers.max.get() as u64, (1, limits::WORKERS))?;
    number(&key("max_queue"), p.max_queue.map_or(0, u64::from), (0, limits::QUEUE))?;
    number(&key("history.slices"), p.history.slices.into(), (0, limits::HISTORY))?;
    number(&key("history.max_bytes"), p.history.max_bytes, limits::HISTORY_BYTES)?;
    number(&key("dead.max"), p.dead.max.get(), (1, limits::DEAD))?;
    if p.workers.min > p.workers.max {
        let (min, max) = (p.workers.min, p.workers.max);
        let problem = format!("is {min}, above workers.max ({max}); lower it or raise workers.max");
        return Err(Fault::new(key("workers.min"), problem).or(key("workers.max")));
    }
    if p.burst.is_some() && p.rate.is_none() {
        let problem = "has no effect without a rate; set rate, such as \"10/s\", or remove it";
        return Err(Fault::new(key("burst"), problem).or(key("rate")));
    }
    check_order(name, p, &key)?;
    check_times(p, &key, grace)?;
    if !(0.0..=1.0).contains(&p.backoff.jitter) {
        let problem = format!("is {}; write a fraction from 0.0 to 1.0", p.backoff.jitter);
        return Err(Fault::new(key("backoff.jitter"), problem));
    }
    Ok(())
}

/// Checks that the ordering key of a pipeline exists, and suits its handler.
fn check_order(
    name: &PipelineName,
    p: &PipelineConfig,
    key: &impl Fn(&str) -> String,
) -> Result<(), Fault> {
    if matches!(&p.order_by, OrderBy::Key(text) if text.is_empty()) {
        let remedy = "write \"bot\", \"subject\", or a CEL expression over `event`";
        return Err(Fault::new(key("order_by"), format!("is empty; {remedy}")));
    }
    if p.order_by == OrderBy::Bot {
        if p.concurrency.get() == 1 {
            return Ok(());
        }
        let problem = format!(
            "is {}, but the events of a bot have one order; set order_by, such as \"subject\", or remove it",
            p.concurrency
        );
        return Err(Fault::new(key("concurrency"), problem).or(key("order_by")));
    }
    if p.total_rate.is_some() {
        let problem = "is not possible with order_by: events that wait behind a failing one would be counted more than once; remove one of them";
        return Err(Fault::new(key("total_rate"), problem).or(key("order_by")));
    }
    let why = match (name.as_str(), &p.order_by) {
        (COUNTERS, _) => "the store counts the views of a bot by one sequence, in order; remove it",
        (NOTIFICATIONS, _) => {
            "notifications keep no order, because each is due at its own time; remove it"
        }
        (AUTOMATIONS, OrderBy::Key(_)) => {
            "a profile takes the events of its subscriber in order; write \"subject\", or remove it"
        }
        _ => return Ok(()),
    };
    let problem = format!("is not possible here: {why}");
    Err(Fault::new(key("order_by"), problem))
}

/// Checks that a built-in pipeline and its handler are used together. Returns whether this is that
/// pipeline. `why` holds two consequences: of its handler elsewhere, and of another handler here.
fn reserved(
    (name, p, prefix): (&PipelineName, &PipelineConfig, &str),
    (built_in, handler): (&str, &str),
    [elsewhere, otherwise]: [&str; 2],
) -> Result<bool, Fault> {
    let refused = |problem| Err(Fault::new(format!("{prefix}handler"), problem));
    match (name.as_str() == built_in, p.handler == handler) {
        (false, true) => refused(format!(
            "is {handler:?}, which only the built-in pipeline {built_in:?} may have: {elsewhere}; tune [pipelines.{built_in}], or name another handler"
        )),
        (true, false) => refused(format!(
            "is {:?}: {otherwise}; remove it, or set enabled = false, and give the other handler a pipeline of another name",
            p.handler
        )),
        (is_built_in, _) => Ok(is_built_in),
    }
}

/// Checks that every accepted view is counted: no setting may drop a view.
fn check_counting(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let refused = |key: &str, problem: String| Err(Fault::new(format!("{prefix}{key}"), problem));
    let why = [
        "the views that arrive are put there, and those elsewhere would be lost",
        "the views would be lost, which \"counter\" alone counts",
    ];
    if !reserved((name, p, prefix), (COUNTERS, COUNTER), why)? {
        return Ok(());
    }
    if let Some(most) = p.max_queue {
        return refused(
            "max_queue",
            format!("is {most}: a view beyond it would be lost; remove it"),
        );
    }
    if p.on_overflow != OnOverflow::Dead {
        let problem = "is \"drop_new\": a view that is dropped would be lost; remove it";
        return refused("on_overflow", problem.to_owned());
    }
    if let Some(age) = p.max_age {
        let age = format_duration(age);
        let problem = format!("is {age}: a view that waited longer would be lost; remove it");
        return refused("max_age", problem);
    }
    let attempts = u64::from(p.max_attempts.get());
    if attempts != limits::ATTEMPTS {
        let problem = format!("is {attempts}: a view that is given up would be lost; remove it");
        return refused("max_attempts", problem);
    }
    Ok(())
}

/// Checks that only one pipeline evaluates rules.
fn check_automating(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let why = [
        "the fan-out copies there what bots have rules for",
        "no rule would be evaluated, which \"automation\" alone does",
    ];
    reserved((name, p, prefix), (AUTOMATIONS, AUTOMATION), why).map(drop)
}

/// How long a notification is kept after its end: `KEPT_MS` of `lua/notifications.lua`.
const NOTIFICATION_KEPT: Duration = Duration::from_secs(7 * 86_400);

/// Checks that every accepted notification is sent or ends in one of the counted ways: no setting
/// may drop its event.
fn check_notifying(name: &PipelineName, p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    let refused = |key: &str, problem: String| Err(Fault::new(format!("{prefix}{key}"), problem));
    let why =
        ["what is due is put there", "what is due would not be sent, which \"notify\" alone does"];
    if !reserved((name, p, prefix), (NOTIFICATIONS, NOTIFY), why)? {
        return Ok(());
    }
    if !p.events.is_empty() {
        let problem = "is not empty: no event of the bus is a notification; remove it";
        return refused("events", problem.to_owned());
    }
    if let Some(age) = p.max_age {
        let age = format_duration(age);
        let problem =
            format!("is {age}: a notification has a time of its own, expires_in; remove it");
        return refused("max_age", problem);
    }
    if p.dead.keep > NOTIFICATION_KEPT {
        let keep = format_duration(p.dead.keep);
        let problem = format!(
            "is {keep}, but a notification is kept for 7 days after its end, and redriven later it could not be sent; lower it to \"7d\""
        );
        return refused("dead.keep", problem);
    }
    Ok(())
}

/// Checks that an event is not too old after the wait for further ones. The last check, because some
/// built-in pipelines refuse any `max_age`, with another remedy.
fn check_age(p: &PipelineConfig, prefix: &str) -> Result<(), Fault> {
    match p.max_age {
        Some(age) if !p.linger.is_zero() && age <= p.linger => {
            let problem = format!(
                "is {}, but must be above linger ({}): an event would be too old before its slice starts; raise max_age or lower linger",
                format_duration(age),
                format_duration(p.linger),
            );
            let key = |name: &str| format!("{prefix}{name}");
            Err(Fault::new(key("max_age"), problem).or(key("linger")))
        }
        _ => Ok(()),
    }
}

fn check_times(
    p: &PipelineConfig,
    key: &impl Fn(&str) -> String,
    grace: Duration,
) -> Result<(), Fault> {
    within(&key("lease_ttl"), p.lease_ttl, SECOND..=HOUR)?;
    at_least(&key("slice_time"), p.slice_time, MILLISECOND)?;
    if p.slice_time > p.lease_ttl / 3 {
        let problem = format!(
            "is {}, above a third of lease_ttl ({}), where the lease is renewed; lower it or raise lease_ttl",
            format_duration(p.slice_time),
            format_duration(p.lease_ttl),
        );
        return Err(Fault::new(key("slice_time"), problem).or(key("lease_ttl")));
    }
    at_least(&key("handler_timeout"), p.handler_timeout, MILLISECOND)?;
    if p.handler_timeout > grace {
        let problem = format!(
            "is {}, above shutdown_grace ({}): a stop would cut handlers off; lower it or raise shutdown_grace",
            format_duration(p.handler_timeout),
            format_duration(grace),
        );
        return Err(Fault::new(key("handler_timeout"), problem).or("shutdown_grace"));
    }
    within(&key("backoff.max"), p.backoff.max, MILLISECOND..=WEEK)?;
    at_least(&key("backoff.initial"), p.backoff.initial, MILLISECOND)?;
    if p.backoff.initial > p.backoff.max {
        let problem = format!(
            "is {}, above backoff.max ({}); lower it or raise backoff.max",
            format_duration(p.backoff.initial),
            format_duration(p.backoff.max),
        );
        return Err(Fault::new(key("backoff.initial"), problem).or(key("backoff.max")));
    }
    within(&key("linger"), p.linger, Duration::ZERO..=HOUR)?;
    within(&key("max_age"), p.max_age.unwrap_or_default(), Duration::ZERO..=TEN_YEARS)?;
    within(&key("dead.keep"), p.dead.keep, SECOND..=TEN_YEARS)?;
    within(&key("history.keep"), p.history.keep, MINUTE..=MONTH)
}
