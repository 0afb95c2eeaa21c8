//! The structure of the sources: the core names no product, imports form no circle, no file is too long,
//! and no merge is left unfinished.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the core, below `src/`.
const CORE: &[&str] = &[
    "admission",
    "bus",
    "event",
    "expression",
    "fanout",
    "handler",
    "ledger.rs",
    "outbound",
    "pipeline.rs",
    "pool",
    "queue",
    "redis",
];
/// Words that would show that the core knows a product.
const WORDS: &[&str] =
    &["counters", "notification", "automation", "counts_views", "notifies", "automates"];

fn sources(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_owned()];
    }
    let Ok(entries) = fs::read_dir(place) else { return Vec::new() };
    entries.flat_map(|entry| sources(&entry.unwrap().path())).collect()
}

#[test]
fn the_core_names_no_product() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut looked_at, mut found) = (0, Vec::new());
    for place in CORE {
        let files = sources(&root.join(place));
        assert!(!files.is_empty(), "src/{place} is gone");
        for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "rs")) {
            looked_at += 1;
            let text = fs::read_to_string(file).unwrap();
            for (number, line) in (1..).zip(text.lines()) {
                if WORDS.iter().any(|word| line.to_lowercase().contains(word)) {
                    found.push(format!("{}:{number}: {}", file.display(), line.trim()));
                }
            }
        }
    }
    assert!(looked_at > 40, "only {looked_at} files were looked at");
    assert!(found.is_empty(), "the core names products:\n{}", found.join("\n"));
}

/// The modules of the crate that a file imports from, without the imports of its tests.
fn imports(text: &str) -> BTreeSet<String> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.starts_with("//")).collect();
    let code = code.join("\n");
    let name = |text: &str| {
        let is_part = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
        text.trim_start().chars().take_while(is_part).collect::<String>()
    };
    let mut found = BTreeSet::new();
    for after in code.split("crate::").skip(1) {
        match after.strip_prefix('{') {
            // `use crate::{a, b::C}`
            Some(list) => {
                found.extend(list.split('}').next().unwrap_or_default().split(',').map(name));
            }
            None => drop(found.insert(name(after))),
        }
    }
    found
}

#[test]
fn no_imports_between_modules_form_a_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in sources(&root) {
        let place = file.strip_prefix(&root).unwrap();
        let is_test = place.iter().any(|part| part == "tests" || part == "tests.rs");
        if is_test || file.extension().is_none_or(|end| end != "rs") {
            continue;
        }
        let module = place.iter().next().unwrap().to_string_lossy().replace(".rs", "");
        if module != "lib" && module != "main" {
            let imports = imports(&fs::read_to_string(&file).unwrap());
            modules.entry(module).or_default().extend(imports);
        }
    }
    assert!(modules.len() > 30, "only {} modules were looked at", modules.len());
    assert!(modules["http"].contains("queue") && modules["queue"].contains("redis"));
    // Removes modules that import no remaining module, until none is left to remove. A circle
    // remains.
    loop {
        let left: BTreeSet<String> = modules.keys().cloned().collect();
        let imports_of_left = |(module, imports): (&String, &BTreeSet<String>)| {
            imports.iter().any(|import| import != module && left.contains(import))
        };
        let before = modules.len();
        modules.retain(|module, imports| imports_of_left((module, imports)));
        if modules.len() == before {
            break;
        }
    }
    assert!(modules.is_empty(), "these modules import each other: {modules:#?}");
}

/// Maximum number of lines of a source file. A longer file has several concerns.
const LINES_MAX: usize = 500;
/// Files that may be longer, each with a comment that gives the reason.
const LONGER: &[&str] = &[];

#[test]
fn no_source_file_is_longer_than_500_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut looked_at, mut found) = (0, Vec::new());
    for folder in ["src", "benches", "testkit", "tests", "examples"] {
        let files = sources(&root.join(folder));
        assert!(!files.is_empty(), "{folder} is gone");
        for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "rs")) {
            looked_at += 1;
            let place = file.strip_prefix(root).unwrap();
            let lines = fs::read_to_string(file).unwrap().lines().count();
            if lines > LINES_MAX && !LONGER.iter().any(|longer| place == Path::new(longer)) {
                found.push(format!("{}: {lines} lines", place.display()));
            }
        }
    }
    assert!(looked_at > 300, "only {looked_at} files were looked at");
    assert!(found.is_empty(), "split these files by concern:\n{}", found.join("\n"));
}

#[test]
fn no_file_has_the_marks_of_a_merge_conflict() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let own = entries.filter(|path| !path.ends_with("target") && !path.ends_with(".git"));
    let (mut looked_at, mut found) = (0, Vec::new());
    for file in own.flat_map(|path| sources(&path)) {
        // The other files are pictures.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        looked_at += 1;
        for (number, line) in (1..).zip(text.lines()) {
            if ["<<<<<<< ", ">>>>>>> ", "||||||| "].iter().any(|mark| line.starts_with(mark)) {
                found.push(format!("{}:{number}: {line}", file.display()));
            }
        }
    }
    assert!(looked_at > 500, "only {looked_at} files were looked at");
    assert!(found.is_empty(), "a merge was not finished:\n{}", found.join("\n"));
}
