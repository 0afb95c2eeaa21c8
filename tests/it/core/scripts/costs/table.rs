//! A table of reference counts: a name and a number per line. Used by the tests of the scripts, and
//! by `benches/instructions.rs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The line that says under which conditions the counts hold.
const CONDITIONS: &str = "# measured with ";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) count: u64,
}

impl Row {
    pub(crate) fn new(name: &str, count: u64) -> Self {
        assert!(!name.contains("  "), "two spaces end a name: {name:?}");
        Self { name: name.to_owned(), count }
    }
}

/// How far a count may be from its reference: the larger of both.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tolerance {
    pub(crate) percent: u64,
    /// For small counts, where a few instructions are many percent.
    pub(crate) count: u64,
}

impl Tolerance {
    pub(crate) const NONE: Self = Self { percent: 0, count: 0 };

    fn permits(self, count: u64, reference: u64) -> bool {
        count.abs_diff(reference) <= self.count.max(reference * self.percent / 100)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    /// What the counts depend on besides this repository, for example the version of Redis. Empty:
    /// nothing.
    pub(crate) conditions: String,
    pub(crate) rows: Vec<Row>,
}

impl Table {
    /// Reads a file that [`Self::save`] wrote. A missing file is an empty table.
    pub(crate) fn load(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        let mut table = Self { conditions: String::new(), rows: Vec::new() };
        for line in text.lines() {
            if let Some(conditions) = line.strip_prefix(CONDITIONS) {
                conditions.clone_into(&mut table.conditions);
            } else if !line.starts_with('#') && !line.is_empty() {
                let row = line.split_once("  ").and_then(|(name, count)| {
                    Some(Row::new(name, count.trim().replace(',', "").parse().ok()?))
                });
                let row = row.unwrap_or_else(|| panic!("{}: {line:?} is no row", path.display()));
                table.rows.push(row);
            }
        }
        table
    }

    /// Writes the table. Keeps the comments at the head of the file.
    pub(crate) fn save(&self, path: &Path) {
        let old = fs::read_to_string(path).unwrap_or_default();
        let mut text: String = old
            .lines()
            .filter(|line| line.starts_with('#') && !line.starts_with(CONDITIONS))
            .fold(String::new(), |text, line| text + line + "\n");
        if !self.conditions.is_empty() {
            writeln!(text, "{CONDITIONS}{}", self.conditions).unwrap();
        }
        let name = self.name_width();
        let number = self.rows.iter().map(|row| digits(row.count).len()).max().unwrap_or(0);
        for Row { name: of, count } in &self.rows {
            writeln!(text, "{of:name$}  {:>number$}", digits(*count)).unwrap();
        }
        fs::write(path, text).unwrap();
        println!("wrote {} references to {}", self.rows.len(), path.display());
    }

    fn name_width(&self) -> usize {
        self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0)
    }

    /// The rows outside the tolerance, each with a sentence; and those that only one of both has.
    pub(crate) fn differences(
        &self,
        reference: &Self,
        tolerance: Tolerance,
    ) -> Vec<(String, String)> {
        let mut missing: BTreeMap<&str, u64> =
            reference.rows.iter().map(|row| (row.name.as_str(), row.count)).collect();
        let mut found = Vec::new();
        for Row { name, count } in &self.rows {
            let text = match missing.remove(name.as_str()) {
                None => format!("{name}: no reference, measured {}", digits(*count)),
                Some(bound) if tolerance.permits(*count, bound) => continue,
                Some(bound) => {
                    let word = if *count > bound { "grew" } else { "fell" };
                    format!("{name}: {word} from {} to {}", digits(bound), digits(*count))
                }
            };
            found.push((name.clone(), text));
        }
        for (name, count) in missing {
            let text = format!("{name}: reference {}, but no longer measured", digits(count));
            found.push((name.to_owned(), text));
        }
        found
    }

    /// Of two measurements of the same situations, the counts that are nearer to the reference.
    pub(crate) fn nearest(self, other: Self, reference: &Self) -> Self {
        let known: BTreeMap<&str, u64> =
            reference.rows.iter().map(|row| (row.name.as_str(), row.count)).collect();
        let distance =
            |row: &Row| row.count.abs_diff(known.get(row.name.as_str()).copied().unwrap_or(0));
        let rows = self.rows.into_iter().zip(other.rows);
        let rows = rows.map(|(one, two)| if distance(&two) < distance(&one) { two } else { one });
        Self { conditions: self.conditions, rows: rows.collect() }
    }

