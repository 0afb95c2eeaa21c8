//! `docker compose up` finds its files, and Fairlane understands its settings. The tests read the
//! files only, because the test machine may have no Docker engine.

mod image;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use fairlane::cli::Cli;
use fairlane::config::Config;
use fairlane::id::PipelineName;
use regex::Regex;
use serde_json::{Map, Value};

use super::kit::time_to_stop;

const SCHEMA: &str = include_str!("../../fixtures/compose-spec.json");
/// The path in the container at which Fairlane looks for its configuration.
const CONFIGURATION: &str = "/etc/fairlane/fairlane.toml";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The text as Compose reads it when no variable is set. Each variable must have a default.
fn interpolated(text: &str) -> String {
    let variable = Regex::new(r"\$(?:(\$)|\{\w+:-([^}$]*)\}|)").expect("a pattern");
    let replaced = variable.replace_all(text, |found: &regex::Captures<'_>| {
        match (found.get(1), found.get(2)) {
            (Some(dollar), _) => dollar.as_str().to_owned(),
            (_, Some(default)) => default.as_str().to_owned(),
            _ => panic!("{text:?} has a variable without a default, or a $ that is not doubled"),
        }
    });
    replaced.into_owned()
}

fn interpolate(value: &mut Value) {
    match value {
        Value::String(text) => *text = interpolated(text),
        Value::Array(values) => values.iter_mut().for_each(interpolate),
        Value::Object(values) => values.values_mut().for_each(interpolate),
        _ => {}
    }
}

fn compose() -> Value {
    let mut compose = yaml("docker-compose.yml");
    interpolate(&mut compose);
    compose
}

fn object<'a>(value: &'a Value, key: &str) -> Option<&'a Map<String, Value>> {
    value.get(key).map(|value| value.as_object().unwrap_or_else(|| panic!("{key} is a mapping")))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).map_or(&[], |value| value.as_array().unwrap_or_else(|| panic!("{key}: a list")))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is a text in quotes"))
}

fn services(compose: &Value) -> &Map<String, Value> {
    object(compose, "services").expect("services")
}

fn environment(service: &Value) -> BTreeMap<String, String> {
    let variables = object(service, "environment").into_iter().flatten();
    variables.map(|(name, value)| (name.clone(), string(value).to_owned())).collect()
}

/// The image that the repository builds.
fn image() -> String {
    format!("fairlane:{}", env!("CARGO_PKG_VERSION"))
}

/// The services that run the image.
fn fairlanes(compose: &Value) -> Vec<(&String, &Value)> {
    services(compose).iter().filter(|(_, service)| service["image"] == image()).collect()
}

/// The instructions of the Dockerfile: the name and the rest of the line, with continued lines
/// joined.
fn dockerfile() -> Vec<(String, String)> {
    let text = text("Dockerfile");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let joined = lines.join("\n").replace("\\\n", "");
    let instructions = joined.lines().filter(|line| !line.trim().is_empty());
    let split = instructions.map(|line| line.split_once(' ').expect("an instruction and the rest"));
    split.map(|(name, rest)| (name.to_owned(), rest.trim().to_owned())).collect()
}

/// The arguments of each instruction of this name.
fn instructions(name: &str) -> Vec<String> {
    let named = dockerfile().into_iter().filter(|(instruction, _)| instruction == name);
    named.map(|(_, rest)| rest).collect()
}

/// The list in brackets of an instruction such as CMD. The last instruction applies.
fn command_of_image(name: &str) -> Vec<String> {
    let last = instructions(name).pop().unwrap_or_else(|| panic!("the image has no {name}"));
    serde_json::from_str(&last).unwrap_or_else(|error| panic!("{name} {last}: {error}"))
}

fn environment_of_image() -> BTreeMap<String, String> {
    let pairs = instructions("ENV").into_iter().map(|pair| {
        let (name, value) = pair.split_once('=').expect("NAME=VALUE");
        (name.to_owned(), value.to_owned())
    });
    pairs.collect()
}

