//! The OpenAPI document is true: requests made from its own schemas get the answers that it
//! describes, and none is refused for its form.
//!
//! The requests are the same in every run.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::rc::Rc;

use proptest::prelude::*;
use proptest::strategy::{Union, ValueTree as _};
use proptest::string::string_regex;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};

use crate::support::automation_rig::Rig;
use crate::support::http::{Client, Response};

/// Requests per operation without tokens, and with each of the tokens.
const CASES: usize = 10;
const CASES_WITH_TOKENS: usize = 2;
/// Minimum number of operations with a successful request. Otherwise the test saw mostly refusals.
const SUCCEED: usize = 32;
const SEED: [u8; 32] = *b"the document of the requests ...";

/// One request that the document allows.
#[derive(Debug)]
struct Request {
    operation: String,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

/// The document, and the runner that makes requests from it.
struct Contract {
    document: Value,
    runner: TestRunner,
    /// Values of parameters that exist in this instance.
    known: BTreeMap<&'static str, Vec<String>>,
    /// By the text of the schema: it takes long to make one.
    validators: RefCell<BTreeMap<String, Rc<jsonschema::Validator>>>,
}

impl Contract {
    async fn of(client: &Client, known: BTreeMap<&'static str, Vec<String>>) -> Self {
        let document = client.get("/openapi.json").await.json();
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &SEED);
        let runner = TestRunner::new_with_rng(Config::default(), random);
        Self { document, runner, known, validators: RefCell::default() }
    }

    /// The path, the method and the description of each operation.
    fn operations(&self) -> Vec<(String, String, Value)> {
        let mut all = Vec::new();
        for (path, item) in self.document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                all.push((path.clone(), method.to_uppercase(), operation.clone()));
            }
        }
        assert!(all.len() > 40, "the document has {} operations", all.len());
        all
    }

    fn some<T: std::fmt::Debug>(&mut self, strategy: &BoxedStrategy<T>) -> T {
        strategy.new_tree(&mut self.runner).unwrap().current()
    }

    fn chance(&mut self) -> bool {
        self.some(&any::<bool>().boxed())
    }

    fn value(&mut self, schema: &Value) -> Value {
        let strategy = strategy(&self.document, schema, 0);
        self.some(&strategy)
    }

    /// A value of a parameter, as text.
    fn parameter(&mut self, parameter: &Value) -> String {
        let name = parameter["name"].as_str().unwrap();
        if let Some(known) = self.known.get(name).cloned()
            && self.chance()
        {
            return self.some(&proptest::sample::select(known).boxed());
        }
        match self.value(&parameter["schema"]) {
            Value::String(text) => text,
            other => other.to_string(),
        }
    }

    fn request(&mut self, path: &str, method: &str, operation: &Value) -> Request {
        let (mut path, mut query, mut headers) = (path.to_owned(), String::new(), Vec::new());
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap();
            if parameter["required"] != true && !self.chance() {
                continue;
            }
            let text = self.parameter(parameter);
            match parameter["in"].as_str().unwrap() {
                "path" => path = path.replace(&format!("{{{name}}}"), &encoded(&text)),
                "query" => write!(query, "&{name}={}", encoded(&text)).unwrap(),
                "header" => headers.push((name.to_owned(), text)),
                other => panic!("{name} is in {other}"),
            }
        }
        if !query.is_empty() {
            path = format!("{path}?{}", &query[1..]);
        }
        let mut body = Vec::new();
        let content = operation["requestBody"]["content"].as_object();
        let is_needed = operation["requestBody"]["required"] == true;
        if let Some(content) = content
            && (is_needed || self.chance())
        {
            let kinds: Vec<String> = content.keys().cloned().collect();
            let kind = self.some(&proptest::sample::select(kinds).boxed());
            let value = self.value(&content[&kind]["schema"]);
            let valid = self
                .validator(&content[&kind]["schema"])
                .validate(&value)
                .map_err(|e| e.to_string());
            assert_eq!(valid, Ok(()), "the test makes requests that the document forbids: {value}");
            body = match kind.as_str() {
                "application/x-www-form-urlencoded" => form(&value).into_bytes(),
                _ => value.to_string().into_bytes(),
            };
            headers.push(("content-type".to_owned(), kind));
        }
        let operation = operation["operationId"].as_str().unwrap().to_owned();
        Request { operation, method: method.to_owned(), path, headers, body }
    }

    fn validator(&self, schema: &Value) -> Rc<jsonschema::Validator> {
        let make = || {
            let mut whole = schema.clone();
            whole["components"] = self.document["components"].clone();
            let options = jsonschema::options().with_draft(jsonschema::Draft::Draft202012);
            Rc::new(options.build(&whole).unwrap())
        };
        Rc::clone(self.validators.borrow_mut().entry(schema.to_string()).or_insert_with(make))
    }

    /// The first difference between an answer and its description.
    fn fault(&self, operation: &Value, answer: &Response) -> Option<String> {
        let code = answer.code.to_string();
        let Some(said) = operation["responses"].get(&code) else {
            return Some(format!("{code} is not among its answers"));
        };
        if matches!(answer.code, 500 | 503) {
            return Some(format!("{code}, with all that it needs at hand"));
        }
        let kind = answer.header("content-type").unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default();
        let Some(content) = said["content"].as_object().filter(|content| !content.is_empty())
        else {
            return (!answer.body.is_empty()).then(|| "it has a body".to_owned());
        };
        let Some(schema) = content.get(kind).map(|content| &content["schema"]) else {
            return Some(format!("it is {kind:?}"));
        };
        let values: Vec<Value> = match kind {
            "text/plain" => vec![json!(String::from_utf8_lossy(&answer.body))],
            "application/x-ndjson" => {
                let text = String::from_utf8_lossy(&answer.body);
                text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
            }
            _ => vec![answer.json()],
        };
        let validator = self.validator(schema);
        for value in &values {
            if let Err(error) = validator.validate(value) {
                return Some(format!("{} at {}: {value}", error, error.instance_path()));
            }
        }
        if !matches!(answer.code, 400 | 413 | 422) {
            return None;
        }
        let meanings = &operation["x-refused-by-meaning"];
        let is_meant = |field: &str| {
            meanings.as_object().into_iter().flatten().any(|(name, _)| {
                let rest = field.strip_prefix(&name.to_lowercase());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[', ' ']))
            })
        };
        let errors = values[0]["errors"].as_array().cloned().unwrap_or_default();
        let field = |error: &Value| error["field"].as_str().unwrap_or_default().to_lowercase();
        let meant = !errors.is_empty() && errors.iter().all(|error| is_meant(&field(error)));
        (!meant).then(|| format!("what it allows is refused for its form: {}", values[0]))
    }
}

