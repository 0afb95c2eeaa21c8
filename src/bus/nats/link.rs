//! The connection to NATS, and requests to `JetStream`.
//!
//! The client of NATS connects again by itself, and then sends what it still holds in a queue. What
//! it had already written to the lost connection is gone. So the end of a batch could be stored
//! without its beginning, and a repetition would then put the beginning behind the end. Therefore a
//! client is only used for one connection: when that breaks, all its calls fail at once, it sends
//! nothing more, and the next call makes another client. A call that gets no answer in time also
//! ends the use of its client.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::connection::State as ConnectionState;
use async_nats::jetstream::context::ContextBuilder;
use async_nats::jetstream::response::Response;
use async_nats::{
    Client, ConnectOptions, Event, ReconnectToServer, RequestErrorKind, ServerAddr, ServerError,
    jetstream,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout};

use super::settings::{NatsLogin, NatsSettings};
use super::tls;
use crate::bus::BusError;

/// Maximum wait for an answer.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Maximum time to connect to one server.
const CONNECT_WITHIN: Duration = Duration::from_millis(1_500);
/// Maximum wait for a connection, if several servers are tried.
const CONNECT_ALL_WITHIN: Duration = Duration::from_secs(3);
/// Calls in this time after a failure do not try again.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of pings on an idle connection. After two without an answer the connection is lost.
const PING_EVERY: Duration = Duration::from_secs(2);
/// Number of acknowledgements that may be awaited at once. So high that the client does not count.
const ACKS_MAX: usize = 1 << 20;
/// A server where nothing can answer. See [`Link::options`].
const NOWHERE: &str = "nats://127.0.0.1:0";
/// The name of the connection, for operators.
const NAME: &str = "fairlane";
const API: &str = "$JS.API";

/// An error of `JetStream`.
pub(super) type ApiError = jetstream::Error;

/// The servers of one source.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) settings: Arc<NatsSettings>,
    /// The kind and the addresses, for errors.
    bus: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    connected: Option<Connected>,
    failed: Option<(Instant, BusError)>,
    /// Servers that another one named.
    discovered: Vec<String>,
    /// The server to begin with.
    next: usize,
}

/// One connection.
#[derive(Debug, Clone)]
pub(super) struct Connected {
    pub(super) client: Client,
    pub(super) context: jetstream::Context,
    bus: Arc<str>,
    /// The last action that the server did not permit. It sends no other answer to that.
    denied: watch::Receiver<String>,
    /// Whether a call got no answer.
    broken: Arc<AtomicBool>,
}

impl Link {
    pub(super) fn new(settings: Arc<NatsSettings>) -> Self {
        let bus = format!("NATS ({})", settings.servers.join(","));
        let next = rand::random::<u16>().into();
        Self { settings, bus, state: Mutex::new(State { next, ..State::default() }) }
    }

    pub(super) fn refused(&self, cause: impl Display) -> BusError {
        BusError::Refused { bus: self.bus.clone(), cause: cause.to_string() }
    }

    pub(super) fn unknown(&self, cause: impl Display) -> BusError {
        BusError::Unknown { bus: self.bus.clone(), cause: cause.to_string() }
    }

    pub(super) fn partly(&self, cause: impl Display) -> BusError {
        BusError::Partly { bus: self.bus.clone(), cause: cause.to_string() }
    }

    pub(super) fn away(&self, cause: impl Display) -> BusError {
        BusError::Connect { bus: self.bus.clone(), cause: cause.to_string() }
    }

    /// The connection; makes one if there is none.
    pub(super) async fn connected(&self) -> Result<Connected, BusError> {
        let connecting = async {
            let mut state = self.state.lock().await;
            if let Some(connected) = state.connected.take_if(|connected| !connected.is_alive()) {
                drop(connected);
            }
            if let Some(connected) = &state.connected {
                return Ok(connected.clone());
            }
            if let Some((at, error)) = &state.failed
                && at.elapsed() < CONNECT_PAUSE
            {
                return Err(error.clone());
            }
            let made = self.connect(&mut state).await;
            state.failed = made.as_ref().err().map(|error| (Instant::now(), error.clone()));
            state.connected = made.as_ref().ok().cloned();
            made
        };
        let late = |_| self.away("no server answered in time");
        timeout(CONNECT_ALL_WITHIN, connecting).await.map_err(late)?
    }

