//! `deploy/kubernetes`: the manifests follow the published schemas, refer to each other, and fit to the
//! configuration and the program. The test machine needs no cluster.

mod schemas;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Parser as _;
use fairlane::cli::Cli;
use fairlane::config::Config;
use fairlane::metrics::METRICS;
use regex::Regex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{root, text, time_to_stop};

const PLACE: &str = "deploy/kubernetes";
const OVERLAYS: [&str; 4] = ["small", "large", "nats", "kafka"];
/// What the overlays are made of.
const SOURCES: [&str; 5] = ["base", "components", "overlays", "process", "roles"];
/// Made by the operator: the addresses of the stores with their passwords, the tokens, and what a bus asks
/// for.
const SECRETS: [&str; 3] = ["fairlane-bus", "fairlane-env", "fairlane-tokens"];

/// The documents of a file or of an output.
fn documents(text: &str) -> Vec<Value> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    let parts = text.split("\n---\n").filter(|part| !part.trim().is_empty());
    parts.map(|part| serde_saphyr::from_str(part).expect("YAML")).collect()
}

/// The manifests of an overlay.
fn rendered(overlay: &str) -> Vec<Value> {
    documents(&text(&format!("{PLACE}/{overlay}.yaml")))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is a text"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn name(manifest: &Value) -> &str {
    string(&manifest["metadata"]["name"])
}

fn of_kind<'a>(manifests: &'a [Value], kind: &str) -> Vec<&'a Value> {
    let found = manifests.iter().filter(|manifest| manifest["kind"] == kind);
    found.collect()
}

/// The only container of a Deployment.
fn container(deployment: &Value) -> &Value {
    let containers = list(&deployment["spec"]["template"]["spec"]["containers"]);
    assert_eq!(containers.len(), 1, "{}", name(deployment));
    &containers[0]
}

fn arguments(deployment: &Value) -> Vec<&str> {
    list(&container(deployment)["args"]).iter().map(string).collect()
}

/// The ports of a Deployment, by name.
fn ports(deployment: &Value) -> BTreeMap<&str, u64> {
    let ports = list(&container(deployment)["ports"]).iter();
    ports.map(|port| (string(&port["name"]), port["containerPort"].as_u64().unwrap())).collect()
}

/// Whether an object with these labels is selected.
fn selects(selector: &Value, labels: &Value) -> bool {
    let wanted = selector.as_object().expect("labels");
    assert!(!wanted.is_empty(), "a selector without labels selects everything");
    wanted.iter().all(|(label, value)| labels[label] == *value)
}

/// The Deployments whose pods are selected.
fn selected<'a>(manifests: &'a [Value], selector: &Value) -> Vec<&'a Value> {
    let deployments = of_kind(manifests, "Deployment").into_iter();
    let labels = |deployment: &Value| deployment["spec"]["template"]["metadata"]["labels"].clone();
    deployments.filter(|deployment| selects(selector, &labels(deployment))).collect()
}

/// The configuration that the pods of an overlay read.
fn configuration(manifests: &[Value]) -> Config {
    let maps = of_kind(manifests, "ConfigMap");
    assert_eq!(maps.len(), 1);
    let text = string(&maps[0]["data"]["fairlane.toml"]);
    let of_bus = if text.contains("kind = \"nats\"") { "nats" } else { "kafka" };
    let base = self::text(&format!("{PLACE}/base/fairlane.toml"));
    let own = format!("{PLACE}/overlays/{of_bus}/fairlane.toml");
    assert!(text == base || (text == self::text(&own) && text.starts_with(&base)), "{text}");
    // The files of a bus are read at once. The pods have them, and this machine has not.
    let directory = tempfile::tempdir().expect("a directory");
    let password = directory.path().join("password");
    fs::write(&password, "secret").expect("a file");
    let text = text.replace("\"bus/password\"", &format!("\"{}\"", password.display()));
    let of_pods = |line: &&str| !line.contains("_file = \"bus/");
    let text = text.lines().filter(of_pods).collect::<Vec<_>>().join("\n");
    Config::from_toml(&text, "fairlane.toml").unwrap_or_else(|error| panic!("{error}"))
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a text takes everything");
        text
    })
}

