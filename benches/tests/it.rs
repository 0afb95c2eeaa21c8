//! Tests of the program itself, on private servers.

use std::path::Path;
use std::process::{Command, Stdio};

use fairlane::app::Roles;
use fairlane::handler::LogHandler;
use fairlane::id::PipelineName;
use fairlane::sandbox::{Rig, SandboxError};
use serde_json::Value;

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

/// Runs the program in a directory of its own.
async fn run(arguments: &[&str]) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fairlane-bench"));
    command.args(arguments).current_dir(directory.path());
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    // Where `.ci/setup test` installs it.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    command.env("FAIRLANE_MONGOD", target.join("mongodb/bin/secantusd-py"));
    let ended = tokio::task::spawn_blocking(move || command.output());
    let ended = ended.await.unwrap().unwrap();
    Ran {
        code: ended.status.code().unwrap(),
        out: String::from_utf8(ended.stdout).unwrap(),
        err: String::from_utf8(ended.stderr).unwrap(),
    }
}

async fn overload(arguments: &[&str]) -> Ran {
    run(&[&["overload"], arguments].concat()).await
}

#[tokio::test]
async fn a_deployment_is_asked_with_its_own_routes_and_classes() {
    Box::pin(Rig::with(asked)).await.unwrap();
}

async fn asked(rig: &Rig) -> Result<(), SandboxError> {
    let (name, any) = (PipelineName::parse("asked")?, ([127, 0, 0, 1], 0).into());
    let app = rig.app_as(&name, Roles::ALL, any, 4, |_| {}, LogHandler).await?;
    let url = format!("http://{}", app.http_address()?.unwrap());
    let instance = Rig::spawn(app);
    let routes =
        ["p0 GET /healthz", "p1 GET /v1/pipelines", "p3 GET /v1/pipelines/asked/bots/b-{n}"];
    let routes = routes.map(|route| ["--route", route]).concat();
    let few = ["--url", &url, "--rates", "30,60", "--seconds", "1", "--json"];
    let ran = overload(&[&few[..], &routes].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("up to 60 requests a second for 3 s in all"), "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let steps = report["steps"].as_array().unwrap();
    let rates: Vec<_> = steps.iter().map(|step| (&step["rate"], &step["again"])).collect();
    assert_eq!(
        rates,
        [(&30.into(), &false.into()), (&60.into(), &false.into()), (&30.into(), &true.into())]
    );
    let mut in_time = 0;
    for step in steps {
        let classes = step["classes"].as_array().unwrap();
        let names: Vec<_> = classes.iter().map(|class| class["class"].as_str().unwrap()).collect();
        assert_eq!(names, ["p0", "p1", "p3"]);
        for class in classes {
            let count = |name: &str| class[name].as_u64().unwrap();
            let ended = count("in_time") + count("shed") + count("late") + count("failed");
            assert_eq!(ended, count("offered"), "{class}");
            in_time += count("in_time");
        }
    }
    assert!(in_time > 0, "{report}");

    let wrong = overload(&["--url", &url, "--route", "p1 GET /v1/pipelines/none"]).await;
    assert_eq!(wrong.code, 1, "{wrong:?}");
    assert!(
        wrong.err.contains("p1 GET /v1/pipelines/none") && wrong.err.contains("404"),
        "{wrong:?}"
    );
    instance.stop().await?;
    let gone = overload(&["--url", &url, "--route", "p1 GET /v1/pipelines"]).await;
    assert_eq!(gone.code, 69, "{gone:?}");
    assert!(gone.err.contains("correct --url"), "{gone:?}");
    Ok(())
}

#[tokio::test]
async fn another_machine_is_asked_only_by_who_says_so_and_mistakes_are_named() {
    let route = ["--route", "p1 GET /v1/pipelines"];
    for (arguments, said) in [
        (&["--url", "http://192.0.2.1:8080"][..], "add --remote"),
        (&["--url", "https://127.0.0.1:8080"], "must be http"),
        (&["--url", "http://127.0.0.1:8080/v1"], "a host and a port only"),
        (&["--url", "http://127.0.0.1:8080", "--rates", "30000"], "30000"),
        (
            &[
                "--url",
                "http://127.0.0.1:8080",
                "--seconds",
                "300",
                "--rates",
                "1,1,1,1,1,1,1,1,1,1,1,1,1",
            ],
            "the maximum is 3600 s",
        ),
        (&["--url", "http://127.0.0.1:8080", "--loads", "1"], "--loads"),
        (&["--url", "http://127.0.0.1:8080", "--token-file", "none.token"], "none.token"),
        (&["--url", "http://127.0.0.1:8080", "--route", "GET /x"], "no class"),
    ] {
        let ran = overload(&[arguments, &route].concat()).await;
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said), "{said}: {ran:?}");
    }
    let ran = overload(&["--url", "http://127.0.0.1:8080"]).await;
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("--route"), "{ran:?}");
}

