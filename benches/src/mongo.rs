//! A separate database for a bench, on the chosen deployment or on a private server.

use std::path::{Path, PathBuf};

use fairlane::automations::subscribers::SUBSCRIBERS;
use fairlane::config::MongoUrl;
use fairlane::mongo::client::Mongo;
use fairlane::mongo::private::PrivateMongo;
use fairlane::sandbox::{Interrupt, Rig};
use mongodb::Client;
use mongodb::bson::Document;
use mongodb::options::ClientOptions;

use crate::error::BenchError;

/// The MongoDB of a bench.
#[derive(Debug, Clone)]
pub(crate) enum Choice {
    /// The deployment at this address.
    Url(MongoUrl),
    /// A private one, started with this program or `mongod`.
    Private(Option<PathBuf>),
}

/// A database that is dropped at the end, together with its server if that is private.
#[derive(Debug)]
pub(crate) struct Database {
    pub(crate) url: MongoUrl,
    pub(crate) name: String,
    client: Client,
    private: Option<PrivateMongo>,
}

impl Database {
    /// Returns once the server answers. The files of a private server are under `directory`.
    pub(crate) async fn open(choice: &Choice, directory: &Path) -> Result<Self, BenchError> {
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
        // The errors of this client contain remedies. Those of the driver do not.
        let asked = Mongo::open(&url, &name).await?;
        asked.ping().await?;
        asked.close().await;
        let options = ClientOptions::parse(url.expose()).await.map_err(BenchError::Documents)?;
        let client = Client::with_options(options).map_err(BenchError::Documents)?;
        Ok(Self { url, name, client, private })
    }

    pub(crate) fn documents(&self) -> mongodb::Database {
        self.client.database(&self.name)
    }

    /// Removes the profiles, so that all events are evaluated again.
    pub(crate) async fn forget_profiles(&self) -> Result<(), BenchError> {
        let profiles = self.documents().collection::<Document>(SUBSCRIBERS);
        profiles.drop().await.map_err(BenchError::Documents)
    }

    /// The process of a private server.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.private.as_ref().map(PrivateMongo::pid)
    }

    pub(crate) async fn close(mut self) -> Result<(), BenchError> {
        let dropped = self.documents().drop().await.map_err(BenchError::Documents);
        if let Some(private) = self.private.take() {
            private.stop().await?;
        }
        dropped
    }
}

/// Runs `work` on a new Redis and a new database of the chosen MongoDB. Then removes both, also
/// after an error, Ctrl-C, SIGTERM or SIGHUP.
pub(crate) async fn with_database<T>(
    choice: &Choice,
    work: impl AsyncFnOnce(&Rig, &Database) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let mut interrupt = Interrupt::listen()?;
    let rig = interrupt.or(Box::pin(Rig::start())).await?;
    let database = match Database::open(choice, rig.directory()).await {
        Ok(database) => database,
        Err(error) => return rig.remove().map_err(BenchError::from).and(Err(error)),
    };
    let result = interrupt.or(work(&rig, &database)).await;
    // The components that `work` started have ended, so this is the last user of the servers.
    let dropped = database.close().await;
    let removed = rig.remove();
    let value = result?;
    removed?;
    dropped?;
    Ok(value)
}

impl Drop for Database {
    /// Acts only if the database was not closed, such as after a panic: the server must not remain.
    fn drop(&mut self) {
        if let Some(private) = self.private.take() {
            let _ = std::process::Command::new("kill").arg(private.pid().to_string()).status();
        }
    }
}