#[test]
fn the_rendered_manifests_are_those_of_the_sources() {
    let place = root().join(PLACE);
    let mut sources: Vec<(String, PathBuf)> = SOURCES
        .iter()
        .flat_map(|source| files(&place.join(source)))
        .map(|file| (file.strip_prefix(&place).expect("below").display().to_string(), file))
        .collect();
    sources.sort();
    let mut sums = String::new();
    for (source, file) in &sources {
        let bytes = fs::read(file).expect("a file");
        writeln!(sums, "{}  {source}", digest(&bytes)).expect("a text takes everything");
    }
    for overlay in OVERLAYS {
        let text = text(&format!("{PLACE}/{overlay}.yaml"));
        let first = text.lines().next().expect("a line");
        let expected = format!(" Sources: {}", digest(sums.as_bytes()));
        assert!(first.ends_with(&expected), "{overlay}.yaml is stale: run `make kubernetes`");
    }
}

/// The version of kustomize in kubectl, such as 5.
fn kustomize() -> Option<u32> {
    let output = Command::new("kubectl").args(["version", "--client", "--output=json"]).output();
    let said: Value = serde_json::from_slice(&output.ok()?.stdout).ok()?;
    let version = said["kustomizeVersion"].as_str()?;
    version.trim_start_matches('v').split('.').next()?.parse().ok()
}

#[test]
fn kubectl_renders_the_same_manifests() {
    if kustomize().is_none_or(|version| version < 5) {
        return println!("not shown: there is no kubectl with kustomize 5");
    }
    let by_name = |manifests: Vec<Value>| -> BTreeMap<String, Value> {
        let key = |manifest: &Value| format!("{} {}", manifest["kind"], name(manifest));
        manifests.into_iter().map(|manifest| (key(&manifest), manifest)).collect()
    };
    for overlay in OVERLAYS {
        let directory = root().join(PLACE).join("overlays").join(overlay);
        let output = Command::new("kubectl").arg("kustomize").arg(directory).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let now = by_name(documents(&String::from_utf8_lossy(&output.stdout)));
        assert_eq!(now, by_name(rendered(overlay)), "{overlay}");
    }
}

#[test]
fn every_manifest_follows_the_published_schema() {
    for overlay in OVERLAYS {
        let mut manifests = rendered(overlay);
        for manifest in &manifests {
            assert_eq!(schemas::errors(manifest), [""; 0], "{} of {overlay}", name(manifest));
        }
        // A control: each check finds a typing error.
        for manifest in &mut manifests {
            manifest["sepc"] = true.into();
            assert!(!schemas::errors(manifest).is_empty(), "{}", manifest["kind"]);
        }
    }
}

#[test]
fn fairlane_accepts_the_configuration_and_finds_its_files() {
    for overlay in OVERLAYS {
        let manifests = rendered(overlay);
        let config = configuration(&manifests);
        let map = name(of_kind(&manifests, "ConfigMap")[0]);
        for deployment in of_kind(&manifests, "Deployment") {
            let pod = &deployment["spec"]["template"]["spec"];
            let mounts: BTreeMap<&str, &str> = list(&container(deployment)["volumeMounts"])
                .iter()
                .map(|mount| (string(&mount["name"]), string(&mount["mountPath"])))
                .collect();
            let mut configured = false;
            for volume in list(&pod["volumes"]) {
                let mount = mounts[string(&volume["name"])];
                if let Some(secret) = volume["secret"]["secretName"].as_str() {
                    assert!(SECRETS.contains(&secret), "{secret} is made by nobody");
                    if secret == "fairlane-bus" {
                        // `bus/…` in the configuration, relative to the home of the user.
                        assert_eq!(mount, "/var/lib/fairlane/bus");
                        continue;
                    }
                    for token in &config.auth.tokens {
                        assert!(token.token_file.starts_with(mount), "{:?}", token.token_file);
                    }
                } else {
                    assert_eq!(string(&volume["configMap"]["name"]), map);
                    // Where Fairlane looks for its configuration.
                    configured = mount == "/etc/fairlane";
                }
            }
            let expected = if config.bus.sources.is_empty() { 2 } else { 3 };
            assert!(configured && mounts.len() == expected, "{mounts:?}");
            for source in list(&container(deployment)["envFrom"]) {
                assert!(SECRETS.contains(&string(&source["secretRef"]["name"])));
            }
        }
    }
}

