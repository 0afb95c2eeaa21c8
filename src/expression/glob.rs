//! Type patterns.

/// A type pattern: `*` matches any text, dots included; every other character matches itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Glob(Vec<String>);

impl Glob {
    /// Every text is a valid pattern.
    #[must_use]
    pub fn new(pattern: &str) -> Self {
        Self(pattern.split('*').map(str::to_owned).collect())
    }

    /// Whether the pattern matches all of `text`.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = &*self.0 else {
            return self.0.first().is_some_and(|whole| whole == text);
        };
        let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
        for part in middle {
            // The leftmost match is as good as any: the next part only has to follow it.
            let Some(at) = rest.find(part.as_str()) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last.as_str())
    }
}
