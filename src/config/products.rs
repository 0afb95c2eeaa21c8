//! The sections `[products.NAME]`: only the product knows their keys.

use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeValue, ValueDeserializer};

use super::Config;
use super::error::{ConfigError, Origin};
use super::layers::found;
use crate::id::PipelineName;

/// The name of all of them.
pub(super) const PRODUCTS: &str = "products";

/// The section of one product. Only the product knows its keys.
#[derive(Debug, Clone)]
pub struct ProductSection {
    /// Its keys.
    pub table: toml::Table,
    /// Where it is.
    pub at: Origin,
}

impl ProductSection {
    /// Reads a section of a file.
    pub(super) fn read(
        name: &str,
        at: Origin,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<Self, ConfigError> {
        let key = format!("{PRODUCTS}.{name}");
        let DeValue::Table(_) = value.get_ref() else {
            let (expected, found) = ("a table", found(value.get_ref()));
            return Err(ConfigError::WrongType { at, key, expected, found });
        };
        match toml::Table::deserialize(ValueDeserializer::from(value.clone())) {
            Ok(table) => Ok(Self { table, at }),
            Err(error) => {
                let problem = format!("cannot be read: {}", error.message());
                Err(ConfigError::Invalid { at, key, problem })
            }
        }
    }
}

impl Config {
    /// Reads the section of a product as `T`; a section that is missing as an empty one.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`], with the place of the section.
    pub(crate) fn product_section<T: DeserializeOwned>(
        &self,
        name: &PipelineName,
    ) -> Result<T, ConfigError> {
        let section = self.products.get(name.as_str());
        let table = section.map(|section| section.table.clone()).unwrap_or_default();
        table.try_into().map_err(|error: toml::de::Error| ConfigError::Invalid {
            at: section.map_or(Origin::Code, |section| section.at.clone()),
            key: format!("products.{name}"),
            problem: format!("is not usable: {}", error.message()),
        })
    }

    /// Refuses the section of a product that the program does not have.
    pub(crate) fn check_products<'a>(
        &self,
        known: impl Iterator<Item = &'a str>,
    ) -> Result<(), ConfigError> {
        let known: Vec<&str> = known.collect();
        match self.products.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some((name, section)) => Err(ConfigError::UnknownKey {
                at: section.at.clone(),
                key: format!("products.{name}"),
                remedy: format!("this program has the products {}", known.join(", ")),
            }),
        }
    }
}