async fn send(client: &Client, request: &Request) -> Response {
    let Request { method, path, headers, body, .. } = request;
    let headers: Vec<_> = headers.iter().map(|(name, value)| (&**name, &**value)).collect();
    client.send(method, path, &headers, body).await
}

/// Percent-encodes every character that may have a meaning in a URL.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut all, byte| {
        if byte.is_ascii_alphanumeric() {
            all.push(char::from(byte));
        } else {
            write!(all, "%{byte:02X}").unwrap();
        }
        all
    })
}

fn form(value: &Value) -> String {
    let pair = |(name, value): (&String, &Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("{}={}", encoded(name), encoded(&text))
    };
    value.as_object().unwrap().iter().map(pair).collect::<Vec<_>>().join("&")
}

/// Values that a schema allows.
fn strategy(document: &Value, schema: &Value, depth: usize) -> BoxedStrategy<Value> {
    if let Some(path) = schema["$ref"].as_str() {
        let schema = document.pointer(path.strip_prefix('#').unwrap()).unwrap();
        return strategy(document, schema, depth + 1);
    }
    if let Some(options) = schema["oneOf"].as_array() {
        let options = options.iter().map(|option| strategy(document, option, depth + 1));
        return Union::new(options.collect::<Vec<_>>()).boxed();
    }
    if let Some(values) = schema["enum"].as_array() {
        return proptest::sample::select(values.clone()).boxed();
    }
    match &schema["type"] {
        Value::Array(types) => {
            let of = |kind: &Value| {
                let mut one = schema.clone();
                one["type"] = kind.clone();
                strategy(document, &one, depth)
            };
            Union::new(types.iter().map(of).collect::<Vec<_>>()).boxed()
        }
        Value::String(kind) => match kind.as_str() {
            "null" => Just(Value::Null).boxed(),
            "boolean" => any::<bool>().prop_map(Value::from).boxed(),
            "integer" => integers(schema),
            "number" => numbers(schema),
            "string" => texts(schema).prop_map(Value::from).boxed(),
            "array" => lists(document, schema, depth),
            "object" => objects(document, schema, depth),
            other => panic!("{other} in {schema}"),
        },
        _ => anything(),
    }
}

