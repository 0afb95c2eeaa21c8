//! Settings before they get their types: each known key with its value and its origin.
//!
//! Layers override each other key by key, also inside `workers`, `backoff` and `dead`. The default
//! files define the known keys and their types.

use std::collections::BTreeMap;
use std::mem::discriminant;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::built_in::BUILT_IN;
use super::duplicate::{self, Duplicate};
use super::error::{ConfigError, Origin};
use super::nearest::nearest;
use super::products::{PRODUCTS, ProductSection};
use super::{DEFAULT_TOML, PIPELINE_TOML, TABLES};
use crate::id::PipelineName;

/// The prefix of environment variables that are settings.
pub(super) const ENV_PREFIX: &str = "FAIRLANE__";
const ENV_SEPARATOR: &str = "__";
pub(super) const PIPELINES: &str = "pipelines";
/// The parser's text for a duplicate.
const DUPLICATE: &str = "duplicate key";

/// A value of one of the types that settings have.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Text(String),
    Integer(i64),
    Float(f64),
    Flag(bool),
    List(Vec<String>),
    /// The number of tables. The settings of the first are below `KEY[0].`.
    Tables(usize),
}

impl Value {
    fn expected(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text in quotes",
            Self::Integer(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Flag(_) => "true or false",
            Self::List(_) => "a list of texts such as [\"a\", \"b\"]",
            Self::Tables(_) => "a list of tables such as [{ name = \"a\" }]",
        }
    }

    /// Converts `value` to the type of `self`, or returns the name of its actual type.
    fn convert(&self, value: &DeValue<'_>) -> Result<Self, &'static str> {
        let read = read_value(value).ok_or(match (self, value) {
            (Self::Integer(_), DeValue::Integer(_)) => "one of that size",
            (Self::List(_), DeValue::Array(_)) => "a list of other things",
            _ => found(value),
        })?;
        match (self, read) {
            #[expect(clippy::cast_precision_loss, reason = "fractions lie between 0 and 1")]
            (Self::Float(_), Self::Integer(whole)) => Ok(Self::Float(whole as f64)),
            (_, read) if discriminant(self) == discriminant(&read) => Ok(read),
            _ => Err(found(value)),
        }
    }

    /// Converts the text of an environment variable to the type of `self`.
    fn convert_text(&self, text: &str) -> Result<Self, &'static str> {
        const FOUND: &str = "what it holds";
        let trimmed = text.trim();
        match self {
            Self::Text(_) => Ok(Self::Text(text.to_owned())),
            Self::Integer(_) => trimmed.parse().map(Self::Integer).map_err(|_| FOUND),
            Self::Float(_) => trimmed.parse().map(Self::Float).map_err(|_| FOUND),
            Self::Flag(_) => trimmed.parse().map(Self::Flag).map_err(|_| FOUND),
            Self::List(_) if trimmed.is_empty() => Ok(Self::List(Vec::new())),
            Self::List(_) => {
                Ok(Self::List(trimmed.split(',').map(|item| item.trim().to_owned()).collect()))
            }
            Self::Tables(_) => Err(FOUND),
        }
    }
}

fn read_value(value: &DeValue<'_>) -> Option<Value> {
    Some(match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(digits) => {
            Value::Integer(i64::from_str_radix(digits.as_str(), digits.radix()).ok()?)
        }
        DeValue::Float(digits) => Value::Float(digits.as_str().parse().ok()?),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Array(items) => Value::List(
            items
                .iter()
                .map(|item| item.get_ref().as_str().map(str::to_owned))
                .collect::<Option<_>>()?,
        ),
        DeValue::Datetime(_) | DeValue::Table(_) => return None,
    })
}

pub(super) fn found(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// A setting and its origin.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    pub(super) value: Value,
    pub(super) at: Origin,
}

/// All settings by their dotted keys.
#[derive(Debug)]
pub(super) struct Layers {
    schema: Schema,
    pub(super) settings: BTreeMap<String, Setting>,
    pub(super) pipelines: BTreeMap<PipelineName, Origin>,
    /// The sections of products from outside the crate. Only the product knows their keys.
    pub(super) products: BTreeMap<String, ProductSection>,
}

