//! Texts that are spelled like another one.

/// Maximum distance of a text that was probably meant.
const CLOSE: usize = 2;

/// The known texts that the author of `text` probably meant, the nearest first, at most `max`.
pub(crate) fn near<'a>(
    text: &str,
    known: impl IntoIterator<Item = &'a str>,
    max: usize,
) -> Vec<&'a str> {
    let length = text.chars().count();
    let mut found: Vec<(usize, &str)> = Vec::new();
    for known in known {
        let other = known.chars().count();
        if known == text || other.abs_diff(length) > CLOSE {
            continue;
        }
        let distance = edit_distance(text, known);
        if distance <= CLOSE && distance * 2 < other {
            found.push((distance, known));
        }
    }
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(max).map(|(_, known)| known).collect()
}

/// The number of characters to insert, remove or replace to turn one text into the other
/// (Levenshtein distance).
pub(crate) fn edit_distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first_and_distant_ones_not_at_all() {
        let known = ["shop-7", "shop-70", "shpo-7", "warehouse", "shop-7", "s", "日本語"];
        assert_eq!(near("shop-77", known, 3), ["shop-7", "shop-70"]);
        assert_eq!(near("shop-7", known, 9), ["shop-70", "shpo-7"], "not itself");
        assert_eq!(near("日本", known, 3), ["日本語"]);
        assert_eq!(near("nothing-like-it", known, 3), [""; 0]);
        assert_eq!(near("shop-77", known, 1), ["shop-7"]);
    }
}
