//! The directory of a rig: among the temporary files, with a path that is short enough for a socket.

use std::io;
use std::path::{Path, PathBuf};

use crate::redis::private;

/// The short name of a directory for temporary files.
const SHORT: &str = "/tmp";

/// Creates the directory.
pub(super) fn create() -> io::Result<PathBuf> {
    let temporary = std::env::temp_dir();
    std::fs::create_dir_all(&temporary)?;
    let name = format!("fl-{:08x}", rand::random::<u32>());
    let directory = under(&temporary.canonicalize()?, &name);
    // Fails if it exists: it may belong to another user.
    std::fs::create_dir(&directory)?;
    Ok(directory)
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
