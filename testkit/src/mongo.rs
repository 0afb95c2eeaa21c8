//! A real server of the MongoDB wire protocol for one test. `.ci/setup test` installs it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::directory::Directory;
use super::mongo_proxy;
use super::process::{installed, signal};
pub use super::redis::free_port;
use super::wait::{eventually, holds_within};
use mongodb::bson::doc;

/// The collections of Fairlane.
const COLLECTIONS: [&str; 5] =
    ["automations", "counters_daily", "fairlane_formats", "subscribers", "counters_totals"];
/// The collections of the counters, and the number of their indexes.
const INDEXED: [(&str, usize); 2] = [("counters_totals", 2), ("counters_daily", 3)];
/// On a machine that is busy with much else, this server needs long.
const START_WITHIN: Duration = Duration::from_secs(120);

/// The options of a [`MongoServer`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Accepts only known users.
    pub auth: bool,
    /// Describes itself as a single server instead of a replica set of one.
    pub standalone: bool,
}

/// Runs until it is dropped, and then leaves no process behind, and no file unless told so.
#[derive(Debug)]
pub struct MongoServer {
    directory: Directory,
    options: Options,
    port: u16,
    child: Option<Child>,
}

impl MongoServer {
    /// Starts a server and returns once it listens.
    pub fn start(options: Options) -> Self {
        Self::start_in(Directory::temporary(), options)
    }

    /// The same with the data of this directory.
    pub fn start_in(directory: Directory, options: Options) -> Self {
        let mut server = Self { directory, options, port: 0, child: None };
        // Another process may take the port before the server does.
        for _ in 0..5 {
            server.port = free_port();
            if server.launch() {
                if server.create_collections() {
                    return server;
                }
                server.kill9();
            }
        }
        panic!("no MongoDB server started in five tries:\n{}", server.output());
    }

    /// The URL without credentials.
    pub fn url(&self) -> String {
        format!("mongodb://{}", self.address())
    }

    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Waits until the collections of the counters have their indexes. This server does not start
    /// again if it is killed while it creates them.
    pub async fn is_prepared(&self) {
        let client = mongodb::Client::with_uri_str(self.url()).await.unwrap();
        let database = client.database("fairlane");
        for (name, indexes) in INDEXED {
            let collection = database.collection::<mongodb::bson::Document>(name);
            eventually(START_WITHIN, "the indexes are there", async || {
                collection.list_index_names().await.is_ok_and(|names| names.len() >= indexes)
            })
            .await;
        }
        client.shutdown().await;
    }

    /// The names of Fairlane's collections.
    pub async fn collections(&self) -> BTreeSet<String> {
        let client = mongodb::Client::with_uri_str(self.url()).await.unwrap();
        let names = client.database("fairlane").list_collection_names().await.unwrap();
        client.shutdown().await;
        names.into_iter().collect()
    }

    /// Kills the process, so that it cannot clean up.
    pub fn kill9(&mut self) {
        let mut child = self.child.take().expect("the server runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn sigstop(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "STOP");
    }

    pub fn sigcont(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "CONT");
    }

    /// Restarts on the same data and port, and kills the server first if it still runs.
    pub fn restart(&mut self, options: Options) {
        if self.child.is_some() {
            self.kill9();
        }
        self.options = options;
        assert!(self.launch(), "MongoDB did not restart:\n{}", self.output());
    }

    /// Starts the process. Returns whether it listens.
    fn launch(&mut self) -> bool {
        let program = program();
        let log = File::create(self.directory.path().join("log")).unwrap();
        let mut command = Command::new(&program);
        command
            .current_dir(self.directory.path())
            .args(["--host", "127.0.0.1", "--port", &self.port.to_string(), "--sync-on-commit"])
            .arg("--storage-path")
            .arg(self.directory.path().join("data"))
            .args(["--cache-size", "64M"]);
        if self.options.auth {
            command.arg("--auth");
        }
        if self.options.standalone {
            command.arg("--standalone");
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let child = self.child.insert(child);
        let mut ended = false;
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, self.port).into();
        let listens = holds_within(START_WITHIN, || {
            ended = child.try_wait().unwrap().is_some();
            ended || TcpStream::connect(address).is_ok()
        });
        if ended || !listens {
            self.kill9();
            return false;
        }
        true
    }

    /// Creates the collections one after the other. In one of ten servers, concurrent first
    /// commands on several new collections wait for each other forever, and so do all later
    /// commands.
    ///
    /// Returns whether it succeeded. If another server took the port, this server has ended.
    fn create_collections(&mut self) -> bool {
        if self.options.auth {
            return true; // No user has rights yet.
        }
        // A server that has just started to listen may close its first connections. A collection
        // that already exists is refused, which is fine.
        let mut created = false;
        let done = holds_within(START_WITHIN, || {
            let ended = |child: &mut Child| child.try_wait().unwrap().is_some();
            if self.child.as_mut().is_none_or(ended) {
                return true;
            }
            created = self.try_create_collections().is_ok();
            created
        });
        assert!(done, "collections cannot be created:\n{}", self.output());
        created && self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    fn try_create_collections(&self) -> io::Result<()> {
        let mut stream = TcpStream::connect(self.address())?;
        stream.set_read_timeout(Some(START_WITHIN))?;
        for (number, collection) in (1..).zip(COLLECTIONS) {
            let command = doc! { "create": collection, "$db": "fairlane" };
            stream.write_all(&mongo_proxy::message(number, &command))?;
            let mut length = [0; 4];
            stream.read_exact(&mut length)?;
            let mut answer = vec![0; u32::from_le_bytes(length) as usize - length.len()];
            stream.read_exact(&mut answer)?;
        }
        Ok(())
    }

    fn output(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for MongoServer {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
    }
}

/// The path at which `.ci/setup test` installs it: in the target directory, where this program is
/// too.
pub fn program() -> PathBuf {
    installed("mongodb/bin/secantusd-py")
}