#[tokio::test]
async fn the_bench_finds_none_early_and_none_twice() {
    let parts = ["--notifications", "500", "--seconds", "1", "--bots", "10"];
    let beside = ["--dead", "100", "--hanging", "1", "--json"];
    let ran = run(&[&["notifications"], &parts[..], &beside].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let count = |name: &str| report[name].as_u64().unwrap();
    let found = (count("notifications"), count("early"), count("repeated"));
    assert_eq!(found, (500, 0, 0), "{report}");
    assert!(report["beside_p99_ms"].is_f64() && count("hanging_requests") <= 16, "{report}");
    let [p50, p99, max] = ["p50_ms", "p99_ms", "max_ms"].map(|name| report[name].as_f64().unwrap());
    assert!(p50 <= p99 && p99 <= max, "{report}");
}

#[tokio::test]
async fn the_bench_puts_a_hostile_tenant_beside_quiet_ones_and_judges() {
    let only = ["--only", "shared-host", "--only", "tokens", "--seconds", "2", "--json"];
    let ran = run(&[&["isolation"], &only[..]].concat()).await;
    let report: Value = serde_json::from_str(&ran.out).unwrap_or_else(|_| panic!("{ran:?}"));
    let count = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(count("held") + count("failed"), 2, "{report}");
    // A defect, and a slow machine, fail here as they do for the user.
    assert_eq!(ran.code, i32::from(count("failed") > 0), "{ran:?}");
    let resources = report["resources"].as_array().unwrap();
    let names: Vec<_> = resources.iter().map(|line| line["resource"].as_str().unwrap()).collect();
    assert_eq!(names, ["shared-host", "tokens"]);
    for (line, measure) in resources.iter().zip(["lateness", "request"]) {
        assert_eq!(line["measure"], measure, "{line}");
        assert!(line["samples"].as_u64().unwrap() >= 100, "{line}");
        let [p50, p99] = ["alone_p50_ms", "alone_p99_ms"].map(|name| line[name].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99, "{line}");
        assert_eq!(line["refused_alone"], 0, "{line}");
        assert_eq!(
            line["verdict"] == "failed",
            ran.err.contains(line["resource"].as_str().unwrap())
        );
    }
}

#[tokio::test]
async fn the_bench_of_limits_shows_each_figure_with_its_bound_and_judges() {
    let few = ["--bots", "5", "--seconds", "3", "--processes", "2"];
    let ran = run(&[&["limits"], &few[..], &["--json"]].concat()).await;
    let report: Value = serde_json::from_str(&ran.out).unwrap_or_else(|_| panic!("{ran:?}"));
    let figures = report["figures"].as_array().unwrap();
    let figure = |name: &str| figures.iter().find(|figure| figure["name"] == name).unwrap();
    // A slow machine fails here as it does for the user; a defect of the bucket or the order does everywhere.
    let missed: Vec<_> = figures.iter().filter(|figure| figure["held"] == false).collect();
    assert_eq!(ran.code, i32::from(!missed.is_empty()), "{ran:?}");
    assert!(missed.iter().all(|figure| ran.err.contains(figure["name"].as_str().unwrap())));
    for name in ["events above the bucket", "events out of order", "quiet events lost"] {
        assert_eq!(figure(name)["held"], true, "{report}");
    }
    let bounds = ["least", "most"].map(|bound| {
        let figure = figure(&format!("{bound} events/s of a bot"));
        (figure[bound].as_f64().unwrap(), figure["measured"].as_f64().unwrap())
    });
    assert!((bounds[0].0 - 9.8).abs() < 1e-9 && (bounds[1].0 - 10.05).abs() < 1e-9, "{report}");
    assert!(bounds[0].1 > 0.0 && bounds[0].1 <= bounds[1].1, "{report}");
    let bots = report["per_bot"].as_array().unwrap();
    assert_eq!((bots.len(), &report["window_seconds"]), (5, &1.into()), "{report}");
    assert!(bots.iter().all(|bot| bot["events"].as_u64().unwrap() >= 20), "{report}");

    let table = run(&[&["limits"], &few[..]].concat()).await;
    let head = table.out.lines().nth(1).unwrap_or_default();
    let columns: Vec<_> = head.split_whitespace().collect();
    assert_eq!(columns, ["VERDICT", "FIGURE", "MEASURED", "LEAST", "MOST"], "{table:?}");
    assert_eq!(table.out.contains("\nmissed "), table.code == 1, "{table:?}");
}

#[tokio::test]
async fn the_bench_of_peers_judges_fairlane_and_the_floor_without_node() {
    let systems = ["--systems", "fairlane,xreadgroup", "--tenants", "30", "--events", "5"];
    let measures = ["--measures", "throughput,fairness"];
    let short = ["--rounds", "1", "--busy", "4", "--seconds", "1", "--json"];
    let ran = run(&[&["peers"], &systems[..], &measures, &short].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert!(report["versions"]["redis"].is_string(), "{report}");
    let lines = report["systems"].as_array().unwrap();
    let names: Vec<_> = lines.iter().map(|line| line["system"].as_str().unwrap()).collect();
    assert_eq!(names, ["fairlane", "xreadgroup"]);
    for line in lines {
        let (rates, waits) = (&line["throughput"], &line["fairness"]);
        for figures in [rates, waits] {
            assert_eq!((&figures["lost"], &figures["repeated"]), (&0.into(), &0.into()), "{line}");
        }
        // The floor promises no order beside other readers.
        assert_eq!(rates["reordered"], 0, "{line}");
        assert!(line["system"] != "fairlane" || waits["reordered"] == 0, "{line}");
        let median = |figure: &Value| figure["median"].as_f64().unwrap();
        for rate in ["enqueue_per_second", "drain_per_second", "end_to_end_per_second"] {
            assert!(median(&rates[rate]) > 0.0, "{line}");
        }
        assert_eq!(rates["events"], 150, "{line}");
        let [p50, p99] = ["quiet_p50_ms", "quiet_p99_ms"].map(|name| median(&waits[name]));
        assert!(0.0 < p50 && p50 <= p99, "{line}");
        // The handler takes 3 ms, eight events at a time.
        assert!(median(&waits["backlog_seconds"]) >= 2.9, "{line}");
    }
}

#[tokio::test]
async fn the_bench_of_peers_names_what_is_missing() {
    for (arguments, code, said) in [
        (&["--programs", "nowhere"][..], 69, "nowhere: it has no main.mjs; in a clone"),
        (&["--tenants", "20"], 64, "--busy 20 leaves no quiet tenant"),
        (&["--systems", "kafka"], 64, "kafka"),
        (&["--measures", "meteors"], 64, "throughput, fairness, faults"),
        (&["--measures", "faults", "--seed", "many"], 64, "--seed"),
    ] {
        let ran = run(&[&["peers"], arguments].concat()).await;
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said), "{arguments:?}: {ran:?}");
    }
}

