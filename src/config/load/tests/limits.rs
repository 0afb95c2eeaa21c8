//! `[[limits.bots]]`, and the rates of pipelines: the exact messages.

use super::refusal;
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::rate::{BotLimits, BotRate, Bucket};

fn pipeline(settings: &str) -> String {
    format!("[pipelines.p]\nhandler = \"log\"\nevents = [\"*\"]\n{settings}")
}

#[test]
fn a_bot_has_the_rate_of_the_pipeline_unless_it_has_its_own() {
    let text = pipeline(
        "rate = \"10/s\"\nburst = 3\ntotal_rate = \"0.5/m\"\ntotal_concurrency = 4",
    ) + "\n[[limits.bots]]\nbot = \"b\"\npipeline = \"p\"\nrate = \"unlimited\"\nweight = 0.25";
    let config = Config::from_toml(&text, "f").unwrap();
    let limits = config.limits_of_bots(&PipelineName::parse("p").unwrap());
    let ten = Bucket::new("10/s".parse().unwrap(), Some(3));
    assert_eq!(limits.general.bucket(), Some(ten));
    let own = limits.bots[&BotId::parse("b").unwrap()];
    let expected = BotLimits {
        weight: Some("0.25".parse().unwrap()),
        rate: Some(BotRate::Unlimited),
        burst: None,
    };
    assert_eq!(own, expected);
    assert_eq!(limits.total.rate.unwrap().burst, 1);
    assert_eq!(limits.total.concurrency, Some(4));
    let other = config.limits_of_bots(&PipelineName::parse("counters").unwrap());
    assert_eq!(
        (other.general.bucket(), other.total.rate, other.total.concurrency),
        (None, None, None)
    );
}

#[test]
fn wrong_limits_are_refused_with_their_line_key_and_remedy() {
    let own = |settings: &str| {
        pipeline("") + &format!("\n[[limits.bots]]\nbot = \"b\"\npipeline = \"p\"\n{settings}")
    };
    let rates = "write events per second, minute or hour, from 0.001 to 1000000, such as \"10/s\", \"0.5/s\", \"30/m\" or \"100/h\"; to stop a bot, pause it";
    for (text, expected) in [
        (pipeline("rate = \"0/s\""), format!("f.toml:4: pipelines.p.rate is \"0/s\"; {rates}")),
        (
            pipeline("total_rate = \"10/d\""),
            format!("f.toml:4: pipelines.p.total_rate is \"10/d\"; {rates}"),
        ),
        (
            pipeline("burst = 5"),
            "f.toml:4: pipelines.p.burst has no effect without a rate; set rate, such as \"10/s\", or remove it".to_owned(),
        ),
        (
            pipeline("rate = \"1/s\"\nburst = -1"),
            "f.toml:5: pipelines.p.burst is -1; write a whole number from 0 to 1000000".to_owned(),
        ),
        (
            pipeline("total_concurrency = 100001"),
            "f.toml:4: pipelines.p.total_concurrency is 100001; write a whole number from 0 to 100000".to_owned(),
        ),
        (own("rate = \"x\""), format!("f.toml:8: limits.bots[0].rate is \"x\"; {rates}")),
        (
            own("weight = 0"),
            "f.toml:8: limits.bots[0].weight is 0; write a number from 0.01 to 1000, such as 0.5 or 3".to_owned(),
        ),
        (
            own("burst = 2"),
            "f.toml:8: limits.bots[0].burst has no effect without a rate; set rate, or remove it".to_owned(),
        ),
        (
            own("[[limits.bots]]\nbot = \"b\"\npipeline = \"p\""),
            "f.toml:9: limits.bots[1].bot is \"b\" once more for \"p\"; give each bot one table".to_owned(),
        ),
        (
            "[[limits.bots]]\nbot = \"b\"\npipeline = \"q\"".to_owned(),
            "f.toml:3: limits.bots[0].pipeline is \"q\", which is no pipeline; name one".to_owned(),
        ),
    ] {
        assert_eq!(refusal(&text), expected);
    }
}

#[test]
fn an_ordering_key_that_cannot_be_used_is_refused_with_its_line_key_and_remedy() {
    let built_in = |name: &str, settings: &str| format!("[pipelines.{name}]\n{settings}");
    for (text, expected) in [
        (
            pipeline("concurrency = 2"),
            "f.toml:4: pipelines.p.concurrency is 2, but the events of a bot have one order; set order_by, such as \"subject\", or remove it",
        ),
        (
            pipeline("order_by = \"subject\"\nconcurrency = 65"),
            "f.toml:5: pipelines.p.concurrency is 65; write a whole number from 1 to 64",
        ),
        (
            pipeline("order_by = \" \""),
            "f.toml:4: pipelines.p.order_by is empty; write \"bot\", \"subject\", or a CEL expression over `event`",
        ),
        (
            pipeline("order_by = \"subject\"\ntotal_rate = \"1/s\""),
            "f.toml:5: pipelines.p.total_rate is not possible with order_by: events that wait behind a failing one would be counted more than once; remove one of them",
        ),
        (
            built_in("automations", "order_by = \"event.id\""),
            "f.toml:2: pipelines.automations.order_by is not possible here: a profile takes the events of its subscriber in order; write \"subject\", or remove it",
        ),
        (
            built_in("counters", "order_by = \"subject\""),
            "f.toml:2: pipelines.counters.order_by is not possible here: the store counts the views of a bot by one sequence, in order; remove it",
        ),
        (
            built_in("notifications", "order_by = \"subject\""),
            "f.toml:2: pipelines.notifications.order_by is not possible here: notifications keep no order, because each is due at its own time; remove it",
        ),
    ] {
        assert_eq!(refusal(&text), expected, "{text}");
    }
    for fine in ["order_by = \"bot\"", "order_by = \"subject\"\nconcurrency = 64"] {
        Config::from_toml(&pipeline(fine), "f").unwrap();
    }
    let by_subject = built_in("automations", "order_by = \"subject\"\nconcurrency = 8");
    Config::from_toml(&by_subject, "f").unwrap();
}
