//! The parts of the OpenAPI document that the types do not express: bounds of texts in lists and
//! maps, refusals for semantic reasons, and optional bodies.
//!
//! `contract.json` contains patches of schemas and of parameters by name. Per operation (`*`: all
//! operations) it lists fields that may be refused although they match the schema, and why. The
//! document shows them as `x-refused-by-meaning`. A property-based test checks the server against
//! the whole document.

use serde_json::{Map, Value, json};
use utoipa::openapi::OpenApi;

const CONTRACT: &str = include_str!("contract.json");
const FORM: &str = "application/x-www-form-urlencoded";
/// Operations whose parameters are in the body, so that the body is required.
const BODY_IS_NEEDED: [&str; 2] = ["sendDelayedByPost", "userOnlineByPost"];
/// Schemas that extend another one. They are merged: the parts of an `allOf` would refuse each
/// other's properties.
const FLAT: [&str; 2] = ["Automation", "Subscriber"];

/// The document as served.
pub(super) fn complete(document: &OpenApi) -> Value {
    // Strings, numbers and maps always serialise, and a test checks that the contract parses.
    let mut document = serde_json::to_value(document).unwrap_or_default();
    let contract: Value = serde_json::from_str(CONTRACT).unwrap_or_default();
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        for (name, patch) in entries(&contract["schemas"]) {
            if let Some(schema) = schemas.get_mut(name) {
                merge(schema, patch);
            }
        }
        for name in FLAT {
            flatten(schemas, name);
        }
        let actions = schemas.get_mut("Action").and_then(|action| action.get_mut("oneOf"));
        for action in actions.and_then(Value::as_array_mut).into_iter().flatten() {
            action["additionalProperties"] = json!(false);
        }
        for schema in schemas.values_mut() {
            loosen(schema);
        }
        for name in ["SendDelayed", "UserOnline"] {
            if let Some(form) = schemas.get(name).cloned() {
                schemas.insert(format!("{name}Form"), without_null(form));
            }
        }
    }
    let paths = document["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    for operation in paths.filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
        if operation.get("operationId").is_some() {
            describe(operation, &contract);
        }
    }
    document
}

fn describe(operation: &mut Value, contract: &Value) {
    let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
    let mut fields: Vec<String> = Vec::new();
    let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
    for parameter in parameters.into_iter().flatten() {
        let name = parameter["name"].as_str().unwrap_or_default().to_owned();
        let schema = &mut parameter["schema"];
        if schema.get("$ref").is_none() {
            *schema = without_null(schema.take());
            if let Some(patch) = contract["parameters"].get(&name) {
                merge(schema, patch);
            }
        }
        fields.push(name);
    }
    let has_body = operation.get("requestBody").is_some();
    if let Some(body) = operation.get_mut("requestBody") {
        for (kind, content) in body["content"].as_object_mut().into_iter().flatten() {
            let options = content["schema"]["oneOf"].as_array().cloned().unwrap_or_default();
            let null = json!({ "type": "null" });
            // An absent body is valid; `null` is not a body.
            if let (true, Some(only)) =
                (options.contains(&null), options.iter().find(|option| **option != null))
            {
                let form = only["$ref"].as_str().filter(|_| kind == FORM);
                content["schema"] = match form {
                    Some(name) => json!({ "$ref": format!("{name}Form") }),
                    None => only.clone(),
                };
            }
        }
        if BODY_IS_NEEDED.contains(&&*id) {
            body["required"] = json!(true);
        }
    }
    let mut meanings = Map::new();
    for (field, meaning) in entries(&contract["meanings"]["*"]) {
        if has_body || fields.contains(field) {
            meanings.insert(field.clone(), meaning.clone());
        }
    }
    let of = id.strip_suffix("ByPost").unwrap_or(&id);
    for (field, meaning) in entries(&contract["meanings"][of]) {
        meanings.insert(field.clone(), meaning.clone());
    }
    if !meanings.is_empty() {
        operation["x-refused-by-meaning"] = Value::Object(meanings);
    }
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// Merges `patch` into the document, key by key.
fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}

