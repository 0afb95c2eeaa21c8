//! A real `nats-server` with `JetStream` for one test. It can be killed and frozen. `.ci/setup test`
//! installs it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_nats::ConnectOptions;
use serde::Deserialize;
use tempfile::TempDir;

use super::papers::Papers;
use super::redis::free_port;
use fairlane_testkit::directory::temporary;
use fairlane_testkit::process::{installed, signal};

pub(crate) const USER: &str = "fairlane";
pub(crate) const PASSWORD: &str = "only for tests";
pub(crate) const TOKEN: &str = "only-for-tests";

/// An operator with two accounts, and a user of one of them. They never expire. Nothing but tests
/// knows them, so their seed may be in the repository.
const IDENTITIES: &str = include_str!("../fixtures/nats-identities.json");

#[derive(Deserialize)]
struct Identities {
    operator: String,
    account: String,
    account_jwt: String,
    system: String,
    system_jwt: String,
    user: String,
    user_seed: String,
    user_jwt: String,
}

impl Identities {
    fn read() -> Self {
        serde_json::from_str(IDENTITIES).unwrap()
    }

    /// The content of a credentials file.
    fn credentials(&self) -> String {
        let Self { user_jwt, user_seed, .. } = self;
        format!(
            "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
        )
    }
}

/// The options of a [`NatsServer`].
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub(crate) access: Access,
    pub(crate) tls: Tls,
    /// The bytes that streams may take on the disk. Zero means no bound.
    pub(crate) max_file_store: u64,
    /// Writes each message to the disk before it is acknowledged. Otherwise the file is synced after
    /// two minutes. A killed process loses nothing in either case, because the system writes the
    /// rest.
    pub(crate) sync_always: bool,
    /// Further lines of the configuration, such as `max_payload: 1K`.
    pub(crate) more: String,
}

/// How a client shows that it may connect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Access {
    #[default]
    Open,
    /// [`USER`] and [`PASSWORD`].
    User,
    /// [`TOKEN`].
    Token,
    /// The seed [`NatsServer::nkey_seed`].
    Nkey,
    /// The file [`NatsServer::creds_file`].
    Creds,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Tls {
    #[default]
    Off,
    /// With the certificate of [`NatsServer::papers`].
    On,
    /// Also requires a certificate of the client. The one of [`NatsServer::papers`] is good.
    Mutual,
}

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(crate) struct NatsServer {
    directory: TempDir,
    options: Options,
    papers: Papers,
    port: u16,
    child: Option<Child>,
}

impl NatsServer {
    /// Starts a server and returns once it answers.
    pub(crate) fn start(options: Options) -> Self {
        let directory = temporary();
        let papers = Papers::new();
        let mut server = Self { directory, options, papers, port: 0, child: None };
        // Another process may take the port before the server does.
        for _ in 0..10 {
            server.port = free_port();
            match server.launch() {
                Ok(child) => {
                    server.child = Some(child);
                    return server;
                }
                Err(output) if output.contains("address already in use") => {}
                Err(output) => panic!("nats-server did not start:\n{output}"),
            }
        }
        panic!("no free port in ten tries");
    }

    /// The URL without credentials, `tls://…` if it is encrypted. It stays the same after a restart.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.options.tls == Tls::Off { "nats" } else { "tls" };
        format!("{scheme}://{}", self.address())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The certificates that server and clients use if TLS is on.
    pub(crate) fn papers(&self) -> &Papers {
        &self.papers
    }

    /// The seed of the user of [`Access::Nkey`].
    pub(crate) fn nkey_seed() -> String {
        Identities::read().user_seed
    }

    /// The credentials of the user of [`Access::Creds`].
    pub(crate) fn creds_file(&self) -> PathBuf {
        let file = self.directory.path().join("user.creds");
        fs::write(&file, Identities::read().credentials()).unwrap();
        file
    }

