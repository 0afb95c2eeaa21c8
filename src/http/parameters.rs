//! Parameters from the query, a form or a JSON object, in a tolerant notation, for the routes that
//! other systems call with a single line.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::http::Method;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};

use super::admit::NamedBots;
use super::extract::{media_type, percent_decoded, read, unsupported};
use super::problem::{Kind, Problem};

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

/// Parameters by name, each at most once. An empty value counts as absent, because forms send empty
/// fields. Only an empty flag counts as present.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parameters(pub(super) BTreeMap<String, String>);

impl<S: Send + Sync> FromRequest<S> for Parameters {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let mut all = Self::default();
        all.add_form(parts.uri.query().unwrap_or_default(), "the query")?;
        let body = read(&parts.headers, body).await?;
        if body.trim_ascii().is_empty() {
            return Ok(all);
        }
        if parts.method == Method::GET {
            let detail =
                "this request takes no body; send the parameters in the query, or use POST";
            return Err(Problem::new(Kind::InvalidRequest, detail));
        }
        match media_type(&parts.headers)?.as_deref() {
            Some(FORM) => {
                let form = std::str::from_utf8(&body)
                    .map_err(|_| Problem::new(Kind::InvalidRequest, "the form is not UTF-8"))?;
                all.add_form(form, "the form")?;
            }
            Some(JSON) => all.add_json(&body)?,
            other => {
                let wanted = format!("{JSON} or {FORM}");
                let found = other.filter(|found| !found.is_empty());
                return Err(unsupported(found.unwrap_or("missing"), &wanted));
            }
        }
        if let Some(bot) = all.0.get("bot") {
            NamedBots::note(&parts.extensions, bot);
        }
        Ok(all)
    }
}

impl Parameters {
    pub(super) fn add_form(&mut self, text: &str, what: &str) -> Result<(), Problem> {
        if std::str::from_utf8(&percent_decoded(text.as_bytes())).is_err() {
            return Err(Problem::new(Kind::InvalidRequest, format!("{what} is not UTF-8")));
        }
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            self.add(&decoded(name), decoded(value))?;
        }
        Ok(())
    }

    pub(super) fn add_json(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let Fields(fields) = serde_json::from_slice(bytes).map_err(|error| {
            let detail = format!("the body is not a JSON object: {error}");
            Problem::new(Kind::InvalidRequest, detail)
        })?;
        for (name, value) in fields {
            let raw = value.get();
            let text = match raw.as_bytes().first() {
                Some(b'n') => continue,
                Some(b'"') => serde_json::from_str(raw).map_err(|error| {
                    Problem::field(&name, format!("it is not a string: {error}"))
                })?,
                // A JSON value as `body` is forwarded unchanged.
                Some(b'{' | b'[') if name != "body" => {
                    return Err(Problem::field(&name, "it is a list or an object; write a text"));
                }
                // The same number without an exponent, which the text form does not allow.
                Some(b'-' | b'0'..=b'9') if name != "body" && raw.contains(['e', 'E']) => {
                    raw.parse::<f64>().map_or_else(|_| raw.to_owned(), |number| number.to_string())
                }
                _ => raw.to_owned(),
            };
            self.add(&name, text)?;
        }
        Ok(())
    }

    fn add(&mut self, name: &str, value: String) -> Result<(), Problem> {
        match self.0.entry(name.to_owned()) {
            Entry::Occupied(_) => Err(Problem::field(name, "it is present twice; send it once")),
            Entry::Vacant(place) => {
                place.insert(value);
                Ok(())
            }
        }
    }

    /// Takes a parameter out.
    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name).filter(|value| !value.is_empty())
    }

    /// Takes out the parameters whose names start with `prefix`; returns the rests of these names.
    pub(super) fn take_names(&mut self, prefix: &str) -> Vec<String> {
        let mut taken = Vec::new();
        self.0.retain(|name, _| match name.strip_prefix(prefix) {
            Some(rest) => {
                taken.push(rest.to_owned());
                false
            }
            None => true,
        });
        taken
    }

    /// Takes a parameter out and parses its value with `parse`, whose error describes the problem.
    pub(super) fn read<T>(
        &mut self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Problem> {
        let Some(value) = self.take(name) else { return Ok(None) };
        parse(&value).map(Some).map_err(|detail| Problem::field(name, detail))
    }

    /// Takes a flag out; `None` if it is absent. Without a value (`?name&…`, `name=`) it means yes,
    /// as in other systems.
    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, Problem> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        flag(&value).map(Some).map_err(|detail| Problem::field(name, detail))
    }

    /// Refuses parameters that were not taken: the request would ignore a misspelt one.
    pub(super) fn done(self, known: &[&str]) -> Result<(), Problem> {
        match self.0.into_keys().next() {
            None => Ok(()),
            Some(name) => {
                let detail = format!("unknown parameter; the known ones are {}", known.join(", "));
                Err(Problem::field(&name, detail))
            }
        }
    }
}