/// The resulting configuration of a service that runs Fairlane.
fn configuration(compose: &Value, service: &Value) -> Config {
    let mut variables = environment_of_image();
    variables.extend(environment(service));
    // Fairlane would ignore a variable with another prefix and so hide the mistake.
    for name in variables.keys() {
        assert!(name.starts_with("FAIRLANE__"), "{name} is no setting of Fairlane");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fairlane.toml");
    let mounted = list(service, "configs").iter().find(|config| config["target"] == CONFIGURATION);
    let path = mounted.map(|config| {
        let content = &compose["configs"][string(&config["source"])]["content"];
        fs::write(&file, string(content)).expect("the file is written");
        file.as_path()
    });
    Config::load_with(path, variables.into_iter()).unwrap_or_else(|error| panic!("{error}"))
}

fn served() -> (Value, Config) {
    let compose = compose();
    let config = configuration(&compose, &services(&compose)["fairlane"]);
    (compose, config)
}

/// `ADDRESS:PORT:PORT` as address, port of the host, port of the container.
fn published(service: &Value) -> Vec<(IpAddr, u16, u16)> {
    let ports = list(service, "ports").iter().map(|port| {
        let parts: Vec<&str> = string(port).split(':').collect();
        let [address, host, container] = parts[..] else { panic!("{port}: ADDRESS:PORT:PORT") };
        let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("{port}: a port"));
        (address.parse().expect("an address"), number(host), number(container))
    });
    ports.collect()
}

/// The mounts from the repository: the path there and the path in the container.
fn bound(service: &Value) -> Vec<(PathBuf, PathBuf)> {
    let volumes = list(service, "volumes").iter().filter(|volume| volume.is_object());
    let path = |volume: &Value, key: &str| PathBuf::from(string(&volume[key]));
    volumes.map(|volume| (path(volume, "source"), path(volume, "target"))).collect()
}

/// The file of the repository that a service sees under this path.
fn seen(service: &Value, path: &Path) -> PathBuf {
    let found = bound(service).into_iter().find_map(|(source, target)| {
        let rest = path.strip_prefix(&target).ok()?;
        Some(if rest.as_os_str().is_empty() { source } else { source.join(rest) })
    });
    let file = found.unwrap_or_else(|| panic!("nothing is mounted at {}", path.display()));
    assert!(root().join(&file).exists(), "{} is not there", file.display());
    file
}

/// The value of `--NAME=VALUE` in a command.
fn argument<'a>(service: &'a Value, name: &str) -> &'a str {
    let prefix = format!("--{name}=");
    let mut arguments = list(service, "command").iter().map(string);
    arguments.find_map(|argument| argument.strip_prefix(&prefix)).expect("the argument")
}

#[test]
fn the_file_follows_the_compose_specification() {
    let schema = serde_json::from_str(SCHEMA).expect("the schema");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let check = |value: &Value| {
        let errors = validator.iter_errors(value);
        errors.map(|error| format!("{}: {error}", error.instance_path())).collect::<Vec<_>>()
    };
    let mut compose = yaml("docker-compose.yml");
    assert_eq!(check(&compose), [""; 0]);
    // A control: the check finds a typing error.
    compose["services"]["redis"]["restrat"] = "always".into();
    assert_eq!(check(&compose).len(), 1);
}

#[test]
fn every_image_is_pinned_to_a_version() {
    let version = Regex::new(r"^[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.-]+)?$").expect("a pattern");
    let compose = compose();
    for (name, service) in services(&compose) {
        let image = string(&service["image"]);
        assert!(version.is_match(image), "{name}: {image}");
    }
    let bases = instructions("FROM");
    for base in &bases {
        let image = base.split(' ').next().unwrap_or_default();
        assert!(version.is_match(image), "Dockerfile: {image}");
    }
    let built = services(&compose).iter().filter(|(_, service)| service.get("build").is_some());
    let built: Vec<_> = built.map(|(name, service)| (name.as_str(), &service["image"])).collect();
    assert_eq!(built, [("fairlane", &Value::from(image()))], "built once, by the version");
}

#[test]
fn every_port_is_published_on_the_loopback_alone_and_no_two_collide() {
    let compose = compose();
    let mut taken = BTreeSet::new();
    for (name, service) in services(&compose) {
        for (address, host, _) in published(service) {
            assert!(address.is_loopback(), "{name} is published on {address}");
            assert!(taken.insert(host), "{host} is published twice");
        }
        assert_ne!(service["network_mode"], "host", "{name} would be open to everybody");
    }
    assert!(!taken.is_empty());
}