#[tokio::test]
async fn a_plan_names_each_figure_with_its_source_and_judges() {
    let load = ["--events-per-second", "5000", "--bots", "50000"];
    let ran = run(&[&["plan"], &load[..], &["--json"]].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let plan: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&plan["one_suffices"], &plan["primaries_needed"]), (&true.into(), &1.into()));
    let lines = plan["lines"].as_array().unwrap();
    let source = |name: &str| &lines.iter().find(|line| line["name"] == name).unwrap()["source"];
    assert_eq!((source("yardstick"), source("memory: all")), (&"measured".into(), &"model".into()));
    assert!(lines.iter().all(|line| line["value"].as_f64().unwrap() >= 0.0), "{plan}");

    // Another yardstick needs no server, and more load more primaries.
    let more = ["--events-per-second", "300000", "--bots", "1000000", "--yardstick", "1.2"];
    let ran = run(&[&["plan"], &more[..], &["--shards", "256"]].concat()).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    let head = ran.out.lines().next().unwrap_or_default();
    let columns: Vec<_> = head.split_whitespace().collect();
    assert_eq!(columns, ["FIGURE", "VALUE", "UNIT", "SOURCE"], "{ran:?}");
    assert!(ran.out.contains("One primary is too small at 60 % of its core."), "{ran:?}");
    assert!(ran.err.contains("--primaries 1 with --shards 256 does not suffice"), "{ran:?}");
}

#[tokio::test]
async fn mistakes_in_a_wanted_load_are_named_with_the_remedy() {
    let load = ["plan", "--bots", "10", "--events-per-second"];
    for (arguments, said) in [
        (&["0"][..], "from 0.001 to 100000000"),
        (&["many"], "from 0.001 to 100000000"),
        (&["5", "--primaries", "20"], "write a larger --shards"),
        (&["5", "--rule-events-per-second", "6"], "correct one of them"),
        (&["5", "--yardstick", "0"], "from 0.05 to 100"),
        (&["5", "--bytes", "1"], "100..=1000000"),
        (&["5", "--check"], "--check"),
        (&["5", "--rounds", "2"], "--rounds"),
    ] {
        let ran = run(&[&load[..], arguments].concat()).await;
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said) && ran.out.is_empty(), "{arguments:?}: {ran:?}");
    }
    let ran = run(&["plan", "--check", "--shape", "0x1x200"]).await;
    assert!(ran.code == 64 && ran.err.contains("BOTSxEVENTSxBYTES"), "{ran:?}");
    for arguments in [&["plan"][..], &["plan", "--bots", "10"]] {
        let ran = run(arguments).await;
        assert!(ran.code == 64 && ran.err.contains("--events-per-second and --bots"), "{ran:?}");
    }
}

