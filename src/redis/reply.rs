//! Reads replies with a cursor over one array; errors name the expected element.

use std::str::FromStr;

use redis::Value;

/// A reply without the structure of the script's contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} in the reply, found {found}")]
pub struct ReplyError {
    expected: &'static str,
    found: String,
}

impl ReplyError {
    pub(crate) fn unexpected(expected: &'static str, found: &str) -> Self {
        Self { expected, found: format!("{found:?}") }
    }

    fn value(expected: &'static str, found: Option<&Value>) -> Self {
        let found = found.map_or_else(|| "its end".to_owned(), |value| format!("{value:?}"));
        Self { expected, found }
    }
}

/// A cursor over the elements of a reply.
#[derive(Debug)]
pub(crate) struct Reply(std::vec::IntoIter<Value>);

impl Reply {
    pub(crate) fn new(value: Value) -> Result<Self, ReplyError> {
        match value {
            Value::Array(values) => Ok(Self(values.into_iter())),
            Value::Nil => Ok(Self(Vec::new().into_iter())),
            other => Err(ReplyError::value("an array", Some(&other))),
        }
    }

    /// Reads a reply that is 1 for yes, or another number.
    pub(crate) fn yes(value: Value) -> Result<bool, ReplyError> {
        Ok(Self::single(value)?.number::<i64>()? == 1)
    }

    /// A reply of one element that is not an array.
    pub(crate) fn single(value: Value) -> Result<Self, ReplyError> {
        Self::new(Value::Array(vec![value]))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn next(&mut self) -> Option<Value> {
        self.0.next()
    }

    /// Bytes; a missing value reads as `None`.
    pub(crate) fn bytes(&mut self) -> Result<Option<Vec<u8>>, ReplyError> {
        match self.0.next() {
            Some(Value::BulkString(bytes)) => Ok(Some(bytes)),
            Some(Value::SimpleString(text)) => Ok(Some(text.into_bytes())),
            Some(Value::Okay) => Ok(Some(b"OK".to_vec())),
            Some(Value::Int(number)) => Ok(Some(number.to_string().into_bytes())),
            Some(Value::Nil) => Ok(None),
            other => Err(ReplyError::value("text", other.as_ref())),
        }
    }

    /// Text; a missing value reads as empty.
    pub(crate) fn text(&mut self) -> Result<String, ReplyError> {
        let bytes = self.bytes()?.unwrap_or_default();
        String::from_utf8(bytes).map_err(|error| {
            ReplyError::unexpected("UTF-8", &String::from_utf8_lossy(error.as_bytes()))
        })
    }

    pub(crate) fn parsed<T: FromStr>(&mut self) -> Result<T, ReplyError> {
        let text = self.text()?;
        text.parse().map_err(|_| ReplyError::unexpected(std::any::type_name::<T>(), &text))
    }

    pub(crate) fn number<T: FromStr + TryFrom<i64>>(&mut self) -> Result<T, ReplyError> {
        match self.0.next() {
            Some(Value::Int(number)) => T::try_from(number)
                .map_err(|_| ReplyError::unexpected("a number in range", &number.to_string())),
            Some(Value::BulkString(bytes)) => {
                let text = String::from_utf8_lossy(&bytes);
                text.parse().map_err(|_| ReplyError::unexpected("a number", &text))
            }
            other => Err(ReplyError::value("a number", other.as_ref())),
        }
    }

    /// A number; `None` for an empty text and at the end.
    pub(crate) fn optional<T: FromStr + TryFrom<i64>>(&mut self) -> Result<Option<T>, ReplyError> {
        match self.0.as_slice().first() {
            None | Some(Value::Nil) => {}
            Some(Value::BulkString(bytes)) if bytes.is_empty() => {}
            Some(_) => return self.number().map(Some),
        }
        self.0.next();
        Ok(None)
    }

    /// A score; `None` for an empty text.
    pub(crate) fn score(&mut self) -> Result<Option<i64>, ReplyError> {
        let text = self.text()?;
        if text.is_empty() {
            return Ok(None);
        }
        parse_score(&text).map(Some).ok_or_else(|| ReplyError::unexpected("a score", &text))
    }
}

/// A whole-number score of a sorted set, in any notation of Redis.
pub(crate) fn parse_score(text: &str) -> Option<i64> {
    text.parse().ok().or_else(|| {
        let score = text.parse::<f64>().ok()?;
        #[expect(clippy::cast_possible_truncation, reason = "scores are whole and below 2^53")]
        score.is_finite().then_some(score as i64)
    })
}