#[test]
fn everything_that_is_mounted_exists_and_every_volume_is_declared() {
    let compose = compose();
    let declared: BTreeSet<&str> =
        object(&compose, "volumes").expect("volumes").keys().map(String::as_str).collect();
    let mut used = BTreeSet::new();
    for (name, service) in services(&compose) {
        for volume in list(service, "volumes") {
            if let Some(volume) = volume.as_str() {
                let (source, _) = volume.split_once(':').expect("NAME:PATH");
                assert!(used.insert(source.to_owned()), "{source} belongs to two services");
                continue;
            }
            let source = string(&volume["source"]);
            assert!(root().join(source).exists(), "{name} mounts {source}, which is not there");
            assert_eq!(volume["read_only"], true, "{name} could write to {source}");
            assert_eq!(volume["bind"]["create_host_path"], false, "{name}: {source}");
        }
        for config in list(service, "configs") {
            let source = string(&config["source"]);
            assert!(compose["configs"].get(source).is_some(), "{name}: {source} is not declared");
        }
    }
    assert_eq!(used.iter().map(String::as_str).collect::<BTreeSet<_>>(), declared);
}

#[test]
fn every_service_has_a_health_check_and_is_waited_for_until_it_passes() {
    assert_eq!(instructions("HEALTHCHECK").len(), 1);
    let compose = compose();
    let mut unchecked = BTreeSet::new();
    for (name, service) in services(&compose) {
        let check = service.get("healthcheck");
        let disabled = check.is_some_and(|check| check["disable"] == true);
        let tested = check.is_some_and(|check| !list(check, "test").is_empty());
        if disabled || !(tested || service["image"] == image()) {
            unchecked.insert(name.as_str());
        }
    }
    assert_eq!(unchecked, BTreeSet::from(["generator"]), "it answers nobody");
    for (name, service) in services(&compose) {
        for (other, wait) in object(service, "depends_on").into_iter().flatten() {
            assert!(services(&compose).contains_key(other), "{name} waits for {other}: who is it?");
            assert_eq!(wait["condition"], "service_healthy", "{name} waits for {other}");
            assert!(!unchecked.contains(other.as_str()), "{name} would wait for {other} forever");
        }
    }
}

#[test]
fn fairlane_accepts_its_environment_and_its_configuration() {
    let compose = compose();
    let running = fairlanes(&compose);
    assert_eq!(
        running.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["fairlane", "generator"]
    );
    for (name, service) in running {
        let config = configuration(&compose, service);
        let redis = config.redis.url.expect("Redis is elsewhere");
        let mongodb = config.mongodb.url.expect("MongoDB is elsewhere");
        for url in [redis.expose(), mongodb.expose()] {
            let url = url::Url::parse(url).expect("a URL");
            let host = url.host_str().expect("a host");
            assert!(services(&compose).contains_key(host), "{name}: {host} is no service");
            let waits = object(service, "depends_on").expect("it waits for others");
            let waits_for = |other: &str| waits.contains_key(other);
            assert!(waits_for(host) || waits_for("fairlane"), "{name} does not wait for {host}");
        }
    }
    let (_, config) = served();
    let handler =
        |name| config.pipelines[&PipelineName::parse(name).expect("a name")].handler.clone();
    assert_eq!(handler("log"), "log");
    assert!(config.pipelines.len() > 3 && config.pipelines.values().all(|p| p.enabled));
}

#[test]
fn the_ports_are_those_that_fairlane_listens_on() {
    let (compose, config) = served();
    let listens = [config.http.listen, config.metrics.listen];
    assert!(listens.iter().all(|listen| listen.ip().is_unspecified()), "{listens:?}");
    let listens = listens.map(|listen| listen.port());
    let published = published(&services(&compose)["fairlane"]);
    assert_eq!(published.iter().map(|(_, _, port)| *port).collect::<Vec<_>>(), listens);
    let exposed = instructions("EXPOSE").join(" ");
    let exposed: Vec<u16> = exposed.split(' ').map(|port| port.parse().expect("a port")).collect();
    assert_eq!(exposed, listens);
}

#[test]
fn fairlane_has_time_to_stop_and_files_to_open() {
    let (compose, config) = served();
    let service = &services(&compose)["fairlane"];
    let grace = humantime::parse_duration(string(&service["stop_grace_period"])).expect("a time");
    let needed = time_to_stop(&config);
    assert!(grace >= needed, "{grace:?} is less than {needed:?}");
    let files = service["ulimits"]["nofile"].as_u64().expect("a number");
    assert!(files > 2 * config.http.max_connections as u64, "{files}");
}

