//! Where a server has its data.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::statvfs;
use tempfile::{Builder, TempDir};

/// Linux has a file system in memory here.
const MEMORY: &str = "/dev/shm";
/// What must be free in it, in bytes. Each server of the tests needs some tens of megabytes.
const FREE: u64 = 2 << 30;

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
        Self::Temporary(temporary())
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

/// A directory for the data of a server, removed when it is dropped. It is in memory where that is
/// possible: a server syncs many of its writes, and a disk needs milliseconds for each. Tests kill servers,
/// and never the machine, so written data survives there too.
///
/// Nothing removes the directories of killed tests: in memory, that is `rm -r /dev/shm/fl-test-*`.
///
/// # Panics
/// If it cannot be created.
pub fn temporary() -> TempDir {
    static IN_MEMORY: OnceLock<bool> = OnceLock::new();
    if *IN_MEMORY.get_or_init(is_usable) {
        Builder::new().prefix("fl-test-").tempdir_in(MEMORY).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

/// Whether data can be in memory. Another `TMPDIR` is meant to have it: those who kill tests remove their
/// files with it.
fn is_usable() -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mounts = read("/proc/self/mounts");
    let free = statvfs(MEMORY).map_or(0, |found| found.f_bavail * found.f_frsize);
    std::env::temp_dir() == Path::new("/tmp")
        && is_in_memory(&mounts)
        && free >= FREE
        && is_free(&read("/proc/meminfo"), &read("/sys/fs/cgroup/memory.max"))
        && tempfile::tempdir_in(MEMORY).is_ok()
}

/// Whether [`MEMORY`] is a file system in memory. Each line of `mounts` has the device, the place and the
/// kind of one.
fn is_in_memory(mounts: &str) -> bool {
    mounts.lines().any(|mount| mount.split(' ').skip(1).take(2).eq([MEMORY, "tmpfs"]))
}

/// Whether so much memory is free twice: the size of the file system may be above that. `limit`: of a
/// container, in bytes, or `max`.
fn is_free(meminfo: &str, limit: &str) -> bool {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kb = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let limit = limit.trim().parse().unwrap_or(u64::MAX);
    kb.is_some_and(|kb| kb << 10 >= 2 * FREE) && limit >= 4 * FREE
}

#[test]
fn data_is_in_memory_only_if_twice_its_size_is_free() {
    let free =
        |kb: u64| format!("MemTotal:  24000000 kB\nMemAvailable:   {kb} kB\nBuffers: 1 kB\n");
    let enough = (2 * FREE) >> 10;
    assert!(is_free(&free(enough), "max\n") && is_free(&free(enough), ""));
    assert!(!is_free(&free(enough - 1), "max\n") && !is_free("", "max\n"));
    assert!(!is_free(&free(enough), "4294967296\n"), "a small container");
}

#[test]
fn only_a_file_system_in_memory_is_taken_for_one() {
    for (mounts, expected) in [
        ("proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0", true),
        ("shm /dev/shm tmpfs rw,noexec,size=65536k 0 0", true),
        ("/dev/vda /dev/shm ext4 rw 0 0", false),
        ("tmpfs /run tmpfs rw 0 0", false),
        ("", false),
    ] {
        assert_eq!(is_in_memory(mounts), expected, "{mounts}");
    }
}
