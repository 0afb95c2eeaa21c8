//! Every property, for the inputs of `fuzz/corpus/` and a bounded number of changes of them. The changes
//! are the same in every run.

mod mutate;

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::mutate::Mutator;
use super::TARGETS;

/// The changes end after this time; on a slow machine there are fewer.
const TIME: Duration = Duration::from_millis(1_500);
/// The changes end after this number.
const CHANGES: u64 = 20_000;
/// No input is longer.
const INPUT_MAX: usize = 4_096;
/// Bounds of the committed inputs, so that they stay a small part of the repository.
const FILES_MAX: usize = 300;
/// With these, no input takes this long: neither without optimisation nor on a busy machine.
const LONG: Duration = Duration::from_secs(20);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// The committed inputs of a target, in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = root().join("corpus").join(target);
    let entries = fs::read_dir(&folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Runs one input. What fails is shown so that it can be stored.
fn check(target: &str, property: fn(&[u8]), input: &[u8], origin: &str) {
    let begun = Instant::now();
    let held = catch_unwind(|| property(input)).is_ok();
    assert!(
        held,
        "{target}: the property does not hold for {origin}; to keep the input as a test:\n\
         printf '{}' > fuzz/corpus/{target}/NAME",
        printf(input)
    );
    assert!(begun.elapsed() < LONG, "{target}: {origin} took {:?}", begun.elapsed());
}

/// The input as the format of the command `printf`.
fn printf(input: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b'%' => "%%".to_owned(),
        b'\\' | b'\'' | ..b' ' | 0x7f.. => format!("\\{byte:03o}"),
        byte => char::from(*byte).to_string(),
    };
    input.iter().map(shown).collect()
}

fn run(target: &str) {
    let (_, property) = TARGETS.into_iter().find(|(name, _)| *name == target).unwrap();
    let corpus = corpus(target);
    for (path, input) in &corpus {
        check(target, property, input, &path.display().to_string());
    }
    let dictionary = root().join("dictionaries").join(format!("{target}.dict"));
    let dictionary = fs::read_to_string(dictionary).unwrap_or_default();
    let inputs = corpus.into_iter().map(|(_, input)| input).collect();
    let mut mutator = Mutator::new(target, inputs, &dictionary);
    let begun = Instant::now();
    for number in 0..CHANGES {
        if begun.elapsed() > TIME {
            break;
        }
        let input = mutator.next_input(INPUT_MAX);
        check(target, property, &input, &format!("change {number} of the committed inputs"));
    }
}

macro_rules! targets {
    ($($target:ident: $promise:ident),+ $(,)?) => {
        $(#[test]
        fn $promise() {
            run(stringify!($target));
        })+

        #[test]
        fn every_target_has_a_program_inputs_and_a_test() {
            let tested = [$(stringify!($target)),+];
            assert_eq!(TARGETS.map(|(name, _)| name), tested);
            let (mut files, mut programs) = (0, BTreeSet::new());
            for (target, _) in TARGETS {
                let corpus = corpus(target);
                assert!(corpus.len() >= 5, "{target} has few inputs");
                files += corpus.len();
                for (path, input) in corpus {
                    assert!(input.len() <= INPUT_MAX, "{} is too long", path.display());
                }
                let program = fs::read_to_string(root().join(format!("fuzz_targets/{target}.rs")));
                assert!(program.unwrap().contains(&format!("fairlane::fuzzing::{target}(data)")));
                programs.insert(format!("{target}.rs"));
            }
            assert!(files < FILES_MAX, "there are {files} inputs");
            let found = fs::read_dir(root().join("fuzz_targets")).unwrap();
            let found = found.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            assert_eq!(found.collect::<BTreeSet<_>>(), programs);
            let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
            for (target, _) in TARGETS {
                assert!(manifest.contains(&format!("path = \"fuzz_targets/{target}.rs\"")));
            }
        }
    };
}

targets! {
    configuration: a_configuration_is_loaded_or_refused_with_its_place,
    event: an_event_is_the_same_in_json_in_messagepack_and_in_a_queue,
    expression: an_expression_ends_soon_and_gives_little,
    import: the_lines_of_an_import_are_all_read_or_all_told,
    parameters: parameters_mean_the_same_in_a_form_and_in_json,
    record: a_record_that_is_accepted_comes_back_from_the_bus,
    stored: what_a_store_returns_is_read_or_refused,
    token: a_token_that_was_not_issued_is_not_read,
    url: the_client_connects_to_the_host_that_was_checked,
}

#[test]
fn a_property_that_does_not_hold_is_told_with_its_input() {
    let odd = |input: &[u8]| assert!(input.is_empty(), "it is not empty");
    check("sample", odd, b"", "nothing");
    let told = catch_unwind(|| check("sample", odd, b"a'%\n\xff", "this")).unwrap_err();
    let told = told.downcast_ref::<String>().unwrap();
    assert!(told.contains("sample: ") && told.contains("for this"), "{told}");
    assert!(told.ends_with(r"printf 'a\047%%\012\377' > fuzz/corpus/sample/NAME"), "{told}");
}