#[test]
fn fairlane_listens_where_kubernetes_and_prometheus_ask_it() {
    for overlay in OVERLAYS {
        let manifests = rendered(overlay);
        let config = configuration(&manifests);
        let listens = BTreeMap::from([
            ("http", u64::from(config.http.listen.port())),
            ("metrics", u64::from(config.metrics.listen.port())),
        ]);
        assert!(
            config.http.listen.ip().is_unspecified() && config.metrics.listen.ip().is_unspecified()
        );
        for deployment in of_kind(&manifests, "Deployment") {
            for (port, number) in ports(deployment) {
                assert_eq!(number, listens[port], "{port} of {}", name(deployment));
            }
            for (probe, path) in [
                ("startupProbe", "/healthz"),
                ("readinessProbe", "/readyz"),
                ("livenessProbe", "/healthz"),
            ] {
                let get = &container(deployment)[probe]["httpGet"];
                assert_eq!((string(&get["path"]), string(&get["port"])), (path, "metrics"));
            }
        }
        for service in of_kind(&manifests, "Service") {
            let behind = selected(&manifests, &service["spec"]["selector"]);
            assert!(!behind.is_empty(), "{} has no pods", name(service));
            for port in list(&service["spec"]["ports"]) {
                let target = string(&port["targetPort"]);
                for deployment in &behind {
                    let there = ports(deployment).contains_key(target);
                    assert!(there, "{} has no port {target}", name(deployment));
                }
            }
        }
        for policy in of_kind(&manifests, "NetworkPolicy") {
            let pods = selected(&manifests, &policy["spec"]["podSelector"]["matchLabels"]);
            assert_eq!(pods.len(), of_kind(&manifests, "Deployment").len());
            let open: BTreeSet<&str> = list(&policy["spec"]["ingress"])
                .iter()
                .flat_map(|rule| list(&rule["ports"]))
                .map(|port| string(&port["port"]))
                .collect();
            assert_eq!(open, BTreeSet::from(["http", "metrics"]));
        }
        for monitor in of_kind(&manifests, "ServiceMonitor") {
            let wanted = &monitor["spec"]["selector"]["matchLabels"];
            let services = of_kind(&manifests, "Service").into_iter();
            let asked: Vec<&Value> = services
                .filter(|service| selects(wanted, &service["metadata"]["labels"]))
                .collect();
            assert_eq!(asked.len(), 1);
            let names: BTreeSet<&str> =
                list(&asked[0]["spec"]["ports"]).iter().map(|port| string(&port["name"])).collect();
            for endpoint in list(&monitor["spec"]["endpoints"]) {
                assert!(names.contains(string(&endpoint["port"])), "{endpoint}");
                let relabeling = &list(&endpoint["relabelings"])[0];
                assert_eq!(relabeling["sourceLabels"][0], "__meta_kubernetes_namespace");
                assert_eq!(
                    relabeling["targetLabel"], "job",
                    "alerts keep installations apart by it"
                );
                let job = string(&relabeling["replacement"]);
                assert!(
                    job.contains("fairlane") && job.contains("$1"),
                    "{job}: FairlaneProcessDown"
                );
            }
        }
    }
}

