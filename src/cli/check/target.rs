//! The targets of push pipelines: does the name resolve, does a server listen, does TLS succeed?
//!
//! The connection uses the same client as real pushes, and is dropped once it is established:
//! nothing is sent.

use std::error::Error as StdError;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use reqwest::redirect;
use tower::util::MapResultLayer;
use url::Url;

use super::configuration::targets;
use super::{Exit, Finding};
use crate::config::Config;
use crate::id::PipelineName;
use crate::outbound::resolve::System;
use crate::outbound::{CONNECT_TIMEOUT, CheckedUrl};

/// Number of targets that are probed concurrently.
const AT_ONCE: usize = 8;
/// Maximum number of addresses of a name to show.
const SHOWN: usize = 3;

type BoxError = Box<dyn StdError + Send + Sync>;

/// The connection is established. Returned as an error so that the client sends nothing.
#[derive(Debug, thiserror::Error)]
#[error("connected")]
struct Connected;

/// Probes the target of every push pipeline.
pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let name_servers = config.callbacks.name_servers.clone().into();
    let names = System::new(&name_servers, CONNECT_TIMEOUT).map(Arc::new);
    let names = names.map_err(|error| error.to_string());
    let targets = targets(config).map(|(pipeline, url)| check_target(pipeline, url, &names));
    stream::iter(targets).buffered(AT_ONCE).collect().await
}

async fn check_target(
    pipeline: &PipelineName,
    url: &CheckedUrl,
    names: &Result<Arc<System>, String>,
) -> Finding {
    let check = format!("target of {pipeline}");
    let away = |found: String, remedy: &str| {
        let why = "the pipeline's bots wait until it can be reached";
        let remedy = format!("{remedy}, or correct pipelines.{pipeline}.url");
        Finding::fail(check.clone(), found, why, remedy).exits(Exit::Unavailable)
    };
    let (host, port) = (url.host().trim_matches(['[', ']']), url.port());
    let found = async {
        let names = names.as_ref().map_err(Clone::clone)?;
        let addresses = names.look_up(host).await.map_err(|error| error.to_string())?;
        Ok::<_, String>((names, addresses))
    };
    let (names, addresses) = match found.await {
        Ok(found) => found,
        Err(problem) => {
            return away(format!("{host}: {problem}"), "check the name server");
        }
    };
    let shown = show(host, &addresses);
    let url = url.expose();
    match connect(url, names).await {
        Ok(()) if url.scheme() == "https" => {
            Finding::ok(check, format!("{shown} port {port} answers, with TLS"))
        }
        Ok(()) => Finding::ok(check, format!("{shown} port {port} answers")),
        Err(problem) => away(format!("{shown} port {port}: {problem}"), remedy(&problem)),
    }
}

/// What helps if no connection is made.
fn remedy(problem: &str) -> &'static str {
    if problem.contains("UnknownIssuer") {
        "add its CA to the certificates of this machine (in a container: name a file with all CAs in SSL_CERT_FILE), and restart"
    } else if problem.contains("invalid peer certificate") {
        "give the receiver a valid certificate for this name"
    } else {
        "start the receiver"
    }
}

/// The name and its addresses. A name that is itself an address is shown once.
fn show(host: &str, addresses: &[SocketAddr]) -> String {
    let mut texts: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    texts.dedup();
    if texts == [host] {
        return host.to_owned();
    }
    let more = if texts.len() > SHOWN { ", …" } else { "" };
    texts.truncate(SHOWN);
    format!("{host} ({}{more})", texts.join(", "))
}

async fn connect(url: &Url, names: &Arc<System>) -> Result<(), String> {
    // Only the first call in a process installs the provider; any provider will do.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder()
        .redirect(redirect::Policy::none())
        .no_proxy()
        .dns_resolver(Arc::clone(names))
        .connect_timeout(CONNECT_TIMEOUT)
        .connector_layer(MapResultLayer::new(stop))
        .build()
        .map_err(|error| innermost(&error))?;
    // Twice the timeout, because the lookup and the connection may each take one.
    let trying = client.get(url.clone()).timeout(CONNECT_TIMEOUT * 2).send();
    match trying.await {
        Ok(_) => Ok(()),
        Err(error) => {
            let error = error.without_url();
            if causes(&error).any(<dyn StdError>::is::<Connected>) {
                return Ok(());
            }
            Err(innermost(&error))
        }
    }
}

fn stop<C>(connecting: Result<C, BoxError>) -> Result<C, BoxError> {
    connecting.and_then(|_| Err(Connected.into()))
}

fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(error.source(), |error| (*error).source())
}

/// The innermost cause. The caller already shows what was tried.
fn innermost(error: &reqwest::Error) -> String {
    causes(error).last().map_or_else(|| error.to_string(), ToString::to_string)
}