/// Merges the parts of an `allOf` into one object.
fn flatten(schemas: &mut Map<String, Value>, name: &str) {
    let Some(parts) = schemas.get(name).and_then(|schema| schema["allOf"].as_array()) else {
        return;
    };
    let (mut required, mut properties) = (Vec::new(), Map::new());
    for part in parts {
        let part = match part["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
            Some(name) => schemas.get(name).unwrap_or(&Value::Null),
            None => part,
        };
        required.extend(part["required"].as_array().cloned().unwrap_or_default());
        properties.extend(part["properties"].as_object().cloned().unwrap_or_default());
    }
    let description = schemas[name]["description"].clone();
    let flat = json!({
        "type": "object", "description": description, "required": required, "properties": properties,
    });
    schemas.insert(name.to_owned(), flat);
}

/// Simplifies "any value or null" to "any value": `null` would match both, and only one may match.
fn loosen(schema: &mut Value) {
    let of_anything = |option: &Value| {
        option["$ref"].as_str().is_some_and(|path| path == "#/components/schemas/Value")
    };
    if let Some(anything) =
        schema["oneOf"].as_array().and_then(|options| options.iter().find(|o| of_anything(o)))
    {
        *schema = json!({ "description": anything["description"].clone() });
        return;
    }
    match schema {
        Value::Object(map) => map.values_mut().for_each(loosen),
        Value::Array(list) => list.iter_mut().for_each(loosen),
        _ => {}
    }
}

/// Removes `null` from a schema for a place that cannot express it: a query, a header or a form.
fn without_null(mut schema: Value) -> Value {
    let is_null = |value: &Value| value.is_null() || *value == "null";
    if let Some(types) = schema.get_mut("type")
        && let Some(list) = types.as_array_mut()
    {
        list.retain(|value| !is_null(value));
        if let [only] = &list[..] {
            *types = only.clone();
        }
    }
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.retain(|value| !value.is_null());
    }
    if let Some(options) = schema.get_mut("oneOf").and_then(Value::as_array_mut) {
        options.retain(|option| option["type"] != "null");
    }
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for property in properties.values_mut() {
            *property = without_null(property.take());
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_contract_is_about_served_routes() {
        let contract: Value = serde_json::from_str(CONTRACT).unwrap();
        let document = serde_json::to_value(super::super::documented()).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for (name, _) in entries(&contract["schemas"]) {
            assert!(schemas.contains_key(name), "no schema {name}");
        }
        let (mut parameters, mut operations) = (BTreeSet::new(), BTreeSet::from(["*".to_owned()]));
        for (_, item) in entries(&document["paths"]) {
            for (_, operation) in entries(item) {
                operations.insert(operation["operationId"].as_str().unwrap().to_owned());
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    parameters.insert(parameter["name"].as_str().unwrap().to_owned());
                }
            }
        }
        for (name, _) in entries(&contract["parameters"]) {
            assert!(parameters.contains(name), "no parameter {name}");
        }
        for (name, _) in entries(&contract["meanings"]) {
            assert!(operations.contains(name), "no operation {name}");
        }
    }

    #[test]
    fn a_schema_loses_null_and_parts_that_refuse_each_other() {
        let form = without_null(json!({
            "type": ["object", "null"],
            "properties": { "a": { "type": ["string", "null"], "enum": ["x", null] } },
        }));
        let expected = json!({
            "type": "object", "properties": { "a": { "type": "string", "enum": ["x"] } },
        });
        assert_eq!(form, expected);
        let document = complete(&super::super::documented());
        let schemas = &document["components"]["schemas"];
        for name in FLAT {
            assert!(schemas[name].get("allOf").is_none(), "{}", schemas[name]);
            assert!(schemas[name]["properties"]["id"].is_object(), "{}", schemas[name]);
        }
        assert!(schemas["Emit"]["properties"]["data"].get("oneOf").is_none());
    }
}