/// A name or value of a form. Line ends and tabs do not count: files with a form may end with one.
fn decoded(text: &str) -> String {
    let text = text.replace(['\t', '\n', '\r'], "").replace('+', " ");
    String::from_utf8_lossy(&percent_decoded(text.as_bytes())).into_owned()
}

/// The fields of a JSON object in their order and original notation, including duplicates.
struct Fields(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;

        impl<'de> Visitor<'de> for Visit {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Visit)
    }
}

/// A time in seconds, with or without fractions.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    // Refuses signs, exponents, infinity and other unusual notations.
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = text.parse::<f64>().ok().filter(|_| plain);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("it is {}; write seconds, such as 90 or 0.5", shown(text)))
}

/// A point in time in RFC 3339, as the time since 1970.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let time: Option<jiff::Timestamp> = text.parse().ok();
    let since = time.and_then(|time| Duration::try_from(time.as_duration()).ok());
    since.ok_or_else(|| {
        format!("it is {}; write RFC 3339, such as 2026-11-20T09:00:00Z", shown(text))
    })
}

/// The notations of yes and no, in any case. A flag without a value means yes.
const YES: [&str; 5] = ["", "true", "1", "yes", "on"];
const NO: [&str; 4] = ["false", "0", "no", "off"];

fn flag(text: &str) -> Result<bool, String> {
    let is_among = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    match (is_among(&YES), is_among(&NO)) {
        (true, _) => Ok(true),
        (_, true) => Ok(false),
        _ => Err(format!(
            "it is {}; write true, yes, on, 1 or an empty value; or false, no, off or 0",
            shown(text)
        )),
    }
}

/// The schema of the values that [`Parameters::flag`] reads.
pub(super) fn flag_schema() -> Schema {
    flag_values().build().into()
}

/// The same schema for JSON, where `null` counts as absent.
pub(super) fn flag_or_null_schema() -> Schema {
    flag_values().item(ObjectBuilder::new().schema_type(Type::Null)).build().into()
}

fn flag_values() -> OneOfBuilder {
    let texts = ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(YES.into_iter().chain(NO)))
        .description(Some("In any case; the empty one means yes"));
    let number = ObjectBuilder::new().schema_type(Type::Integer).enum_values(Some([0, 1]));
    OneOfBuilder::new()
        .item(ObjectBuilder::new().schema_type(Type::Boolean))
        .item(number)
        .item(texts)
        .default(Some(serde_json::json!(false)))
}

