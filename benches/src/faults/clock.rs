//! The wall clock of a process, which a fault sets forward or back. Needs libfaketime.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::BenchError;

/// Where Debian's package `faketime` has its library, and where others have it.
const LIBRARIES: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
];

/// The clock of one process.
pub(crate) struct FakeClock {
    file: PathBuf,
}

impl FakeClock {
    /// The library, if it is installed.
    pub(crate) fn library() -> Option<&'static str> {
        LIBRARIES.into_iter().find(|path| Path::new(path).exists())
    }

    /// Lets the process that `command` starts read its clock from a file. The clock starts right.
    pub(crate) fn prepare(
        directory: &Path,
        number: u32,
        command: &mut Command,
    ) -> Result<Option<Self>, BenchError> {
        let Some(library) = Self::library() else { return Ok(None) };
        let clock = Self { file: directory.join(format!("clock-{number}")) };
        clock.set(0)?;
        command
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", &clock.file)
            // Reads the file at each call, and leaves the clock alone that only measures time.
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Ok(Some(clock))
    }

    /// Sets the clock this many seconds ahead of the right time, or behind it.
    pub(crate) fn set(&self, seconds: i64) -> Result<(), BenchError> {
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{seconds:+}s"))?;
        Ok(fs::rename(new, &self.file)?)
    }
}
