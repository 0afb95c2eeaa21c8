//! Inspects and signals processes that are not children of this one, with tools that every system
//! has: `sh`, and `ps` if there is no `/proc`.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use tokio::process::Command;

/// Whether the process runs and was started with that argument. False for a zombie process.
pub(super) async fn has_argument(pid: u32, argument: &OsStr) -> bool {
    if cfg!(target_os = "linux") {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        return line.split(|byte| *byte == 0).any(|part| part == argument.as_bytes());
    }
    let listed = Command::new("ps").args(["-ww", "-o", "args=", "-p", &pid.to_string()]).output();
    let line = listed.await.map(|output| output.stdout).unwrap_or_default();
    line.windows(argument.len().max(1)).any(|part| part == argument.as_bytes())
}

/// Sends the signal with that name. A missing process is not an error.
pub(super) async fn signal(pid: u32, name: &str) -> io::Result<()> {
    // `kill` is a builtin of the shell. Small systems have no program of that name.
    let status = Command::new("sh")
        .args(["-c", "kill -s \"$0\" \"$1\" || ! kill -0 \"$1\"", name, &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .await?;
    if status.success() { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_is_known_by_its_argument_until_it_is_told_to_end() {
        let argument = OsStr::new("600.0625");
        let mut child = Command::new("sleep").arg(argument).kill_on_drop(true).spawn().unwrap();
        let pid = child.id().unwrap();
        // The system shows no arguments while it still loads the program.
        let shown = async { while !has_argument(pid, argument).await {} };
        tokio::time::timeout(std::time::Duration::from_secs(10), shown).await.unwrap();
        assert!(!has_argument(pid, OsStr::new("601")).await);
        signal(pid, "TERM").await.unwrap();
        assert!(!child.wait().await.unwrap().success());
        assert!(!has_argument(pid, argument).await);
        signal(pid, "TERM").await.unwrap();
    }
}
