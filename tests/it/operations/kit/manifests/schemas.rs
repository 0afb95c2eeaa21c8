//! The published schemas of Kubernetes, which `.ci/setup test` installs. Two kinds belong to operators, so
//! their schemas here are short: the documented fields that the manifests use.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// How the schemas name the file with the shared definitions.
const SHARED: &str = "/api/_definitions.json#";

/// In the target directory, beside the directory that cargo gives to tests.
fn directory() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    let directory = target.join("kubernetes/schemas");
    let remedy = "run `bash .ci/setup test`, or `make test`, which does";
    assert!(directory.exists(), "{} is missing: {remedy}", directory.display());
    directory
}

fn read(name: &str) -> String {
    let path = directory().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The schema of a kind, with everything that it refers to.
fn published(kind: &str, api: &str) -> Value {
    let (group, version) = api.split_once('/').unwrap_or(("", api));
    let group = group.split('.').next().filter(|group| !group.is_empty());
    let group = group.map(|group| format!("-{group}")).unwrap_or_default();
    let name = format!("{}{group}-{version}.json", kind.to_lowercase());
    let mut schema: Value =
        serde_json::from_str(&read(&name).replace(SHARED, "#")).expect("a schema");
    let mut shared: Value = serde_json::from_str(&read("_definitions.json")).expect("definitions");
    let schema_fields = schema.as_object_mut().expect("an object");
    schema_fields.remove("$id");
    schema_fields.insert("$defs".to_owned(), shared["$defs"].take());
    schema
}

/// An object with these fields and no others; the first `required` of them must be there.
fn object(required: usize, fields: &[(&str, Value)]) -> Value {
    let names: Vec<&str> = fields.iter().take(required).map(|(name, _)| *name).collect();
    let properties: serde_json::Map<String, Value> =
        fields.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": false,
    })
}

fn list(of: &Value) -> Value {
    json!({ "type": "array", "minItems": 1, "items": of })
}

fn resource(spec: Value) -> Value {
    let anything = json!({ "type": "object" });
    let text = json!({ "type": "string" });
    let fields =
        [("apiVersion", text.clone()), ("kind", text), ("metadata", anything), ("spec", spec)];
    object(fields.len(), &fields)
}

/// `monitoring.coreos.com/v1` of the Prometheus operator.
fn service_monitor() -> Value {
    let text = json!({ "type": "string" });
    let labels = json!({ "type": "object", "additionalProperties": text });
    let duration = json!({ "type": "string", "pattern": "^[0-9]+(ms|s|m|h)$" });
    let relabeling = object(
        3,
        &[
            ("sourceLabels", list(&text)),
            ("targetLabel", text.clone()),
            ("replacement", text.clone()),
        ],
    );
    let endpoint = object(
        1,
        &[
            ("port", text.clone()),
            ("path", text.clone()),
            ("interval", duration.clone()),
            ("scrapeTimeout", duration),
            ("relabelings", list(&relabeling)),
        ],
    );
    resource(object(
        2,
        &[
            ("selector", object(1, &[("matchLabels", labels)])),
            ("endpoints", list(&endpoint)),
            ("podTargetLabels", list(&text)),
        ],
    ))
}

/// `keda.sh/v1alpha1`.
fn scaled_object() -> Value {
    let text = json!({ "type": "string" });
    let count = json!({ "type": "integer", "minimum": 1 });
    // KEDA takes numbers here as texts.
    let number = json!({ "type": "string", "pattern": "^[0-9.]+$" });
    // Without it, a Prometheus that lost its targets would mean that there is nothing to do.
    let ignore = json!({ "const": "false" });
    let query = object(
        4,
        &[
            ("serverAddress", text.clone()),
            ("query", text.clone()),
            ("threshold", number),
            ("ignoreNullValues", ignore),
        ],
    );
    let trigger = object(
        2,
        &[
            ("type", json!({ "const": "prometheus" })),
            ("metadata", query),
            ("metricType", json!({ "enum": ["AverageValue", "Value"] })),
        ],
    );
    // No `fallback`: while Prometheus does not answer, it would replace the pods that the load needs.
    resource(object(
        2,
        &[
            ("scaleTargetRef", object(1, &[("name", text)])),
            ("triggers", list(&trigger)),
            ("minReplicaCount", count.clone()),
            ("maxReplicaCount", count),
        ],
    ))
}

/// What is wrong with a manifest.
pub(super) fn errors(manifest: &Value) -> Vec<String> {
    let text = |key: &str| manifest[key].as_str().expect("a text");
    let schema = match (text("apiVersion"), text("kind")) {
        ("monitoring.coreos.com/v1", "ServiceMonitor") => service_monitor(),
        ("keda.sh/v1alpha1", "ScaledObject") => scaled_object(),
        (api, kind) => published(kind, api),
    };
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let errors = validator.iter_errors(manifest);
    errors.map(|error| format!("{}: {error}", error.instance_path())).collect()
}