/// Another build and so few events deviate: only the bytes are as in a release build.
#[tokio::test]
async fn a_check_measures_a_backlog_and_compares_the_model_with_it() {
    let ran = run(&["plan", "--check", "--shape", "2000x10x200", "--json"]).await;
    let check: Value = serde_json::from_str(&ran.out).unwrap_or_else(|_| panic!("{ran:?}"));
    let figures = check["figures"].as_array().unwrap();
    let missed = |figure: &&Value| {
        figure["is_judged"] == true && figure["deviation"].as_f64().unwrap().abs() > 0.2
    };
    let missed = figures.iter().filter(missed).count();
    assert_eq!(ran.code, i32::from(missed > 0), "{ran:?}");
    assert!(figures.iter().all(|figure| figure["measured"].as_f64().unwrap() > 0.0), "{check}");
    let bus = figures.iter().find(|figure| figure["name"] == "Redis, memory of the bus per event");
    assert!(bus.unwrap()["deviation"].as_f64().unwrap().abs() <= 0.2, "{check}");
}

#[tokio::test]
async fn help_version_and_mistakes_have_the_exit_codes_of_fairlane() {
    for (arguments, code, said) in [
        (&["--help"][..], 0, "Examples:"),
        (&["pipeline", "--help"], 0, "fairlane-bench pipeline --verify"),
        (&["--version"], 0, concat!("fairlane-bench ", env!("CARGO_PKG_VERSION"))),
        (&[], 64, "Usage: fairlane-bench"),
        (&["juggle"], 64, "juggle"),
        (&["pipeline", "--matching", "2"], 64, "from 0 to 1"),
        (&["counters", "--mongodb", "nonsense"], 64, "--mongodb"),
    ] {
        let ran = run(arguments).await;
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
        let text = if code == 0 { &ran.out } else { &ran.err };
        assert!(text.contains(said), "{arguments:?}: {ran:?}");
    }
}

/// The bench judges by half and 25 ms. Here it runs as a debug build, on machines that do other things
/// too, so a test by that bound would fail at random. A shared resource that is not isolated delays the
/// quiet bots until they are refused, or for seconds: that fails here. `make isolation` judges exactly.
#[tokio::test]
async fn no_hostile_tenant_has_quiet_ones_refused_lost_or_delayed_for_half_a_second() {
    // `bus` is left out: a burst that a producer puts on the bus itself delays the events behind it.
    // `rules` exceeds the bound where two processors serve everything. `exports` needs a faster MongoDB than
    // that of the tests.
    const RESOURCES: [&str; 14] = [
        "queue",
        "publish",
        "large-events",
        "dns",
        "tarpits",
        "shared-host",
        "listings",
        "live-pages",
        "connections",
        "tokens",
        "dead-letters",
        "redis-memory",
        "leases",
        "log-flood",
    ];
    const DELAY_MS: f64 = 500.0;
    let mut left = RESOURCES.to_vec();
    let mut lines = Vec::new();
    for _ in 0..3 {
        // One round each: what does not hold is tried again.
        let only = left.iter().flat_map(|name| ["--only", name]);
        let arguments = ["isolation", "--seconds", "1", "--rounds", "1", "--json"];
        let arguments = arguments.into_iter().chain(only);
        let ran = run(&arguments.collect::<Vec<_>>()).await;
        let report: Value = serde_json::from_str(&ran.out).unwrap_or_else(|_| panic!("{ran:?}"));
        let resources = report["resources"].as_array().unwrap();
        assert_eq!(resources.len(), left.len(), "{report}");
        left.retain(|name| {
            let line = resources.iter().find(|line| line["resource"] == **name).unwrap();
            let figure = |name: &str| line[name].as_f64().unwrap();
            let is_delayed = figure("beside_p99_ms") > figure("alone_p99_ms") + DELAY_MS;
            let is_refused = figure("refused_beside") > figure("refused_alone");
            line["verdict"] == "skipped"
                || figure("samples") == 0.0
                || is_delayed
                || is_refused
                || figure("lost") > 0.0
        });
        lines.push(report);
        if left.is_empty() {
            return;
        }
    }
    panic!("{left:?} never held: {lines:#?}");
}
