//! The structure of the sources: the core names no product.

use std::fs;
use std::path::{Path, PathBuf};

/// The core, below `src/`.
const CORE: &[&str] = &[
    "admission",
    "bus",
    "event",
    "fanout",
    "filter",
    "handler",
    "keyspace",
    "ledger.rs",
    "outbound",
    "pipeline.rs",
    "pool",
    "queue",
];
/// What a core that knows a product would say.
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