/// The sent text, shortened for a message.
pub(super) fn shown(text: &str) -> String {
    let start: String = text.chars().take(60).collect();
    let dots = if start.len() < text.len() { "…" } else { "" };
    format!("{start:?}{dots}")
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::header;
    use serde_json::Value;

    use super::*;

    async fn parsed(method: &str, uri: &str, kind: &str, body: &str) -> Result<Parameters, Value> {
        let mut request = Request::builder().method(method).uri(uri);
        if !kind.is_empty() {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let parameters = Parameters::from_request(request, &()).await;
        parameters.map_err(|problem| serde_json::to_value(problem).unwrap())
    }

    #[tokio::test]
    async fn the_query_a_form_and_json_say_the_same() {
        let wanted = [("a", "1"), ("b", "x y&ü"), ("c", "true")];
        let wanted = Parameters(wanted.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
        let text = "a=1&b=x+y%26%C3%BC&c=true";
        let json = r#"{"a":1,"b":"x y&ü","c":true,"d":null}"#;
        let behind = format!("/?{text}");
        for (method, uri, kind, body) in [
            ("GET", &*behind, "", ""),
            ("POST", &*behind, "", ""),
            ("POST", "/", FORM, text),
            ("POST", "/", "application/json; charset=utf-8", json),
            ("POST", "/?a=1", JSON, r#"{"b":"x y&ü","c":true}"#),
        ] {
            let parsed = parsed(method, uri, kind, body).await;
            assert_eq!(parsed.as_ref(), Ok(&wanted), "{method} {uri} {body}");
        }
    }

    #[tokio::test]
    async fn an_unreadable_parameter_is_refused_by_its_name() {
        for (method, uri, kind, body, field) in [
            ("GET", "/?a=1&a=2", "", "", "a"),
            ("POST", "/?a=1", JSON, r#"{"a":1}"#, "a"),
            ("POST", "/", JSON, r#"{"a":[1]}"#, "a"),
            ("POST", "/", JSON, r#"{"a":{}}"#, "a"),
            ("POST", "/", JSON, r#"{"a":1,"a":2}"#, "a"),
        ] {
            let problem = parsed(method, uri, kind, body).await.unwrap_err();
            assert_eq!(
                (&problem["status"], &problem["errors"][0]["field"]),
                (&400.into(), &field.into()),
                "{problem}"
            );
        }
        for (method, uri, kind, body, status) in [
            ("GET", "/?a=%ff", "", "", 400),
            ("GET", "/", JSON, "{}", 400),
            ("POST", "/", JSON, "[1]", 400),
            ("POST", "/", JSON, "{", 400),
            ("POST", "/", FORM, "a=%ff", 400),
            ("POST", "/", "text/plain", "a=1", 415),
            ("POST", "/", "", "a=1", 415),
        ] {
            let problem = parsed(method, uri, kind, body).await.unwrap_err();
            assert_eq!(problem["status"], status, "{problem}");
        }
    }

    #[test]
    fn a_body_may_be_json_and_an_unknown_parameter_is_refused() {
        let mut parameters = Parameters::default();
        let json =
            br#"{"body":{"z": 12345678901234567890123, "a":1.10e400},"empty":"","other":"x"}"#;
        parameters.add_json(json).unwrap();
        let body = r#"{"z": 12345678901234567890123, "a":1.10e400}"#;
        assert_eq!(parameters.take("body").as_deref(), Some(body), "as it was written");
        assert_eq!(parameters.take("empty"), None);
        parameters.add_json(br#"{"delay":1.25e2,"at":-1E-3}"#).unwrap();
        assert_eq!(parameters.take("delay").as_deref(), Some("125"));
        assert_eq!(parameters.take("at").as_deref(), Some("-0.001"));
        let problem = serde_json::to_value(parameters.done(&["body"]).unwrap_err()).unwrap();
        assert_eq!(problem["errors"][0]["field"], "other");
    }

    #[test]
    fn times_and_flags_are_read_in_common_notations() {
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert_eq!(seconds("1.25"), Ok(Duration::from_millis(1_250)));
        for wrong in
            ["", "-1", "+1", "1e3", "inf", "NaN", "1s", " 1", "1.2.3", ".", "९", &"9".repeat(99)]
        {
            assert!(seconds(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(time("1970-01-01T00:00:01.5Z"), Ok(Duration::from_millis(1_500)));
        assert_eq!(time("1970-01-01T01:00:00+01:00"), Ok(Duration::ZERO));
        for wrong in ["2026-11-20", "2026-11-20T09:00:00", "1969-12-31T23:59:59Z", "tomorrow", "0"]
        {
            assert!(time(wrong).is_err(), "{wrong:?}");
        }
    }

    #[tokio::test]
    async fn a_flag_is_yes_when_it_is_there_and_says_no_when_it_is_told_to() {
        for (value, wanted) in [
            ("", true),
            ("=", true),
            ("=true", true),
            ("=True", true),
            ("=YES", true),
            ("=on", true),
            ("=1", true),
            ("=false", false),
            ("=No", false),
            ("=OFF", false),
            ("=0", false),
        ] {
            let text = format!("f{value}");
            let query = parsed("GET", &format!("/?a=1&{text}"), "", "").await;
            let form = parsed("POST", "/", FORM, &text).await;
            for parameters in [query, form] {
                assert_eq!(parameters.unwrap().flag("f").unwrap(), Some(wanted), "{text}");
            }
        }
        for (json, wanted) in [
            ("true", Some(true)),
            ("false", Some(false)),
            ("null", None),
            ("1", Some(true)),
            ("0", Some(false)),
            ("\"\"", Some(true)),
            (r#""Off""#, Some(false)),
        ] {
            let parameters = parsed("POST", "/", JSON, &format!(r#"{{"f":{json}}}"#)).await;
            assert_eq!(parameters.unwrap().flag("f").unwrap(), wanted, "{json}");
        }
        for wrong in ["2", "y", "-1", "truee", "ja", "%20", "1.0"] {
            let mut parameters = parsed("GET", &format!("/?f={wrong}"), "", "").await.unwrap();
            let problem = serde_json::to_value(parameters.flag("f").unwrap_err()).unwrap();
            assert_eq!(problem["errors"][0]["field"], "f", "{problem}");
        }
        assert_eq!(Parameters::default().flag("f").unwrap(), None);
    }
}
