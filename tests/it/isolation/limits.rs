//! The table of limits in the documentation.

use std::fs;
use std::path::Path;

const PAGE: &str = "docs/security.md";

/// All tests below a folder, as one text.
fn tests(place: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(place).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            text += &tests(&entry.path());
        } else {
            text += &fs::read_to_string(entry.path()).unwrap_or_default();
        }
    }
    text
}

#[test]
fn every_limit_of_the_page_on_security_names_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join(PAGE)).unwrap();
    let tests = tests(&root.join("tests/it")) + &tests(&root.join("src"));
    let (_, section) = page.split_once("\n## Limits\n").expect("the page has the section");
    let section = section.split("\n#").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    let named: Vec<&str> = rows
        .filter_map(|row| row.trim_end().trim_end_matches('|').rsplit('|').next())
        .flat_map(|cell| cell.split(", "))
        .map(|name| name.trim().trim_matches('`'))
        .filter(|name| name.contains('_'))
        .collect();
    assert!(named.len() > 25, "{named:?}");
    for name in named {
        assert!(tests.contains(&format!("fn {name}()")), "{PAGE} names the test {name}");
    }
}