#[test]
fn every_role_runs_and_a_process_that_serves_http_has_the_port() {
    const ALL: [&str; 4] = ["ingest", "work", "http", "schedule"];
    for overlay in OVERLAYS {
        let manifests = rendered(overlay);
        let mut running = BTreeSet::new();
        for deployment in of_kind(&manifests, "Deployment") {
            let arguments = arguments(deployment);
            let line = ["fairlane"].into_iter().chain(arguments.iter().copied());
            Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            let place = arguments.iter().position(|argument| *argument == "--roles");
            let roles: BTreeSet<&str> = match place {
                Some(place) => arguments[place + 1].split(',').collect(),
                None => BTreeSet::from(ALL),
            };
            assert_eq!(roles.contains("http"), ports(deployment).contains_key("http"));
            running.extend(roles);
            let image = string(&container(deployment)["image"]);
            let version = format!("/fairlane:{}", env!("CARGO_PKG_VERSION"));
            assert!(image.ends_with(&version), "{image}");
        }
        assert_eq!(running, BTreeSet::from(ALL), "{overlay}");
    }
}

#[test]
fn a_pod_has_time_to_stop_and_no_rights() {
    for overlay in OVERLAYS {
        let manifests = rendered(overlay);
        let needed = time_to_stop(&configuration(&manifests));
        assert!(configuration(&manifests).shutdown_delay > Duration::ZERO, "the ingress is slow");
        let namespace = &of_kind(&manifests, "Namespace")[0]["metadata"]["labels"];
        assert_eq!(namespace["pod-security.kubernetes.io/enforce"], "restricted");
        let budgets = of_kind(&manifests, "PodDisruptionBudget");
        for deployment in of_kind(&manifests, "Deployment") {
            let pod = &deployment["spec"]["template"]["spec"];
            let given = pod["terminationGracePeriodSeconds"].as_u64().map(Duration::from_secs);
            assert!(given >= Some(needed), "{given:?} is less than {needed:?}");
            assert_eq!(pod["automountServiceAccountToken"], false);
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
            let rights = &container(deployment)["securityContext"];
            assert_eq!(rights["allowPrivilegeEscalation"], false);
            assert_eq!(rights["readOnlyRootFilesystem"], true);
            assert_eq!(list(&rights["capabilities"]["drop"]), ["ALL"]);
            let own = budgets.iter().filter(|budget| {
                let pods = selected(&manifests, &budget["spec"]["selector"]["matchLabels"]);
                pods.len() == 1 && name(pods[0]) == name(deployment)
            });
            assert_eq!(own.count(), 1, "one budget for {} alone", name(deployment));
        }
    }
}

#[test]
fn the_autoscaler_asks_for_metrics_of_fairlane_and_owns_the_number_of_pods() {
    let manifests = rendered("large");
    let known: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
    let metric = Regex::new(r"\bfairlane_\w+").expect("a pattern");
    let component = Regex::new(r#"app_kubernetes_io_component="(\w+)""#).expect("a pattern");
    let scaled = of_kind(&manifests, "ScaledObject");
    assert_eq!(scaled.len(), of_kind(&manifests, "Deployment").len());
    for object in scaled {
        let target = string(&object["spec"]["scaleTargetRef"]["name"]);
        let deployments = of_kind(&manifests, "Deployment");
        let target = deployments.iter().find(|deployment| name(deployment) == target).unwrap();
        assert!(target["spec"].get("replicas").is_none(), "each rollout would reset the number");
        let labels = &target["spec"]["template"]["metadata"]["labels"];
        for trigger in list(&object["spec"]["triggers"]) {
            let query = string(&trigger["metadata"]["query"]);
            let asked: Vec<&str> = metric.find_iter(query).map(|found| found.as_str()).collect();
            assert!(!asked.is_empty() && asked.iter().all(|name| known.contains(name)), "{query}");
            for found in component.captures_iter(query) {
                assert_eq!(labels["app.kubernetes.io/component"], found[1], "{query}");
            }
            let namespace = format!("namespace=\"{}\"", string(&object["metadata"]["namespace"]));
            assert_eq!(query.matches(&namespace).count(), asked.len(), "{query}");
        }
    }
    let monitor = of_kind(&manifests, "ServiceMonitor")[0];
    let passed = list(&monitor["spec"]["podTargetLabels"]);
    assert_eq!(passed, ["app.kubernetes.io/component"], "the queries need it");
}