    async fn connect(&self, state: &mut State) -> Result<Connected, BusError> {
        let configured = self.settings.servers.len();
        let mut order: Vec<String> = self.settings.servers.clone();
        order.rotate_left(state.next % configured.max(1));
        order.extend(state.discovered.iter().cloned());
        let mut problem = "no server is configured".to_owned();
        for server in &order {
            // The next call begins with another one, even if this one ends in the middle.
            state.next = state.next.wrapping_add(1);
            match self.connect_to(server).await {
                Ok(connected) => {
                    state.next = state.next.wrapping_sub(1);
                    state.discovered = self.discovered(&connected);
                    return Ok(connected);
                }
                Err(error) => problem = error,
            }
        }
        Err(self.away(problem))
    }

    fn discovered(&self, connected: &Connected) -> Vec<String> {
        let tls = self.settings.servers.iter().any(|server| server.starts_with("tls://"));
        let scheme = if tls { "tls" } else { "nats" };
        let named = connected.client.server_info().connect_urls;
        let urls = named.into_iter().map(|address| format!("{scheme}://{address}"));
        urls.filter(|url| !self.settings.servers.contains(url)).collect()
    }

    async fn connect_to(&self, server: &str) -> Result<Connected, String> {
        let (deny, denied) = watch::channel(String::new());
        let options = self.options(server, deny).await?;
        let connecting = options.connect(vec![server, NOWHERE]);
        let client = match timeout(CONNECT_WITHIN, connecting).await {
            Ok(Ok(client)) => client,
            Ok(Err(error)) => return Err(format!("{server}: {}", chain(&error))),
            Err(_) => return Err(format!("{server}: no answer in time")),
        };
        let context = ContextBuilder::new()
            .timeout(ANSWER_WITHIN)
            .max_ack_inflight(ACKS_MAX)
            .backpressure_on_inflight(false)
            .build(client.clone());
        let (bus, broken) = (self.bus.as_str().into(), Arc::default());
        Ok(Connected { client, context, bus, denied, broken })
    }

    /// Connects to `server` once. The client cannot be told to stay disconnected, so it may then
    /// only try [`NOWHERE`].
    async fn options(
        &self,
        server: &str,
        deny: watch::Sender<String>,
    ) -> Result<ConnectOptions, String> {
        let settings = &self.settings;
        let address =
            |url: &str| url.parse::<ServerAddr>().map_err(|error| format!("{url}: {error}"));
        let (server, nowhere) = (address(server)?, address(NOWHERE)?);
        let was_tried = Arc::new(AtomicBool::new(false));
        let tls_required = server.tls_required();
        let mut options = ConnectOptions::new()
            .name(NAME)
            .connection_timeout(CONNECT_WITHIN)
            .request_timeout(Some(ANSWER_WITHIN))
            .ping_interval(PING_EVERY)
            .ignore_discovered_servers()
            .max_reconnects(1)
            .reconnect_to_server_callback(move |_, _| {
                let tried = was_tried.swap(true, Ordering::Relaxed);
                let addr = if tried { nowhere.clone() } else { server.clone() };
                async move { Some(ReconnectToServer { addr, delay: Some(Duration::ZERO) }) }
            })
            .event_callback(move |event| {
                if let Event::ServerError(ServerError::Other(error)) = event
                    && error.to_lowercase().contains("permissions violation")
                {
                    deny.send_replace(error);
                }
                std::future::ready(())
            });
        if let Some(config) = tls::config(settings, tls_required).await? {
            options = options.tls_client_config(config);
        }
        Ok(match &settings.login {
            NatsLogin::None => options,
            NatsLogin::User { user, password } => {
                options.user_and_password(user.clone(), password.clone())
            }
            NatsLogin::Token(token) => options.token(token.clone()),
            NatsLogin::Nkey(seed) => options.nkey(seed.clone()),
            NatsLogin::Credentials(file) => options
                .credentials_file(file)
                .await
                .map_err(|error| format!("the file {}: {error}", file.display()))?,
        })
    }
}