impl Layers {
    /// The lowest layer: the defaults.
    pub(super) fn defaults() -> Self {
        let schema = Schema::of_defaults();
        let settings = with_prefix("", &schema.top).collect();
        let (pipelines, products) = (BTreeMap::new(), BTreeMap::new());
        let mut layers = Self { schema, settings, pipelines, products };
        for (name, defaults) in BUILT_IN {
            let added = layers.add_pipeline(name, Origin::Code);
            added.expect("the built-in pipelines have usable names: tests load them");
            let prefix = format!("{PIPELINES}.{name}.");
            layers.settings.extend(with_prefix(&prefix, &read_defaults(defaults)));
        }
        layers
    }

    /// Whether a layer above the defaults sets this key.
    pub(super) fn is_made(&self, key: &str) -> bool {
        self.settings.get(key).is_some_and(|setting| setting.at != Origin::Code)
    }

    /// Whether a key of a table in a list has another value than by default. `list` is the key of the
    /// list.
    pub(super) fn differs(&self, list: &str, place: usize, key: &str) -> bool {
        let default = self.schema.tables.get(list).and_then(|keys| keys.get(key));
        let setting = self.settings.get(&format!("{list}[{place}].{key}"));
        setting.map(|setting| &setting.value) != default
    }

    /// Adds the layer of a file. `name` is the file's name for error messages.
    pub(super) fn add_toml(&mut self, text: &str, name: &str) -> Result<(), ConfigError> {
        let file = File { text, name };
        let table = DeTable::parse(text).map_err(|error| file.refused(&error))?;
        self.add_table(&file, table.get_ref(), &mut Vec::new())
    }

    fn add_table(
        &mut self,
        file: &File<'_>,
        table: &DeTable<'_>,
        path: &mut Vec<String>,
    ) -> Result<(), ConfigError> {
        let mut entries: Vec<_> = table.iter().collect();
        // Sorted by position, so that the first mistake in the file is reported.
        entries.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in entries {
            path.push(key.get_ref().to_string());
            self.add_entry(file, file.at(key.span().start), value, path)?;
            path.pop();
        }
        Ok(())
    }

    fn add_entry(
        &mut self,
        file: &File<'_>,
        at: Origin,
        value: &Spanned<DeValue<'_>>,
        path: &mut Vec<String>,
    ) -> Result<(), ConfigError> {
        match path.as_slice() {
            [first] if first == PRODUCTS && matches!(value.get_ref(), DeValue::Table(_)) => {
                let DeValue::Table(inner) = value.get_ref() else { return Ok(()) };
                return self.add_table(file, inner, path);
            }
            [first, name] if first == PRODUCTS => {
                let section = ProductSection::read(name, at, value)?;
                self.products.insert(name.clone(), section);
                return Ok(());
            }
            _ => {}
        }
        let value = value.get_ref();
        match self.schema.find(path, &at)? {
            Known::Table => {
                let DeValue::Table(inner) = value else {
                    let (key, expected) = (path.join("."), "a table");
                    return Err(ConfigError::WrongType { at, key, expected, found: found(value) });
                };
                if let [first, name] = path.as_slice()
                    && first == PIPELINES
                {
                    self.add_pipeline(name, at)?;
                }
                self.add_table(file, inner, path)
            }
            Known::Key(Value::Tables(_)) => self.add_tables(file, at, value, path),
            Known::Key(default) => {
                let key = path.join(".");
                match default.convert(value) {
                    Ok(value) => {
                        self.settings.insert(key, Setting { value, at });
                        Ok(())
                    }
                    Err(found) => {
                        let expected = default.expected();
                        Err(ConfigError::WrongType { at, key, expected, found })
                    }
                }
            }
        }
    }

    /// Replaces a list of tables.
    fn add_tables(
        &mut self,
        file: &File<'_>,
        at: Origin,
        value: &DeValue<'_>,
        path: &[String],
    ) -> Result<(), ConfigError> {
        let key = path.join(".");
        let DeValue::Array(items) = value else {
            let (expected, found) = (Value::Tables(0).expected(), found(value));
            return Err(ConfigError::WrongType { at, key, expected, found });
        };
        for (place, item) in items.iter().enumerate() {
            let (at, table) = (file.at(item.span().start), format!("{key}[{place}]"));
            let DeValue::Table(inner) = item.get_ref() else {
                let (expected, found) = ("a table", found(item.get_ref()));
                return Err(ConfigError::WrongType { at, key: table, expected, found });
            };
            // A key that is missing in a table has the origin of the table.
            let defaults = self.schema.tables[&key].iter().map(|(name, value)| {
                (format!("{table}.{name}"), Setting { value: value.clone(), at: at.clone() })
            });
            self.settings.extend(defaults);
            let mut inner_path = vec![table];
            self.add_table(file, inner, &mut inner_path)?;
        }
        self.settings.insert(key, Setting { value: Value::Tables(items.len()), at });
        Ok(())
    }

