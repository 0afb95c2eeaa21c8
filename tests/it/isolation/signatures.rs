//! What a tenant can have signed is never taken for anything else.
//!
//! `examples/signature-vectors.json` has what receivers must accept and refuse. It was made with the
//! `hmac` of Python, and serves receivers in any language as a test.

use std::time::Duration;

use fairlane::id::BotId;
use fairlane::notifications::SIGNED;
use fairlane::notifications::record::{NewNotification, State};
use fairlane::outbound::sign::{self, MessageId, Purpose, Secret};
use fairlane::outbound::{HeaderMap, HeaderValue};
use serde::Deserialize;

use crate::support::http::Client;
use crate::support::notification_rig::{Rig, accept, bot, ends, of};
use crate::support::receiver::Receiver;
use crate::support::receivers::{ExampleReceiver, example, is_there};
use crate::support::wait::eventually;

#[derive(Debug, Deserialize)]
struct Vectors {
    /// The time of the receiver, in seconds since 1970.
    now: u64,
    /// An entry of `callbacks.secrets`.
    secret: String,
    bot: BotId,
    /// The keys of the bot.
    keys: Keys,
    #[serde(rename = "vectors")]
    calls: Vec<Vector>,
}

#[derive(Debug, Deserialize)]
struct Keys {
    push: String,
    notification: String,
}

/// One call, and whether a receiver of this kind accepts it.
#[derive(Debug, Deserialize)]
struct Vector {
    name: String,
    kind: String,
    id: String,
    timestamp: String,
    body: String,
    signature: String,
    accepted: bool,
}

impl Vectors {
    fn read() -> Self {
        let text = std::fs::read_to_string(example("signature-vectors.json")).unwrap();
        let vectors: Self = serde_json::from_str(&text).unwrap();
        let refused = vectors.calls.iter().filter(|vector| !vector.accepted).count();
        assert!(refused >= 20 && vectors.calls.len() - refused >= 6);
        vectors
    }

    fn key(&self, kind: &str) -> &str {
        if kind == "push" { &self.keys.push } else { &self.keys.notification }
    }
}

impl Vector {
    fn headers(&self) -> [(&str, &str); 3] {
        [
            (sign::ID, &self.id),
            (sign::TIMESTAMP, &self.timestamp),
            (sign::SIGNATURE, &self.signature),
        ]
    }
}

#[test]
fn fairlane_signs_and_checks_as_the_vectors_say() {
    let vectors = Vectors::read();
    let secret = Secret::parse(&vectors.secret).unwrap();
    for (kind, purpose) in [("push", Purpose::PUSH), ("notification", SIGNED)] {
        let key = secret.key(purpose, &vectors.bot);
        assert_eq!(key.expose(), vectors.key(kind));
        for vector in vectors.calls.iter().filter(|vector| vector.kind == kind) {
            let headers: HeaderMap = vector
                .headers()
                .into_iter()
                .map(|(name, value)| (name.parse().unwrap(), HeaderValue::try_from(value).unwrap()))
                .collect();
            let (body, now) = (vector.body.as_bytes(), Duration::from_secs(vectors.now));
            let checked = sign::check(std::slice::from_ref(&key), &headers, body, now);
            assert_eq!(checked.is_ok(), vector.accepted, "{kind}: {}: {checked:?}", vector.name);
            if vector.accepted {
                let id = MessageId::parse(&vector.id).unwrap();
                let at = vector.timestamp.parse().unwrap();
                let ours = sign::sign(std::slice::from_ref(&key), &id, at, body);
                assert!(vector.signature.ends_with(&ours), "{kind}: {}", vector.name);
            }
        }
    }
}

#[tokio::test]
async fn the_example_receivers_accept_and_refuse_as_the_vectors_say() {
    let vectors = Vectors::read();
    for interpreter in ["python3", "php", "node"] {
        if !is_there(interpreter) {
            println!("not shown: there is no {interpreter}");
            continue;
        }
        for (kind, name) in [("push", "push_receiver"), ("notification", "notified")] {
            let key = vectors.key(kind);
            let receiver = ExampleReceiver::with_clock(name, interpreter, key, Some(vectors.now));
            let client = Client::new(receiver.url.trim_start_matches("http://"));
            for vector in vectors.calls.iter().filter(|vector| vector.kind == kind) {
                let body = vector.body.as_bytes();
                let answer = client.send("POST", "/", &vector.headers(), body).await;
                let wanted: &[u16] = if vector.accepted { &[200, 204] } else { &[400, 401] };
                let name = &vector.name;
                assert!(wanted.contains(&answer.code), "{interpreter}, {name}: {answer:?}");
            }
        }
    }
}

const SECRETS: &str = "[\"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"]";

#[tokio::test]
async fn a_notification_is_signed_with_a_key_that_signs_no_push_under_an_id_without_a_dot() {
    let rig = Rig::new(&[("callbacks.secrets", SECRETS)]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    // What a tenant would like a receiver of pushes to believe.
    let forged =
        r#"{"pipeline":"orders","bot":"shop","lease":"l","fence":99,"attempt":1,"events":[]}"#;
    let new = NewNotification {
        method: "POST".to_owned(),
        body: forged.to_owned(),
        recheck: String::new(),
        ..of("user", receiver.url())
    };
    let id = accept(&instance, &new).await;
    ends(&instance, id, State::Sent).await;
    eventually(Duration::from_secs(60), "it arrives", async || receiver.called() == 1).await;
    let call = &receiver.calls()[0];
    let wire = &call.headers[sign::ID];
    assert_eq!(*wire, id.to_string().replace('.', "-"));
    assert!(!wire.contains('.'));
    let secret = Secret::parse(&SECRETS[2..SECRETS.len() - 2]).unwrap();
    let at = call.headers[sign::TIMESTAMP].parse().unwrap();
    let id = MessageId::parse(wire).unwrap();
    for (purpose, good) in [(SIGNED, true), (Purpose::PUSH, false)] {
        let key = secret.key(purpose, &bot("shop"));
        let ours = sign::sign(&[key], &id, at, &call.body);
        assert_eq!(call.headers[sign::SIGNATURE] == ours, good, "{purpose:?}");
    }
    instance.stop().await;
}