    /// The measured counts beside their references.
    pub(crate) fn beside(&self, reference: &Self) -> String {
        let known: BTreeMap<&str, u64> =
            reference.rows.iter().map(|row| (row.name.as_str(), row.count)).collect();
        let name = self.name_width();
        let mut text = format!(
            "{:name$}  {:>12}  {:>12}  {:>10}\n",
            "", "instructions", "reference", "difference"
        );
        for row in &self.rows {
            let (bound, percent) = match known.get(row.name.as_str()) {
                Some(bound) => (digits(*bound), percent(row.count, *bound)),
                None => ("none".to_owned(), String::new()),
            };
            let (of, count) = (&row.name, digits(row.count));
            writeln!(text, "{of:name$}  {count:>12}  {bound:>12}  {percent:>10}").unwrap();
        }
        text
    }

    /// Prints the counts beside the references in the file, or writes them there.
    ///
    /// # Errors
    /// If counts are outside the tolerance. Under other conditions than those of the file, the
    /// differences are only printed.
    pub(crate) fn judge(
        &self,
        path: &Path,
        tolerance: Tolerance,
        renew: bool,
    ) -> Result<(), String> {
        if renew {
            self.save(path);
            return Ok(());
        }
        let (reference, file) = (Self::load(path), path.display());
        println!("{}", self.beside(&reference));
        if reference.conditions != self.conditions {
            println!(
                "not judged: {file} was measured with {}, this is {}\n",
                reference.conditions, self.conditions
            );
            return Ok(());
        }
        let Tolerance { percent, count } = tolerance;
        let limit = format!("{percent} % and {} instructions", digits(count));
        let differences = self.differences(&reference, tolerance);
        if differences.is_empty() {
            println!("none differs by more than {limit} from {file}\n");
            return Ok(());
        }
        let lines: Vec<&str> = differences.iter().map(|(_, text)| text.as_str()).collect();
        Err(format!(
            "{} counts differ by more than {limit} from {file}:\n{}",
            lines.len(),
            lines.join("\n")
        ))
    }
}

/// The number with a comma after each thousand.
fn digits(number: u64) -> String {
    let plain = number.to_string();
    let mut text = String::new();
    for (at, digit) in plain.char_indices() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The difference in percent with one digit behind the point.
fn percent(count: u64, bound: u64) -> String {
    let sign = if count < bound { '-' } else { '+' };
    let tenths = (count.abs_diff(bound) * 1_000 + bound / 2) / bound.max(1);
    format!("{sign}{}.{} %", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(&str, u64)]) -> Table {
        let rows = rows.iter().map(|(name, count)| Row::new(name, *count)).collect();
        Table { conditions: "a server".to_owned(), rows }
    }

    #[test]
    fn a_saved_table_is_read_back_and_keeps_its_comments() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("counts.txt");
        fs::write(&path, "# A comment.\n# measured with another server\nold  1\n").unwrap();
        let saved = table(&[("a: short", 1), ("b: one, two", 1_234_567)]);
        saved.save(&path);
        assert_eq!(Table::load(&path), saved);
        let text = fs::read_to_string(&path).unwrap();
        let expected = "# A comment.\n# measured with a server\n\
                        a: short             1\nb: one, two  1,234,567\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_count_outside_the_tolerance_is_named_whether_it_grew_or_fell() {
        let reference = table(&[("grew", 1_000), ("fell", 1_000), ("near", 1_000), ("gone", 7)]);
        let measured = table(&[("grew", 1_031), ("fell", 969), ("near", 1_030), ("new", 7)]);
        let texts = |tolerance| -> Vec<String> {
            let differences = measured.differences(&reference, tolerance);
            differences.into_iter().map(|(_, text)| text).collect()
        };
        let grown = "grew: grew from 1,000 to 1,031";
        let fallen = "fell: fell from 1,000 to 969";
        let others = ["new: no reference, measured 7", "gone: reference 7, but no longer measured"];
        let expected = [&[grown, fallen][..], &others].concat();
        assert_eq!(texts(Tolerance { percent: 3, count: 0 }), expected);
        assert_eq!(texts(Tolerance { percent: 0, count: 31 }), others);
        assert_eq!(texts(Tolerance::NONE).len(), 5);
    }

    #[test]
    fn of_two_measurements_the_nearer_count_is_taken() {
        let reference = table(&[("a", 100), ("b", 100), ("c", 100)]);
        let (one, two) = (
            table(&[("a", 110), ("b", 99), ("c", 120)]),
            table(&[("a", 101), ("b", 80), ("c", 130)]),
        );
        assert_eq!(one.nearest(two, &reference), table(&[("a", 101), ("b", 99), ("c", 120)]));
    }

    #[test]
    fn other_conditions_are_not_judged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("counts.txt");
        table(&[("a", 1)]).save(&path);
        let grown = table(&[("a", 2)]);
        assert!(grown.judge(&path, Tolerance::NONE, false).unwrap_err().contains("a: grew from"));
        let elsewhere = Table { conditions: "another server".to_owned(), ..grown };
        elsewhere.judge(&path, Tolerance::NONE, false).unwrap();
    }
}
