//! Data for years: this version handles what every released version stored, and refuses what a later
//! one stored.
//!
//! `tests/it/fixtures/stored/VERSION` holds what a process of that version left in Redis and MongoDB
//! when it was killed in the middle of its work: [`story`] tells what. `make samples` writes the
//! directory of the present version again.
//!
//! | file | holds |
//! |---|---|
//! | `story` | the configuration, and what happens before the kill |
//! | `text` | data of Redis and MongoDB as text that people can read, and back |
//! | `handled` | each sample is handled in order |
//! | `kinds` | no kind of stored data lacks a sample |
//! | `later` | data of a later version is refused; what `fairlane check` tells about an upgrade |

mod handled;
mod kinds;
mod later;
mod story;
mod text;

use std::fs;
use std::path::{Path, PathBuf};

/// The directories of the samples, the oldest version first.
fn samples() -> Vec<PathBuf> {
    let found = fs::read_dir(directory()).expect("the directory of the samples");
    let mut found: Vec<PathBuf> = found.map(|entry| entry.expect("a directory").path()).collect();
    found.sort_by_key(|path| numbers(path));
    found
}

/// The numbers of a version.
fn numbers(sample: &Path) -> Vec<u32> {
    let name = sample.file_name().and_then(|name| name.to_str()).expect("a version");
    name.split('.').map(|number| number.parse().unwrap_or_else(|_| panic!("{name}"))).collect()
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/fixtures/stored")
}

/// The sample of this version.
fn present() -> PathBuf {
    directory().join(env!("CARGO_PKG_VERSION"))
}

#[test]
fn the_present_version_and_every_version_of_the_changelog_has_a_sample() {
    let changelog = Path::new(env!("CARGO_MANIFEST_DIR")).join("CHANGELOG.md");
    let changelog = fs::read_to_string(changelog).expect("the changelog");
    let versions = changelog.lines().filter_map(|line| line.strip_prefix("## "));
    let versions: Vec<&str> = versions.map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(versions.first(), Some(&env!("CARGO_PKG_VERSION")), "the newest comes first");
    for version in &versions {
        let sample = directory().join(version);
        assert!(sample.join("redis.txt").exists(), "no sample of {version}: make samples");
        assert!(sample.join("mongodb.txt").exists(), "no sample of {version}: make samples");
    }
    assert_eq!(samples().len(), versions.len(), "a sample of a version that the changelog lacks");
}
