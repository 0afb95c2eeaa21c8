//! Where a server has its data.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The directory of a server.
#[derive(Debug)]
pub enum Directory {
    /// It is removed with the server.
    Temporary(TempDir),
    /// It stays. A server that starts there again has the data of the one before.
    Kept(PathBuf),
}

impl Directory {
    /// # Panics
    /// If it cannot be created.
    pub fn temporary() -> Self {
        Self::Temporary(tempfile::tempdir().unwrap())
    }

    /// # Panics
    /// If it does not exist and cannot be created.
    pub fn kept(path: PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        Self::Kept(path)
    }

    pub fn path(&self) -> &Path {
        match self {
            Self::Temporary(directory) => directory.path(),
            Self::Kept(path) => path,
        }
    }
}
