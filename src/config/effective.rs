//! The settings in force: each with its value and where that comes from, without secrets.

use std::fmt;
use std::hash::BuildHasher as _;
use std::path::PathBuf;

use rustc_hash::FxBuildHasher;
use serde::Serialize;
use url::Url;

use super::error::Origin;
use super::layers::{Layers, Value};
use super::products::PRODUCTS;
use super::{MongoUrl, RedisUrl};

/// Stands for a secret.
const HIDDEN: &str = "\"***\"";

/// A setting in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Effective {
    /// Its key, dotted; a table of a list has its place from 0: `auth.tokens[0].name`.
    pub key: String,
    /// Its value as TOML. A secret is `"***"`, and an address has neither credentials nor a query.
    pub value: String,
    /// `default`, `FILE:LINE`, or the name of the environment variable.
    pub from: String,
    /// Whether it is the default because nothing sets it.
    pub is_default: bool,
    /// The file that it names, if it names one to read.
    #[serde(skip)]
    pub(crate) file: Option<PathBuf>,
    /// Differs if the value differs, also that of a secret.
    #[serde(skip)]
    pub(crate) print: u64,
}

/// All settings, in the order of their keys.
pub(super) fn of(layers: &Layers) -> Vec<Effective> {
    let settings = layers.settings.iter().map(|(key, setting)| Effective {
        key: key.clone(),
        value: shown(key, &setting.value),
        from: origin(&setting.at),
        is_default: setting.at == Origin::Code,
        file: file(key, &setting.value),
        print: print(&setting.value),
    });
    let products = layers.products.iter().map(|(name, section)| Effective {
        key: format!("{PRODUCTS}.{name}"),
        value: "{ … }".to_owned(),
        from: "the file".to_owned(),
        is_default: false,
        file: None,
        print: print(section),
    });
    settings.chain(products).collect()
}

fn print(value: &impl fmt::Debug) -> u64 {
    FxBuildHasher.hash_one(format!("{value:?}"))
}

fn file(key: &str, value: &Value) -> Option<PathBuf> {
    match value {
        Value::Text(path) if key.ends_with("_file") && !path.is_empty() => Some(path.into()),
        _ => None,
    }
}

fn origin(at: &Origin) -> String {
    match at {
        Origin::File { .. } => at.to_string(),
        Origin::Environment(name) => name.clone(),
        Origin::Code => "default".to_owned(),
    }
}

fn shown(key: &str, value: &Value) -> String {
    match (key, value) {
        (_, Value::Text(text)) if text.is_empty() => quoted(text),
        ("redis.url", Value::Text(text)) => {
            RedisUrl::parse(text).map_or_else(|_| HIDDEN.to_owned(), |url| quoted(&url.to_string()))
        }
        ("mongodb.url", Value::Text(text)) => {
            MongoUrl::parse(text).map_or_else(|_| HIDDEN.to_owned(), |url| quoted(&url.to_string()))
        }
        (key, Value::Text(text)) if is_address(key) => address(text),
        (key, Value::List(items)) if is_address(key) => {
            list(items.iter().map(|item| address(item)))
        }
        (key, Value::Text(_)) if is_secret(key) => HIDDEN.to_owned(),
        (key, Value::List(items)) if is_secret(key) => {
            list(items.iter().map(|_| HIDDEN.to_owned()))
        }
        (_, Value::Text(text)) => quoted(text),
        (_, Value::List(items)) => list(items.iter().map(|item| quoted(item))),
        (_, Value::Integer(number)) => number.to_string(),
        (_, Value::Float(number)) => format!("{number:?}"),
        (_, Value::Flag(flag)) => flag.to_string(),
        (_, Value::Tables(count)) => format!("{count} tables"),
    }
}

/// Whether the value itself is a secret, and no name of a file.
fn is_secret(key: &str) -> bool {
    matches!(name(key), "password" | "token" | "nkey_seed" | "secrets")
}

/// Whether the value is a URL or a list of URLs.
fn is_address(key: &str) -> bool {
    matches!(name(key), "url" | "endpoint" | "servers")
}

fn name(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or_default()
}

/// A URL without what may be a secret: its user and password, its query and its fragment.
fn address(text: &str) -> String {
    let Some(mut url) = Url::parse(text).ok().filter(Url::has_host) else {
        return HIDDEN.to_owned();
    };
    let is_user = !url.username().is_empty() || url.password().is_some();
    if !is_user && url.query().is_none() && url.fragment().is_none() {
        return quoted(text);
    }
    if is_user {
        // Both succeed, because the URL has a host.
        let _ = url.set_username("***").and_then(|()| url.set_password(None));
    }
    if url.query().is_some() {
        url.set_query(Some("***"));
    }
    if url.fragment().is_some() {
        url.set_fragment(Some("***"));
    }
    quoted(url.as_str())
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        shutdown_grace = "7s"
        [redis]
        url = "redis://fairlane:hunter2@db:6379"
        [callbacks]
        secrets = ["whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="]
        [[bus.sources]]
        name = "shop"
        kind = "nats"
        servers = ["nats://host:4222"]
        stream = "EVENTS"
        token = "hunter2"
        [tracing]
        endpoint = "http://me:hunter2@otel.example:4318"
        [pipelines.hooks]
        handler = "push"
        url = "https://hooks.example/x?token=hunter2#hunter2"
        [pipelines.tags]
        handler = "log"
        events = ["tag.*", "say \"hi\""]
    "#;

    fn found() -> Vec<Effective> {
        let mut layers = Layers::defaults();
        layers.add_toml(FILE, "fairlane.toml").unwrap();
        layers.add_variable("FAIRLANE__BUS__RETENTION", "3h").unwrap();
        of(&layers)
    }

    #[test]
    fn each_setting_tells_where_it_comes_from() {
        let found = found();
        let at = |key: &str| {
            let one = found.iter().find(|one| one.key == key);
            let one = one.unwrap_or_else(|| panic!("{key} is not listed"));
            (one.value.as_str(), one.from.as_str())
        };
        assert_eq!(at("shutdown_grace"), ("\"7s\"", "fairlane.toml:2"));
        assert_eq!(at("bus.retention"), ("\"3h\"", "FAIRLANE__BUS__RETENTION"));
        assert_eq!(at("redis.shards").1, "default");
        assert_eq!(at("pipelines.tags.events").0, r#"["tag.*", 'say "hi"']"#);
        assert_eq!(at("bus.sources[0].servers").0, r#"["nats://host:4222"]"#);
        let defaults = found.iter().filter(|one| one.is_default).count();
        assert!(defaults > 100 && defaults < found.len(), "{defaults} of {}", found.len());
    }

    #[test]
    fn no_secret_is_shown() {
        let text = format!("{:?}", found());
        assert!(!text.contains("hunter2") && !text.contains("AAECAw"), "{text}");
        for shown in [
            "redis://***@db:6379",
            "http://***@otel.example:4318",
            "https://hooks.example/x?***#***",
            "nats://host:4222",
        ] {
            assert!(text.contains(shown), "{shown}: {text}");
        }
        assert_eq!(address("me:hunter2@host"), HIDDEN, "it is no URL with a host");
        assert_eq!(address("https://hooks.example"), "\"https://hooks.example\"");
    }
}
