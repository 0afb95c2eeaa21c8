//! Values of unknown structure. A value as a tree takes up to a hundred times the bytes of its text, so a
//! tree is built of a bounded number of values only, and `data` becomes text without a tree.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use super::EXTENSION_VALUES_MAX;
use super::wire::Name;

/// Number of values in a tree, itself included.
pub(super) fn count(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(count).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(count).sum::<usize>(),
        _ => 1,
    }
}

/// What is wrong with too many values.
pub(super) fn too_many() -> String {
    format!("the extension attributes have more than {EXTENSION_VALUES_MAX} values in all")
}

/// Reads a tree. Contains the number of values that it and all later ones may have.
pub(super) struct Tree<'a>(pub(super) &'a mut usize);

impl Tree<'_> {
    fn take<E: de::Error>(&mut self) -> Result<(), E> {
        *self.0 = self.0.checked_sub(1).ok_or_else(|| E::custom(too_many()))?;
        Ok(())
    }

    fn leaf<E: de::Error>(mut self, value: Value) -> Result<Value, E> {
        self.take()?;
        Ok(value)
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        self.leaf(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        self.leaf(value.into())
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        self.leaf(Value::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Value, E> {
        self.leaf(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Value, A::Error> {
        self.take()?;
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(Tree(&mut *self.0))? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Value, A::Error> {
        self.take()?;
        let mut values = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            values.insert(name, map.next_value_seed(Tree(&mut *self.0))?);
        }
        Ok(values.into())
    }
}

/// A value of any format as JSON text.
pub(super) struct JsonText(pub(super) Box<RawValue>);

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut json = Vec::new();
        Writer(&mut json).deserialize(deserializer)?;
        let json = String::from_utf8(json).map_err(de::Error::custom)?;
        RawValue::from_string(json).map(Self).map_err(de::Error::custom)
    }
}

/// Writes a value as JSON.
struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn leaf<E: de::Error>(self, value: impl serde::Serialize) -> Result<(), E> {
        serde_json::to_writer(self.0, &value).map_err(E::custom)
    }
}

impl<'de> DeserializeSeed<'de> for Writer<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Writer<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<(), E> {
        self.leaf(value)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<(), E> {
        self.leaf(value)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<(), E> {
        self.leaf(value)
    }

    // A number that JSON does not have becomes null.
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<(), E> {
        self.leaf(value)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<(), E> {
        self.leaf(value)
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.leaf(())
    }

    fn visit_none<E: de::Error>(self) -> Result<(), E> {
        self.leaf(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        self.0.push(b'[');
        let first = self.0.len();
        loop {
            let end = self.0.len();
            if end > first {
                self.0.push(b',');
            }
            if seq.next_element_seed(Writer(&mut *self.0))?.is_none() {
                self.0.truncate(end);
                break;
            }
        }
        self.0.push(b']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.push(b'{');
        let first = self.0.len();
        while let Some(Name(name)) = map.next_key::<Name>()? {
            if self.0.len() > first {
                self.0.push(b',');
            }
            Writer(&mut *self.0).leaf(&*name)?;
            self.0.push(b':');
            map.next_value_seed(Writer(&mut *self.0))?;
        }
        self.0.push(b'}');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn packed(value: &impl serde::Serialize) -> Vec<u8> {
        rmp_serde::to_vec_named(value).unwrap()
    }

    #[test]
    fn messagepack_becomes_the_same_json() {
        let value = json!({
            "a": [], "b": {}, "c": [1, -2, 3.5, "\"\n", true, null, [[], {"x": [{}]}]],
            "d": {"": u64::MAX, "e": i64::MIN},
        });
        let JsonText(text) = rmp_serde::from_slice(&packed(&value)).unwrap();
        assert_eq!(text.get(), value.to_string());
        let JsonText(text) = rmp_serde::from_slice(&packed(&f64::NAN)).unwrap();
        assert_eq!(text.get(), "null");
        let bytes = [0xc4, 1, 7];
        assert!(rmp_serde::from_slice::<JsonText>(&bytes).is_err(), "bytes are not JSON");
        let number_as_key = [0x81, 1, 1];
        assert!(rmp_serde::from_slice::<JsonText>(&number_as_key).is_err());
    }

    #[test]
    fn a_tree_has_a_bounded_number_of_values() {
        let read = |text: &str, mut left: usize| {
            let mut json = serde_json::Deserializer::from_str(text);
            let value = Tree(&mut left).deserialize(&mut json)?;
            Ok::<_, serde_json::Error>((value, left))
        };
        let text = r#"[1,-1,1.5,"a",null,true,{"b":[],"c":{}}]"#;
        let value: Value = serde_json::from_str(text).unwrap();
        assert_eq!(count(&value), 10);
        assert_eq!(read(text, 12).unwrap(), (value, 2));
        let error = read(text, 9).unwrap_err().to_string();
        assert!(error.contains(&too_many()), "{error}");
    }
}