fn anything() -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::btree_map("[a-z]{1,4}", inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
    .boxed()
}

fn integers(schema: &Value) -> BoxedStrategy<Value> {
    let least = schema["minimum"].as_i64().unwrap_or(-1_000_000);
    let most = schema["maximum"].as_i64().unwrap_or(1_000_000_000);
    prop_oneof![Just(least), Just(most), least..=most].prop_map(Value::from).boxed()
}

fn numbers(schema: &Value) -> BoxedStrategy<Value> {
    let least = schema["minimum"].as_f64().unwrap_or(0.0);
    let most = schema["maximum"].as_f64().unwrap_or(1_000_000.0);
    let eighths = (0..=1_000_i32).prop_map(move |part| {
        let value = least + (most - least) * f64::from(part) / 1_000.0;
        json!((value * 8.0).round() / 8.0)
    });
    prop_oneof![Just(json!(least)), Just(json!(most)), eighths].boxed()
}

fn size(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

fn texts(schema: &Value) -> BoxedStrategy<String> {
    let least = size(&schema["minLength"]).unwrap_or(0);
    let most = size(&schema["maxLength"]).unwrap_or(usize::MAX);
    match (schema["format"].as_str(), schema["pattern"].as_str()) {
        (Some("date"), _) => (2_020..2_030, 1..=12, 1..=28)
            .prop_map(|(year, month, day)| format!("{year}-{month:02}-{day:02}"))
            .boxed(),
        (Some("date-time"), _) => (0..50_u32, 0..24, 0..60)
            .prop_map(|(day, hour, minute)| {
                format!("2026-{:02}-{:02}T{hour:02}:{minute:02}:00Z", day / 28 + 1, day % 28 + 1)
            })
            .boxed(),
        // No server listens there.
        (Some("uri"), _) => {
            "[a-z0-9]{0,12}".prop_map(|path| format!("http://127.1.2.3:4099/{path}")).boxed()
        }
        (_, Some(pattern)) => {
            let inner = pattern.strip_prefix('^').and_then(|text| text.strip_suffix('$'));
            let made = string_regex(inner.unwrap_or(pattern)).unwrap();
            let fits = move |text: &String| (least..=most).contains(&text.chars().count());
            let short = made.prop_filter("as long as it may be", fits);
            // The maximum number of characters, each of more than one byte.
            let longest = "\u{e9}".repeat(most.min(2_000));
            let regex = regex::Regex::new(pattern).unwrap();
            if most < usize::MAX && regex.is_match(&longest) {
                prop_oneof![9 => short, 1 => Just(longest)].boxed()
            } else {
                short.boxed()
            }
        }
        _ => {
            let most = most.min(least + 24);
            proptest::collection::vec(any::<char>(), least..=most)
                .prop_map(|characters| characters.into_iter().collect())
                .boxed()
        }
    }
}

fn lists(document: &Value, schema: &Value, depth: usize) -> BoxedStrategy<Value> {
    let least = size(&schema["minItems"]).unwrap_or(0);
    let is_set = schema["uniqueItems"] == true;
    let items = strategy(document, &schema["items"], depth + 1);
    let list = proptest::collection::vec(items, least..=least + 3);
    list.prop_map(move |mut items| {
        let mut seen = BTreeSet::new();
        items.retain(|item| !is_set || seen.insert(item.to_string()));
        Value::from(items)
    })
    .boxed()
}

fn objects(document: &Value, schema: &Value, depth: usize) -> BoxedStrategy<Value> {
    let required: BTreeSet<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut made: BoxedStrategy<Map<String, Value>> = Just(Map::new()).boxed();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let value = strategy(document, property, depth + 1);
        let value = if required.contains(name.as_str()) {
            value.prop_map(Some).boxed()
        } else {
            proptest::option::of(value).boxed()
        };
        let name = name.clone();
        made = (made, value)
            .prop_map(move |(mut map, value)| {
                if let Some(value) = value {
                    map.insert(name.clone(), value);
                }
                map
            })
            .boxed();
    }
    let others = match &schema["additionalProperties"] {
        Value::Object(_) => Some(strategy(document, &schema["additionalProperties"], depth + 1)),
        Value::Null if schema["properties"].is_null() => Some(anything()),
        _ => None,
    };
    if let Some(others) = others {
        let names = &schema["propertyNames"];
        let names = if names.is_null() { "[a-z]{1,8}".boxed() } else { texts(names) };
        let more = proptest::collection::btree_map(names, others, 0..4);
        made = (made, more)
            .prop_map(|(mut map, more)| {
                map.extend(more);
                map
            })
            .boxed();
    }
    made.prop_map(Value::Object).boxed()
}