    /// Adds the layer of one environment variable. Ignores variables that are not settings.
    pub(super) fn add_variable(&mut self, name: &str, text: &str) -> Result<(), ConfigError> {
        let Some(path) = variable_path(name, &self.schema) else { return Ok(()) };
        let at = Origin::Environment(name.to_owned());
        // The variable may name the list, or a key of one of its tables.
        let mut heads = (1..=path.len()).map(|parts| path[..parts].join("."));
        if let Some(key) = heads.find(|head| self.schema.tables.contains_key(head)) {
            let problem = "is a list of tables, which only a file can hold; unset the variable";
            return Err(ConfigError::Invalid { at, key, problem: problem.to_owned() });
        }
        let default = match self.schema.find(&path, &at)? {
            Known::Key(default) => default.clone(),
            Known::Table => {
                let remedy = "this is a section: name one of its keys".to_owned();
                return Err(ConfigError::UnknownKey { at, key: path.join("."), remedy });
            }
        };
        let key = path.join(".");
        if let [first, pipeline, ..] = path.as_slice()
            && first == PIPELINES
        {
            self.add_pipeline(pipeline, at.clone())?;
        }
        if let Some(Setting { at: Origin::Environment(other), .. }) = self.settings.get(&key) {
            let problem = format!("is also set by {other}; unset one of them");
            return Err(ConfigError::Invalid { at, key, problem });
        }
        match default.convert_text(text) {
            Ok(value) => {
                self.settings.insert(key, Setting { value, at });
                Ok(())
            }
            Err(found) => {
                Err(ConfigError::WrongType { at, key, expected: default.expected(), found })
            }
        }
    }

    fn add_pipeline(&mut self, name: &str, at: Origin) -> Result<(), ConfigError> {
        let parsed = PipelineName::parse(name).map_err(|error| ConfigError::Invalid {
            at: at.clone(),
            key: format!("{PIPELINES}.{name}"),
            problem: format!("is not a usable name: {error}"),
        })?;
        match self.pipelines.get_mut(&parsed) {
            None => {
                let prefix = format!("{PIPELINES}.{parsed}.");
                self.settings.extend(with_prefix(&prefix, &self.schema.pipeline));
                self.pipelines.insert(parsed, at);
            }
            // A built-in pipeline has the origin of its first setting.
            Some(begun @ Origin::Code) => *begun = at,
            Some(_) => {}
        }
        Ok(())
    }

    /// The origin of the first of `keys` that is not a default. For a missing key: the origin of
    /// its pipeline.
    pub(super) fn origin(&self, keys: &[String]) -> Origin {
        let made = keys.iter().filter_map(|key| Some(&self.settings.get(key)?.at));
        let begun = keys.iter().filter_map(|key| {
            let name = key.strip_prefix(PIPELINES)?.strip_prefix('.')?.split('.').next()?;
            self.pipelines.get(&PipelineName::parse(name).ok()?)
        });
        made.chain(begun).find(|at| **at != Origin::Code).cloned().unwrap_or(Origin::Code)
    }
}

fn with_prefix(
    prefix: &str,
    defaults: &BTreeMap<String, Value>,
) -> impl Iterator<Item = (String, Setting)> {
    defaults.iter().map(move |(key, value)| {
        (format!("{prefix}{key}"), Setting { value: value.clone(), at: Origin::Code })
    })
}