#[test]
fn the_advice_on_tokens_can_be_followed() {
    let compose = compose();
    let content = string(&compose["configs"]["fairlane"]["content"]);
    let advice = content.lines().filter_map(|line| line.strip_prefix("#   "));
    let advice = advice.collect::<Vec<_>>().join("\n");
    let followed = content.replace("allow_anonymous = true", &advice);
    assert_ne!(followed, content);
    let config = Config::from_toml(&followed, "docker-compose.yml").expect("it is accepted");
    assert_eq!(config.auth.tokens.len(), 1);
    assert!(!config.auth.allow_anonymous);
}

#[test]
fn no_secret_is_in_the_file() {
    let compose = compose();
    assert_eq!(compose.get("secrets"), None);
    for (name, service) in services(&compose) {
        for (variable, value) in environment(service) {
            let secret = ["PASSWORD", "SECRET", "TOKEN"].iter().any(|word| variable.contains(word));
            let user = value.contains("://") && value.contains('@');
            assert!(!secret && !user, "{name}: {variable}");
        }
    }
}

#[test]
fn every_command_that_runs_fairlane_is_one_of_its_commands() {
    assert_eq!(command_of_image("ENTRYPOINT"), ["fairlane"]);
    let compose = compose();
    let mut commands = vec![command_of_image("CMD")];
    for (_, service) in fairlanes(&compose) {
        commands
            .push(list(service, "command").iter().map(|word| string(word).to_owned()).collect());
    }
    for command in commands {
        let line = command_of_image("ENTRYPOINT").into_iter().chain(command.iter().cloned());
        Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{command:?}: {error}"));
    }
}

#[test]
fn prometheus_finds_its_files_and_asks_fairlane_where_it_answers() {
    let (compose, config) = served();
    let prometheus = &services(&compose)["prometheus"];
    let file = Path::new(argument(prometheus, "config.file"));
    let settings = yaml(seen(prometheus, file).to_str().expect("a path"));
    for rules in list(&settings, "rule_files") {
        seen(prometheus, &file.parent().expect("a directory").join(string(rules)));
    }
    let scraped = list(&settings, "scrape_configs").iter();
    let targets: BTreeSet<&str> = scraped
        .flat_map(|job| list(job, "static_configs"))
        .flat_map(|group| list(group, "targets"))
        .map(string)
        .collect();
    let expected = format!("fairlane:{}", config.metrics.listen.port());
    assert!(targets.contains(expected.as_str()), "{targets:?} without {expected}");
    for target in targets {
        let (host, _) = target.split_once(':').expect("HOST:PORT");
        assert!(services(&compose).contains_key(host), "{target} is no service");
        assert!(host != "fairlane" || target == expected, "{target} is not {expected}");
    }
}

#[test]
fn grafana_finds_prometheus_and_its_dashboards() {
    let compose = compose();
    let grafana = &services(&compose)["grafana"];
    let provisioned = |kind: &str| {
        let directory = seen(grafana, &Path::new("/etc/grafana/provisioning").join(kind));
        let files = fs::read_dir(root().join(&directory)).expect("a directory");
        let files = files.map(|file| file.expect("an entry").path());
        files.map(|file| yaml(file.to_str().expect("a path"))).collect::<Vec<_>>()
    };
    let sources = provisioned("datasources");
    let urls: Vec<&str> = sources
        .iter()
        .flat_map(|file| list(file, "datasources"))
        .map(|source| string(&source["url"]))
        .collect();
    let (_, _, port) = published(&services(&compose)["prometheus"])[0];
    assert_eq!(urls, [format!("http://prometheus:{port}")]);
    let providers = provisioned("dashboards");
    let providers: Vec<&Value> =
        providers.iter().flat_map(|file| list(file, "providers")).collect();
    assert!(!providers.is_empty());
    for provider in providers {
        let directory = seen(grafana, Path::new(string(&provider["options"]["path"])));
        let files = fs::read_dir(root().join(directory)).expect("a directory");
        let named = files.map(|file| file.expect("an entry").file_name());
        let json = named.filter(|name| Path::new(name).extension().is_some_and(|e| e == "json"));
        assert!(json.count() > 0, "there are no dashboards");
    }
    let home = &environment(grafana)["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"];
    seen(grafana, Path::new(home));
}