async fn known(client: &Client) -> BTreeMap<&'static str, Vec<String>> {
    let rule = json!({ "on": ["x"], "actions": [{ "emit": { "type": "y", "data": null } }] });
    let json = [("content-type", "application/json")];
    let path = "/v1/bots/shop-7/automations/10-welcome";
    assert_eq!(client.send("PUT", path, &json, rule.to_string().as_bytes()).await.code, 201);
    let profile = json!({ "tags": ["vip"], "fields": { "age": 30 } }).to_string();
    let path = "/v1/bots/shop-7/subscribers/ann";
    assert_eq!(client.send("PUT", path, &json, profile.as_bytes()).await.code, 202);
    assert_eq!(client.post("/v1/bots/shop-7/counters/ad-1/views").await.code, 200);
    let path = "/send_delayed?url=http://127.1.2.3:4099/&delay=86400&bot=shop-7";
    let id = client.post(path).await.header("x-event-id").unwrap().to_owned();
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    BTreeMap::from([
        ("pipeline", texts(&["automations", "counters", "notifications"])),
        ("bot", texts(&["shop-7"])),
        ("rule", texts(&["10-welcome"])),
        ("ad", texts(&["ad-1"])),
        ("subscriber", texts(&["ann"])),
        ("notification", vec![id]),
        ("If-Match", texts(&["*"])),
    ])
}

#[tokio::test]
async fn requests_allowed_by_the_document_are_not_refused_for_their_form_and_answers_conform() {
    let rig = Rig::start(&[("callbacks.allow_nets", "[\"127.0.0.0/8\"]")]).await;
    let known = known(&rig.client).await;
    let mut contract = Contract::of(&rig.client, known).await;
    let (mut faults, mut succeeded) = (Vec::new(), BTreeSet::new());
    let operations = contract.operations();
    for (path, method, operation) in &operations {
        for _ in 0..CASES {
            let request = contract.request(path, method, operation);
            let answer = send(&rig.client, &request).await;
            if (200..300).contains(&answer.code) {
                succeeded.insert(request.operation.clone());
            }
            if let Some(fault) = contract.fault(operation, &answer) {
                let body = String::from_utf8_lossy(&request.body).into_owned();
                faults.push(format!(
                    "{} {} {:?} {body}\n    {fault}",
                    request.method, request.path, request.headers
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    assert!(succeeded.len() >= SUCCEED, "only these succeeded: {succeeded:?}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn with_tokens_the_answers_are_as_the_document_says_too() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str, bots: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef\n")).unwrap();
        format!(
            "{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = [{bots:?}] }}"
        )
    };
    let tokens = [
        token("root", r#"["publish", "read", "operate"]"#, "*"),
        token("narrow", r#"["publish"]"#, "shop-*"),
    ];
    let settings = [
        ("callbacks.allow_nets", "[\"127.0.0.0/8\"]"),
        ("auth.tokens", &*format!("[{}]", tokens.join(", "))),
    ];
    let rig = Rig::start(&settings).await;
    let with = |name: &str| rig.client.with_token(&format!("{name}-0123456789abcdef"));
    let root = with("root");
    let known = known(&root).await;
    let mut contract = Contract::of(&root, known).await;
    let mut faults = Vec::new();
    for (path, method, operation) in &contract.operations() {
        let security = operation["security"].as_array().cloned().unwrap_or_default();
        let is_guarded = security.iter().any(|one| one.get("token").is_some());
        for (caller, client) in
            [("nobody", rig.client.clone()), ("narrow", with("narrow")), ("root", root.clone())]
        {
            for _ in 0..CASES_WITH_TOKENS {
                let request = contract.request(path, method, operation);
                let answer = send(&client, &request).await;
                let mut fault = contract.fault(operation, &answer);
                if is_guarded && caller == "nobody" && answer.code != 401 {
                    fault = Some(format!("{} without a token", answer.code));
                }
                if let Some(fault) = fault {
                    faults.push(format!(
                        "{caller}: {} {}\n    {fault}",
                        request.method, request.path
                    ));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    rig.instance.stop().await;
}