impl Connected {
    pub(super) fn is_alive(&self) -> bool {
        let state = self.client.connection_state();
        state == ConnectionState::Connected && !self.broken.load(Ordering::Relaxed)
    }

    /// The call got no answer: other calls must not wait for this connection too.
    pub(super) fn no_answer(&self, cause: impl Display) -> BusError {
        self.broken.store(true, Ordering::Relaxed);
        BusError::Unknown { bus: self.bus.to_string(), cause: cause.to_string() }
    }

    fn away(&self, cause: impl Display) -> BusError {
        BusError::Connect { bus: self.bus.to_string(), cause: cause.to_string() }
    }

    fn refused(&self, cause: impl Display) -> BusError {
        BusError::Refused { bus: self.bus.to_string(), cause: cause.to_string() }
    }

    /// Sends a request to the API of `JetStream`. The inner error is the answer of the server.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        name: &str,
        body: &impl Serialize,
    ) -> Result<Result<T, ApiError>, BusError> {
        let subject = format!("{API}.{name}");
        let body = serde_json::to_vec(body).map_err(|error| self.refused(error))?;
        let answer = self.client.request(subject.clone(), body.into());
        let answer = tokio::select! {
            biased;
            answer = answer => answer,
            error = self.denial(&subject) => return Err(error),
        };
        let answer = answer.map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => {
                self.away("JetStream is not available: it is off for this account, or starting")
            }
            RequestErrorKind::TimedOut | RequestErrorKind::Other => self.no_answer(chain(&error)),
            _ => self.refused(chain(&error)),
        })?;
        match serde_json::from_slice::<Response<T>>(&answer.payload) {
            Ok(Response::Ok(answer)) => Ok(Ok(answer)),
            // A cluster without a leader, or one that is starting.
            Ok(Response::Err { error }) if error.code() == 503 => Err(self.away(error)),
            Ok(Response::Err { error }) => Ok(Err(error)),
            Err(error) => {
                Err(self.refused(format!("the answer to {name} cannot be read: {error}")))
            }
        }
    }

    /// [`Self::ask`], for requests that are not expected to be refused.
    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        name: &str,
        body: &impl Serialize,
    ) -> Result<T, BusError> {
        self.ask(name, body).await?.map_err(|error| self.refused(format!("{name}: {error}")))
    }

    /// [`Self::no_answer`] to the request `name`, or that the server did not permit it.
    pub(super) fn silent(&self, name: &str) -> BusError {
        let said = self.denied.borrow().clone();
        if said.contains(&format!("\"{API}.{name}\"")) {
            return self.refused(said);
        }
        self.no_answer("no answer in time")
    }

    /// Waits until the server says that it does not permit a message to `subject`.
    pub(super) async fn denial(&self, subject: &str) -> BusError {
        let mut denied = self.denied.clone();
        let quoted = format!("\"{subject}\"");
        // Only what comes from now on.
        denied.borrow_and_update();
        loop {
            if denied.changed().await.is_err() {
                // The connection is gone; the call itself tells so.
                std::future::pending::<()>().await;
            }
            let said = denied.borrow_and_update().clone();
            if said.contains(&quoted) {
                return self.refused(said);
            }
        }
    }

    /// Sends a request whose answer goes to `reply`, or does not matter.
    pub(super) async fn send(
        &self,
        name: &str,
        reply: Option<&str>,
        body: &impl Serialize,
    ) -> Result<(), BusError> {
        let subject = format!("{API}.{name}");
        let body = serde_json::to_vec(body).map_err(|error| self.refused(error))?;
        let sending = async {
            match reply {
                Some(reply) => {
                    self.client.publish_with_reply(subject, reply.to_owned(), body.into()).await
                }
                None => self.client.publish(subject, body.into()).await,
            }
        };
        match timeout(ANSWER_WITHIN, sending).await {
            Ok(sent) => sent.map_err(|error| self.no_answer(chain(&error))),
            Err(_) => Err(self.no_answer("the server takes no more requests")),
        }
    }
}

/// An error with its causes, each once.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
