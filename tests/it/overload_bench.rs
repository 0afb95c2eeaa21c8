//! `fairlane bench overload` against a deployment that runs already.

use serde_json::Value;

use crate::cli::{Ran, run_in};
use crate::support::config::config;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};

async fn bench(arguments: &[&str]) -> Ran {
    let arguments = [&["bench", "overload"], arguments].concat().join("\n");
    let run = move || {
        let dir = tempfile::tempdir().unwrap();
        run_in(dir.path(), &arguments.split('\n').collect::<Vec<_>>(), "")
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test]
async fn a_deployment_is_asked_with_its_own_routes_and_classes() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "asked", &[]), Log::default().content()).await;
    let url = format!("http://{}", instance.client().address);
    let routes =
        ["p0 GET /healthz", "p1 GET /v1/pipelines", "p3 GET /v1/pipelines/asked/bots/b-{n}"];
    let routes = routes.map(|route| ["--route", route]).concat();
    let few = ["--url", &url, "--rates", "30,60", "--seconds", "1", "--json"];
    let ran = bench(&[&few[..], &routes].concat()).await;
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

    let wrong = bench(&["--url", &url, "--route", "p1 GET /v1/pipelines/none"]).await;
    assert_eq!(wrong.code, 1, "{wrong:?}");
    assert!(
        wrong.err.contains("p1 GET /v1/pipelines/none") && wrong.err.contains("404"),
        "{wrong:?}"
    );
    instance.stop().await;
    let gone = bench(&["--url", &url, "--route", "p1 GET /v1/pipelines"]).await;
    assert_eq!(gone.code, 69, "{gone:?}");
    assert!(gone.err.contains("correct --url"), "{gone:?}");
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
        let ran = bench(&[arguments, &route].concat()).await;
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said), "{said}: {ran:?}");
    }
    let ran = bench(&["--url", "http://127.0.0.1:8080"]).await;
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("--route"), "{ran:?}");
}