/// The dotted key of a variable, or `None` if the variable is not a setting.
fn variable_path(name: &str, schema: &Schema) -> Option<Vec<String>> {
    let prefix = name.get(..ENV_PREFIX.len())?;
    if !prefix.eq_ignore_ascii_case(ENV_PREFIX) {
        return None;
    }
    let rest = name[ENV_PREFIX.len()..].to_lowercase();
    // The name of a pipeline may contain a double underscore, so the name is everything before a
    // known key.
    if let Some(pipeline) = rest.strip_prefix(&format!("{PIPELINES}{ENV_SEPARATOR}")) {
        for key in schema.pipeline.keys() {
            let suffix = format!("{ENV_SEPARATOR}{}", key.replace('.', ENV_SEPARATOR));
            if let Some(name) = pipeline.strip_suffix(&suffix) {
                let head = [PIPELINES, name].map(str::to_owned);
                return Some(head.into_iter().chain(key.split('.').map(str::to_owned)).collect());
            }
        }
    }
    Some(rest.split(ENV_SEPARATOR).map(str::to_owned).collect())
}

struct File<'a> {
    text: &'a str,
    name: &'a str,
}

impl File<'_> {
    /// Rewords the parser's error for the author of the file.
    fn refused(&self, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or_default();
        let at = self.at(span.start);
        if error.message() == DUPLICATE && self.text.get(span.clone()).is_some() {
            let Duplicate { what, first } = duplicate::find(self.text, span);
            let first = first.map(|first| self.line(first));
            return ConfigError::Twice { at, what, first };
        }
        ConfigError::Syntax { at, problem: error.message().replace('\n', "; ") }
    }

    fn line(&self, offset: usize) -> usize {
        self.text.get(..offset).unwrap_or(self.text).split('\n').count()
    }

    fn at(&self, offset: usize) -> Origin {
        Origin::File { name: self.name.to_owned(), line: self.line(offset) }
    }
}

/// Every known key with its default, which also defines its type.
#[derive(Debug)]
struct Schema {
    top: BTreeMap<String, Value>,
    pipeline: BTreeMap<String, Value>,
    /// The keys of each list of tables.
    tables: BTreeMap<String, BTreeMap<String, Value>>,
}

enum Known<'a> {
    Table,
    Key(&'a Value),
}

impl Schema {
    fn of_defaults() -> Self {
        let mut top = read_defaults(DEFAULT_TOML);
        let tables = TABLES.map(|(key, defaults)| (key.to_owned(), read_defaults(defaults)));
        for (key, _) in &tables {
            // The default of such a list is empty, and so does not define the keys of its tables.
            top.insert(key.clone(), Value::Tables(0));
        }
        Self { top, pipeline: read_defaults(PIPELINE_TOML), tables: tables.into() }
    }

    fn find(&self, path: &[String], at: &Origin) -> Result<Known<'_>, ConfigError> {
        let (head, defaults, inner) = match path {
            [first] | [first, _] if first == PIPELINES => return Ok(Known::Table),
            [first, _, _, ..] if first == PIPELINES => {
                (path[..2].join(".") + ".", &self.pipeline, &path[2..])
            }
            [first, ..] if first.ends_with(']') => {
                let list = first.split('[').next().unwrap_or_default();
                match self.tables.get(list) {
                    Some(defaults) => (format!("{first}."), defaults, &path[1..]),
                    None => (String::new(), &self.top, path),
                }
            }
            _ => (String::new(), &self.top, path),
        };
        let key = inner.join(".");
        let table = format!("{key}.");
        if let Some(default) = defaults.get(&key) {
            Ok(Known::Key(default))
        } else if defaults.keys().any(|known| known.starts_with(&table)) {
            Ok(Known::Table)
        } else {
            let meant: Vec<_> = (nearest(&key, defaults).iter())
                .map(|known| format!("{:?}", format!("{head}{known}")))
                .collect();
            let remedy = match meant.as_slice() {
                [] => "`fairlane config` prints every key".to_owned(),
                meant => format!("did you mean {}?", meant.join(" or ")),
            };
            Err(ConfigError::UnknownKey { at: at.clone(), key: path.join("."), remedy })
        }
    }
}

/// The keys of a default file and their values.
fn read_defaults(text: &'static str) -> BTreeMap<String, Value> {
    let table = DeTable::parse(text).expect("the built-in defaults are TOML: tests load them");
    let mut defaults = BTreeMap::new();
    collect(table.get_ref(), "", &mut defaults);
    defaults
}

fn collect(table: &DeTable<'_>, prefix: &str, defaults: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        let key = format!("{prefix}{}", key.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) => collect(inner, &format!("{key}."), defaults),
            other => {
                let value = read_value(other).expect("defaults have known types: tests load them");
                defaults.insert(key, value);
            }
        }
    }
}
