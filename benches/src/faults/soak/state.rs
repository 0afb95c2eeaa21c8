//! What a soak keeps between its runs, so that hours can be made of several shorter runs.
//!
//! A run ends in a night, with everything handled and judged. The servers keep their data, and this
//! file has the rest: what was counted, and what was measured. While a run is in progress, the file is
//! absent: the data of a run that was killed in the middle of a day cannot be judged.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Options, Report, Sample};
use crate::error::BenchError;

/// What the next run needs.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// The report of all runs until now.
    pub(super) report: Report,
    /// How long all days lasted, and how long the runs did with their nights, both in µs.
    pub(super) lasted_us: u64,
    pub(super) elapsed_us: u64,
    /// The process that is restarted next.
    pub(super) next: usize,
    pub(super) samples: Vec<Sample>,
    pub(super) delays: Vec<(u64, u32)>,
    /// Bot, ad, and views.
    pub(super) views: Vec<(String, String, u64)>,
    pub(super) sales: BTreeMap<String, u64>,
}

impl State {
    /// That of a first run.
    pub(super) fn new(options: &Options) -> Self {
        let Options { seed, rate, processes, .. } = *options;
        let report = Report { seed, rate, processes, ..Report::default() };
        Self { report, next: 1, ..Self::default() }
    }

    /// The state of the runs before, which no other run can take any more.
    ///
    /// # Errors
    /// If the directory has another soak, or one that cannot go on.
    pub(super) fn take(directory: &Path, options: &Options) -> Result<Self, BenchError> {
        let refuse =
            |problem: String| Err(BenchError::State { directory: directory.to_owned(), problem });
        fs::create_dir_all(directory)?;
        let (path, begun) = (file(directory), begun(directory));
        let opened = match File::open(&path) {
            Ok(opened) => opened,
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            Err(_) if fs::read_dir(directory)?.next().is_none() => {
                return Ok(Self::new(options));
            }
            Err(_) if begun.exists() => {
                return refuse(format!(
                    "a soak begins there, or could not begin; if none is running, rename {} to {}",
                    begun.display(),
                    path.display(),
                ));
            }
            Err(_) => {
                return refuse(
                    "it has the data of a soak that is in progress, or was killed in the middle of a \
                     day; write another directory, or delete it"
                        .to_owned(),
                );
            }
        };
        let state: Self = match serde_json::from_reader(BufReader::new(opened)) {
            Ok(state) => state,
            Err(error) => return refuse(format!("{error}; write another directory")),
        };
        let before = &state.report;
        for (option, before, now) in [
            ("seed", before.seed, options.seed),
            ("rate", before.rate.into(), options.rate.into()),
            ("processes", before.processes as u64, options.processes as u64),
        ] {
            if before != now {
                return refuse(format!("the soak there has --{option} {before}; write the same"));
            }
        }
        if state.lasted_us >= options.seconds * 1_000_000 {
            let seconds = state.lasted_us / 1_000_000;
            return refuse(format!(
                "the soak there has lasted {seconds} s; write a larger --seconds, or another directory"
            ));
        }
        fs::rename(path, begun)?;
        Ok(state)
    }

    /// The load begins: without its end, the data there cannot be judged any more.
    pub(super) fn begin(directory: &Path) -> Result<(), BenchError> {
        match fs::remove_file(begun(directory)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Lets the next run go on.
    pub(super) fn keep(&self, directory: &Path) -> Result<(), BenchError> {
        let new = file(directory).with_extension("new");
        let mut to = BufWriter::new(File::create(&new)?);
        serde_json::to_writer(&mut to, self).map_err(std::io::Error::from)?;
        to.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
        Ok(fs::rename(new, file(directory))?)
    }
}

fn file(directory: &Path) -> PathBuf {
    directory.join("soak.json")
}

/// The name of the file while the servers and processes start.
fn begun(directory: &Path) -> PathBuf {
    directory.join("soak.begun.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        let (seed, seconds, rate, processes, days) = (1, 100, 2_000, 3, 4);
        Options { seed, seconds, rate, processes, days, chart: None, state: None }
    }

    #[test]
    fn a_soak_goes_on_once_with_the_same_options_and_until_its_seconds() {
        let directory = tempfile::tempdir().unwrap();
        let take = |options: &Options| State::take(directory.path(), options);
        let mut state = take(&options()).unwrap();
        state.lasted_us = 60_000_000;
        state.delays.push((1, 2));
        fs::create_dir(directory.path().join("redis")).unwrap();
        let refused = |options: &Options| take(options).unwrap_err().to_string();
        assert!(refused(&options()).contains("killed in the middle of a day"));
        state.keep(directory.path()).unwrap();
        let other = Options { rate: 1_000, ..options() };
        assert!(refused(&other).contains("has --rate 2000; write the same"), "{}", refused(&other));
        let ended = Options { seconds: 60, ..options() };
        assert!(refused(&ended).contains("has lasted 60 s; write a larger --seconds"));
        let again = take(&options()).unwrap();
        assert_eq!((again.lasted_us, again.delays), (60_000_000, vec![(1, 2)]));
        assert!(refused(&options()).contains("soak.begun.json to "), "{}", refused(&options()));
        State::begin(directory.path()).unwrap();
        assert!(refused(&options()).contains("is in progress"));
    }
}
