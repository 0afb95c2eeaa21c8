//! The client of the driver. The servers behind a `mongodb+srv` name may not be known at the start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use mongodb::Client;
use mongodb::event::EventHandler;
use mongodb::event::sdam::SdamEvent;
use mongodb::options::{ClientOptions, ConnectionString, WriteConcern};

use super::SELECTION_TIMEOUT;
use super::error::{MongoError, plain};
use crate::mongo::{MongoUrl, server as server_name};

/// Timeout of the DNS lookup behind `mongodb+srv`.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum interval between the checks of a server. With a longer one, the driver refuses to read from
/// secondaries that are at most 90 s behind.
const CHECK_EVERY_MAX: Duration = Duration::from_secs(80);
/// Maximum number of connections to each server, unless the URL sets it.
const CONNECTIONS_MAX: u32 = 32;
/// The application name on the servers, unless the URL sets it.
const APP_NAME: &str = "fairlane";

/// The last error of each unreachable server.
type Met = Arc<Mutex<BTreeMap<String, String>>>;

/// The client of the driver, as soon as its servers are known.
pub(super) struct Driver {
    pub(super) url: MongoUrl,
    /// When a write counts as done. The URL says it, and no name server.
    pub(super) concern: WriteConcern,
    /// Or the error of the last lookup.
    client: RwLock<Result<Client, MongoError>>,
    met: Met,
}

impl Driver {
    /// Creates the client, which connects on first use. If the lookup of a `mongodb+srv` name fails,
    /// [`Self::look_up`] repeats it.
    ///
    /// # Errors
    /// [`MongoError::Options`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub(super) async fn open(url: &MongoUrl) -> Result<Self, MongoError> {
        let parsed = ConnectionString::parse(url.expose());
        let concern = parsed.ok().and_then(|parsed| parsed.write_concern);
        let concern = concern.unwrap_or_else(WriteConcern::majority);
        let met = Met::default();
        match create(url, &concern, &met).await {
            Err(error) if !matches!(error, MongoError::Lookup { .. }) => Err(error),
            client => Ok(Self { url: url.clone(), concern, client: RwLock::new(client), met }),
        }
    }

    /// The client.
    ///
    /// # Errors
    /// That of the last lookup.
    pub(super) fn client(&self) -> Result<Client, MongoError> {
        self.client.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks up the servers, unless they are known. Takes at most 5 s.
    ///
    /// # Errors
    /// [`MongoError::Lookup`], or [`MongoError::Options`] if what was found contradicts the URL.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub(super) async fn look_up(&self) -> Result<(), MongoError> {
        if self.client().is_ok() {
            return Ok(());
        }
        // Boxed, since it is rarely needed.
        self.found(Box::pin(create(&self.url, &self.concern, &self.met)).await)
    }

    /// Keeps the result of a lookup, unless a concurrent one has succeeded.
    fn found(&self, found: Result<Client, MongoError>) -> Result<(), MongoError> {
        let mut client = self.client.write().unwrap_or_else(PoisonError::into_inner);
        if client.is_err() {
            *client = found;
        }
        match &*client {
            Ok(_) => Ok(()),
            Err(error) => Err(error.clone()),
        }
    }

    /// The last error of each unreachable server.
    pub(super) fn met(&self) -> Option<String> {
        let met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        let texts: Vec<_> = met.iter().map(|(server, what)| format!("{server}: {what}")).collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}

/// Creates the client, with a DNS lookup for `mongodb+srv`.
async fn create(url: &MongoUrl, concern: &WriteConcern, met: &Met) -> Result<Client, MongoError> {
    let parsing = ClientOptions::parse(url.expose());
    let parsed = tokio::time::timeout(LOOKUP_TIMEOUT, parsing).await.unwrap_or_else(|_| {
        let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
        Err(mongodb::error::Error::from(source))
    });
    let mut options = match parsed {
        Ok(options) => options,
        Err(source) => {
            let lookup = url.expose().starts_with("mongodb+srv:");
            let invalid =
                matches!(&*source.kind, mongodb::error::ErrorKind::InvalidArgument { .. });
            let (url, source) = (url.clone(), Box::new(source));
            return Err(if lookup && !invalid {
                MongoError::Lookup { url, source }
            } else {
                MongoError::Options { url, source }
            });
        }
    };
    options.app_name.get_or_insert_with(|| APP_NAME.to_owned());
    let at_most = |time: Option<Duration>| {
        Some(time.filter(|time| !time.is_zero()).unwrap_or(SELECTION_TIMEOUT))
            .map(|time| time.min(SELECTION_TIMEOUT))
    };
    options.server_selection_timeout = at_most(options.server_selection_timeout);
    options.connect_timeout = at_most(options.connect_timeout);
    options.heartbeat_freq = options.heartbeat_freq.map(|every| every.min(CHECK_EVERY_MAX));
    options.max_pool_size.get_or_insert(CONNECTIONS_MAX);
    options.write_concern = Some(concern.clone());
    options.sdam_event_handler = Some(remember(Arc::clone(met)));
    Client::with_options(options)
        .map_err(|source| MongoError::Options { url: url.clone(), source: Box::new(source) })
}

/// Shortens the driver's error about an unreachable deployment, which is a page long, to one line
/// per server.
fn remember(met: Met) -> EventHandler<SdamEvent> {
    EventHandler::callback(move |event| {
        let mut met = met.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            SdamEvent::ServerHeartbeatFailed(event) => {
                met.insert(server_name(&event.server_address), plain(&event.failure));
            }
            SdamEvent::ServerHeartbeatSucceeded(event) => {
                met.remove(&server_name(&event.server_address));
            }
            SdamEvent::ServerClosed(event) => drop(met.remove(&server_name(&event.address))),
            _ => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_lookup_is_the_error_of_every_command_until_one_succeeds() {
        let url = MongoUrl::parse("mongodb+srv://db.fairlane.invalid/?w=1&journal=true").unwrap();
        let driver = Driver::open(&url).await.unwrap();
        assert!(matches!(driver.client(), Err(MongoError::Lookup { .. })));
        // It is read from the URL.
        assert_eq!(driver.concern.journal, Some(true));
        let again = driver.look_up().await;
        assert!(matches!(again, Err(MongoError::Lookup { .. })), "{again:?}");

        let found = MongoUrl::parse("mongodb://127.0.0.1:1").unwrap();
        let found = Driver::open(&found).await.unwrap().client();
        driver.found(found).unwrap();
        driver.client().unwrap();
        // A lookup that was slower changes nothing.
        driver.found(Err(again.unwrap_err())).unwrap();
        driver.look_up().await.unwrap();
    }
}
