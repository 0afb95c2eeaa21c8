//! A separate database for a bench: on the named deployment, or on a private one.

use std::path::{Path, PathBuf};

use mongodb::Client;
use mongodb::options::ClientOptions;

use super::BenchError;
use crate::config::MongoUrl;
use crate::store::mongo::Mongo;
use crate::store::private::PrivateMongo;

/// The MongoDB of a bench.
#[derive(Debug, Clone)]
pub enum Choice {
    /// The deployment at this address.
    Url(MongoUrl),
    /// A private one, started with this program or `mongod`.
    Private(Option<PathBuf>),
}

/// A database that is dropped at the end, together with its server if that is private.
#[derive(Debug)]
pub(super) struct Database {
    pub(super) url: MongoUrl,
    pub(super) name: String,
    client: Client,
    private: Option<PrivateMongo>,
}

impl Database {
    /// Returns once the server answers. The files of a private one are under `directory`.
    pub(super) async fn open(choice: &Choice, directory: &Path) -> Result<Self, BenchError> {
        let private = match choice {
            Choice::Url(_) => None,
            Choice::Private(program) => {
                Some(PrivateMongo::start(directory, program.as_deref()).await?)
            }
        };
        let url = match (choice, &private) {
            (Choice::Url(url), _) => url.clone(),
            (_, Some(private)) => private.url().clone(),
            (Choice::Private(_), None) => unreachable!("it was just started"),
        };
        let name = format!("fairlane-bench-{}", uuid::Uuid::now_v7().simple());
        // Its errors contain remedies; those of the driver do not.
        let asked = Mongo::open(&url, &name).await?;
        asked.ping().await?;
        asked.close().await;
        let options = ClientOptions::parse(url.expose()).await.map_err(BenchError::Documents)?;
        let client = Client::with_options(options).map_err(BenchError::Documents)?;
        Ok(Self { url, name, client, private })
    }

    pub(super) fn documents(&self) -> mongodb::Database {
        self.client.database(&self.name)
    }

    /// The process of a private server.
    pub(super) fn pid(&self) -> Option<u32> {
        self.private.as_ref().map(PrivateMongo::pid)
    }

    pub(super) async fn close(mut self) -> Result<(), BenchError> {
        let dropped = self.documents().drop().await.map_err(BenchError::Documents);
        if let Some(private) = self.private.take() {
            private.stop().await?;
        }
        dropped
    }
}

impl Drop for Database {
    /// Runs only after a panic: the server must not remain.
    fn drop(&mut self) {
        if let Some(private) = self.private.take() {
            let _ = std::process::Command::new("kill").arg(private.pid().to_string()).status();
        }
    }
}