    /// A connection with everything that the server requires, and with long timeouts, because the
    /// test may keep the machine busy. It connects again after a restart.
    pub(crate) async fn client(&self) -> async_nats::Client {
        let long = Duration::from_secs(60);
        let mut options =
            ConnectOptions::new().connection_timeout(long).request_timeout(Some(long));
        options = match self.options.access {
            Access::Open => options,
            Access::User => options.user_and_password(USER.to_owned(), PASSWORD.to_owned()),
            Access::Token => options.token(TOKEN.to_owned()),
            Access::Nkey => options.nkey(Self::nkey_seed()),
            Access::Creds => options.credentials_file(self.creds_file()).await.unwrap(),
        };
        if self.options.tls != Tls::Off {
            options = options.add_root_certificates(self.papers.path("ca"));
        }
        if self.options.tls == Tls::Mutual {
            options =
                options.add_client_certificate(self.papers.path("cert"), self.papers.path("key"));
        }
        options.connect(self.url()).await.unwrap()
    }

    /// [`JetStream`](async_nats::jetstream) of this server, with the timeouts of
    /// [`client`](Self::client).
    pub(crate) async fn jetstream(&self) -> async_nats::jetstream::Context {
        let mut context = async_nats::jetstream::new(self.client().await);
        context.set_timeout(Duration::from_secs(60));
        context
    }

    /// Kills the process, so that it cannot clean up.
    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().expect("the server runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn sigstop(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "STOP");
    }

    pub(crate) fn sigcont(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "CONT");
    }

    /// Restarts on the same directory and port, and kills the server first if it still runs.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
        let child = self.launch();
        self.child =
            Some(child.unwrap_or_else(|output| panic!("nats-server did not restart:\n{output}")));
    }

    /// Deletes all streams while the server is down.
    pub(crate) fn lose_everything(&self) {
        assert!(self.child.is_none(), "kill the server first");
        fs::remove_dir_all(self.store()).unwrap();
    }

    /// Where streams are stored.
    pub(crate) fn store(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    fn configuration(&self) -> String {
        let Options { access, tls, max_file_store, sync_always, more } = &self.options;
        let access = match access {
            Access::Open => String::new(),
            Access::User => {
                format!("authorization {{ user: \"{USER}\", password: \"{PASSWORD}\" }}")
            }
            Access::Token => format!("authorization {{ token: \"{TOKEN}\" }}"),
            Access::Nkey => {
                format!("authorization {{ users: [ {{ nkey: {} }} ] }}", Identities::read().user)
            }
            Access::Creds => {
                let Identities { operator, account, account_jwt, system, system_jwt, .. } =
                    Identities::read();
                format!(
                    "operator: {operator}\nresolver: MEMORY\nsystem_account: {system}\n\
                     resolver_preload {{ {account}: {account_jwt}, {system}: {system_jwt} }}"
                )
            }
        };
        let file = |name| self.papers.file(name);
        let tls = match tls {
            Tls::Off => String::new(),
            Tls::On | Tls::Mutual => format!(
                "tls {{ cert_file: {}, key_file: {}, ca_file: {}, verify: {}, timeout: 30 }}",
                file("cert"),
                file("key"),
                file("ca"),
                *tls == Tls::Mutual,
            ),
        };
        let store = self.store().display().to_string();
        let bound = match max_file_store {
            0 => String::new(),
            bytes => format!(", max_file_store: {bytes}"),
        };
        let sync = if *sync_always { ", sync_interval: always" } else { "" };
        let port = self.port;
        format!(
            "host: \"127.0.0.1\"\nport: {port}\nserver_name: test\n\
             jetstream {{ store_dir: \"{store}\"{bound}{sync} }}\n{access}\n{tls}\n{more}\n"
        )
    }

    /// The running server, or its output if it ended.
    fn launch(&self) -> Result<Child, String> {
        let file = self.directory.path().join("server.conf");
        fs::write(&file, self.configuration()).unwrap();
        let mut child = Command::new(installed("buses/bin/nats-server"))
            .current_dir(self.directory.path())
            .arg("--config")
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut output = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if line.ends_with("Server is ready") {
                // A full pipe would block the server. The thread ends with it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(child);
            }
            output.push_str(&line);
            output.push('\n');
        }
        child.wait().unwrap();
        Err(output)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_server_leaves_nothing() {
        let server = NatsServer::start(Options::default());
        let (path, id) = (server.directory.path().to_owned(), server.child.as_ref().unwrap().id());
        drop(server);
        assert!(!path.exists());
        assert!(!PathBuf::from(format!("/proc/{id}")).exists());
    }
}
