//! A real nginx or HAProxy for one test, with the recipes of `docs/edge.md`. `.ci/setup test`
//! installs both.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpStream;

use super::http::Client;
use super::redis::free_port;
use super::wait::eventually;

const START: Duration = Duration::from_secs(20);
const MISSING: &str = "run `bash .ci/setup test`, or `make test`, which does";

/// The rest of an nginx configuration. It runs as one process, because a killed master leaves its
/// workers behind. It writes into its own directory.
const NGINX: &str = "\
daemon off;
master_process off;
pid nginx.pid;
events {}
http {
access_log off;
client_body_temp_path body;
proxy_temp_path proxy;
fastcgi_temp_path fastcgi;
uwsgi_temp_path uwsgi;
scgi_temp_path scgi;
";

/// A block of `docs/edge.md`, found by its first line.
pub(crate) fn recipe(title: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/edge.md");
    let page = fs::read_to_string(page).unwrap();
    let block = page.split_once(&format!("```text\n# {title}\n"));
    let (_, block) = block.unwrap_or_else(|| panic!("docs/edge.md has no block {title:?}"));
    let (block, _) = block.split_once("```").expect("the block ends");
    block.to_owned()
}

/// Replaces a part of a text. The part must occur exactly once.
pub(crate) fn replaced(text: &str, part: &str, other: &str) -> String {
    assert_eq!(text.matches(part).count(), 1, "{part:?} must occur once in\n{text}");
    text.replace(part, other)
}

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(crate) struct Balancer {
    child: Child,
    directory: TempDir,
    address: String,
}

impl Balancer {
    /// Starts nginx with this text in its `http` block. It listens on a free port instead of port
    /// 80.
    pub(crate) async fn nginx(http: &str) -> Self {
        let arguments = ["-e", "stderr", "-p", ".", "-c", "configuration"];
        let configuration = |address: &str| {
            let http = replaced(http, "listen 80;", &format!("listen {address};"));
            format!("{NGINX}{http}}}\n")
        };
        Self::start("nginx", &arguments, configuration).await
    }

    /// Starts HAProxy with this configuration. It listens on a free port instead of port 80.
    pub(crate) async fn haproxy(configuration: &str) -> Self {
        let configuration =
            |address: &str| replaced(configuration, "bind :80", &format!("bind {address}"));
        Self::start("haproxy", &["-db", "-f", "configuration"], configuration).await
    }

    async fn start(
        program: &str,
        arguments: &[&str],
        configuration: impl Fn(&str) -> String,
    ) -> Self {
        let mut output = String::new();
        // Another process may take the port first.
        for _ in 0..5 {
            let directory = tempfile::tempdir().unwrap();
            let address = format!("127.0.0.1:{}", free_port());
            fs::write(directory.path().join("configuration"), configuration(&address)).unwrap();
            let child = spawn(program, arguments, directory.path());
            let mut started = Self { child, directory, address };
            let mut ended = false;
            eventually(START, "the balancer listens", async || {
                ended = started.child.try_wait().unwrap().is_some();
                ended || TcpStream::connect(&started.address).await.is_ok()
            })
            .await;
            if !ended {
                return started;
            }
            output = started.log();
        }
        panic!("{program} does not start:\n{output}");
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.address)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        // Both calls fail harmlessly if the process ended and was waited for before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(program: &str, arguments: &[&str], directory: &Path) -> Child {
    let log = File::create(directory.join("log")).unwrap();
    // Debian installs both in a directory that only the shell of the administrator searches.
    let places = [program.to_owned(), format!("/usr/sbin/{program}")];
    let child = places.iter().find_map(|place| {
        let mut command = Command::new(place);
        command.current_dir(directory).args(arguments).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log.try_clone().unwrap());
        command.spawn().ok()
    });
    child.unwrap_or_else(|| panic!("{program} is missing: {MISSING}"))
}
