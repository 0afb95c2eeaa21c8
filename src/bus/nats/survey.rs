//! What `fairlane check` wants to know.

use async_nats::jetstream::stream::Config;
use serde::Deserialize;
use serde_json::{Value, json};

use super::NatsSource;
use super::facts::Facts;
use super::link::Connected;
use crate::bus::BusError;

/// The server, the stream and the rights of the user.
#[derive(Debug, Clone)]
pub struct NatsSurvey {
    /// The version of the server.
    pub server: String,
    /// The largest message that the server accepts, in bytes.
    pub max_payload: usize,
    /// The stream; `None` if it does not exist.
    pub stream: Option<NatsStream>,
    /// How often the server writes its files to the disk, such as `2m0s` or `always`. Until then a
    /// power cut loses acknowledged messages. `None`: this user cannot see it.
    pub sync_interval: Option<String>,
    /// Whether the user may read the stream. `None`: not known, as for the next ones.
    pub can_read: Option<bool>,
    /// Whether the user may delete messages.
    pub can_purge: Option<bool>,
    /// Whether the user may publish. `None` also without a subject to publish to.
    pub can_publish: Option<bool>,
}

/// A stream of NATS.
#[derive(Debug, Clone)]
pub struct NatsStream {
    /// Its settings: retention, discard policy, storage, replicas, duplicate window, limits.
    pub config: Config,
    /// When it was made, ms since 1970.
    pub created_ms: u64,
    /// Number of messages.
    pub messages: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// The first sequence, or the next one if there are no messages.
    pub first: u64,
    /// The last sequence.
    pub last: u64,
    /// Number of consumers.
    pub consumers: u64,
    /// Why it cannot be read, if its retention is not usable.
    pub problem: Option<String>,
}

impl NatsSource {
    /// Looks at the server, the stream and the rights. Changes nothing and publishes nothing.
    ///
    /// # Errors
    /// If the server does not answer or refuses.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn survey(&self) -> Result<NatsSurvey, BusError> {
        let connected = self.link.connected().await?;
        let server = connected.client.server_info();
        let facts = Facts::of(&connected, &self.link).await?;
        let rights = rights(&connected).await;
        let settings = &self.link.settings;
        let may = |subjects: &[String]| {
            let rights = rights.as_ref()?;
            Some(subjects.iter().all(|subject| rights.publish.allows(subject)))
        };
        let of = |name: &str| format!("$JS.API.{name}.{}", settings.stream);
        let some = |name: &str| format!("{}.fairlane-x", of(name));
        let publish = settings.publish_subject.clone().or_else(|| {
            let subject = facts.as_ref()?.config.subjects.first()?.clone();
            (!subject.contains(['*', '>'])).then_some(subject)
        });
        Ok(NatsSurvey {
            max_payload: server.max_payload,
            sync_interval: sync_interval(&connected, &server.server_id).await,
            server: server.version,
            can_read: may(&[
                of("STREAM.INFO"),
                some("CONSUMER.CREATE"),
                some("CONSUMER.INFO"),
                some("CONSUMER.MSG.NEXT"),
            ]),
            can_purge: may(&[of("STREAM.PURGE")])
                .map(|may| may && facts.as_ref().is_none_or(|facts| !facts.config.deny_purge)),
            can_publish: publish
                .and_then(|subject| may(&[super::publishing::subject(&subject, "x")])),
            stream: facts.map(|facts| NatsStream {
                created_ms: facts.created(),
                messages: facts.state.messages,
                bytes: facts.state.bytes,
                first: facts.first(),
                last: facts.state.last_seq,
                consumers: facts.state.consumer_count,
                problem: facts.check(&self.link).err().map(|error| error.to_string()),
                config: facts.config,
            }),
        })
    }
}

/// Only a user of the system account gets an answer.
async fn sync_interval(connected: &Connected, server_id: &str) -> Option<String> {
    let subject = format!("$SYS.REQ.SERVER.{server_id}.JSZ");
    let body = json!({ "config": true }).to_string();
    let answer = connected.client.request(subject, body.into()).await.ok()?;
    let answer: Value = serde_json::from_slice(&answer.payload).ok()?;
    let config = answer.pointer("/data/config")?;
    if config.get("sync_always") == Some(&Value::Bool(true)) {
        return Some("always".to_owned());
    }
    let nanos = config.get("sync_interval")?.as_u64()?;
    Some(humantime::format_duration(std::time::Duration::from_nanos(nanos)).to_string())
}

/// What a user may do, as the server tells each user.
#[derive(Debug, Default, Deserialize)]
struct Rights {
    #[serde(default)]
    publish: Permission,
}

#[derive(Debug, Default, Deserialize)]
struct Permission {
    #[serde(default)]
    allow: Vec<String>,
    #[serde(default)]
    deny: Vec<String>,
}

async fn rights(connected: &Connected) -> Option<Rights> {
    let answer = connected.client.request("$SYS.REQ.USER.INFO", Vec::new().into()).await.ok()?;
    let answer: Value = serde_json::from_slice(&answer.payload).ok()?;
    // Without permissions the user may do everything.
    match answer.pointer("/data")?.get("permissions") {
        None | Some(Value::Null) => Some(Rights::default()),
        Some(found) => serde_json::from_value(found.clone()).ok(),
    }
}

impl Permission {
    fn allows(&self, subject: &str) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, subject));
        (self.allow.is_empty() || any(&self.allow)) && !any(&self.deny)
    }
}

fn matches(pattern: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, tokens.next()) {
            (">", Some(_)) => return true,
            (wanted, Some(token)) if wanted == "*" || wanted == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_read_as_the_server_reads_them() {
        let permission = |allow: &[&str], deny: &[&str]| {
            let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
            Permission { allow: own(allow), deny: own(deny) }
        };
        let cases = [
            (permission(&[], &[]), "a.b", true),
            (permission(&["a.*"], &[]), "a.b", true),
            (permission(&["a.*"], &[]), "a.b.c", false),
            (permission(&["a.*"], &[]), "a", false),
            (permission(&["a.>"], &[]), "a.b.c", true),
            (permission(&["a.>"], &[]), "a", false),
            (permission(&[], &["a.b"]), "a.b", false),
            (permission(&[">"], &["a.>"]), "a.b", false),
            (permission(&["b"], &[]), "a", false),
        ];
        for (permission, subject, expected) in cases {
            assert_eq!(permission.allows(subject), expected, "{permission:?} {subject}");
        }
    }
}
