//! The directory of a rig: among the temporary files, with a path that is short enough for a socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::SandboxError;
use crate::private::Unusable;
use crate::redis::private;

/// The short name of a directory for temporary files.
const SHORT: &str = "/tmp";
/// The number of attempts to remove a directory, and the time between them.
const ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// The directory. It is removed when this is dropped.
pub(super) struct Directory(PathBuf);

impl Directory {
    /// Creates the directory.
    pub(super) fn create() -> Result<Self, Unusable> {
        let temporary = std::env::temp_dir();
        std::fs::create_dir_all(&temporary).map_err(Unusable::at(&temporary))?;
        let name = format!("fl-{:08x}", rand::random::<u32>());
        let place = temporary.canonicalize().map_err(Unusable::at(&temporary))?;
        let directory = under(&place, &name);
        // Fails if it exists: it may belong to another user.
        std::fs::create_dir(&directory).map_err(Unusable::at(&directory))?;
        Ok(Self(directory))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes the directory with its files. Its server must have been killed.
    pub(super) fn remove(self) -> Result<(), SandboxError> {
        let path = self.0.clone();
        remove(&path).map_err(|source| SandboxError::NotRemoved { path, source })
    }
}

impl Drop for Directory {
    /// Finds nothing after [`Directory::remove`].
    fn drop(&mut self) {
        let _ = remove(&self.0);
    }
}

/// Removes a directory with its files. A server that is being killed may still create one of them.
fn remove(directory: &Path) -> io::Result<()> {
    for _ in 1..ATTEMPTS {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(PAUSE);
            }
            removed => return removed,
        }
    }
    std::fs::remove_dir_all(directory)
}

/// The path of a directory under `temporary`, or under `/tmp` if a socket there had too long a path.
fn under(temporary: &Path, name: &str) -> PathBuf {
    let directory = temporary.join(name);
    if private::fits(&directory) { directory } else { Path::new(SHORT).join(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "fl-0123abcd";

    #[test]
    fn a_socket_fits_under_the_temporary_directory_of_a_mac() {
        let temporary = Path::new("/private/var/folders/zz/zyxvpxvq6csfxvn_n00000000000000/T");
        assert_eq!(temporary.as_os_str().len(), 57);
        assert_eq!(under(temporary, NAME), temporary.join(NAME));
    }

    #[test]
    fn under_a_long_path_the_directory_is_in_tmp_instead() {
        let long = Path::new("/").join("x".repeat(80));
        assert_eq!(under(&long, NAME), Path::new("/tmp").join(NAME));
    }
}
