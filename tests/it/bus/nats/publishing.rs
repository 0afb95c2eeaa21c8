//! What is published is stored once, or the error says what is not.

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::stream::{self, DiscardPolicy};
use fairlane::bus::BusError;
use fairlane::bus::nats::NatsLogin;
use fairlane::bus::source::{Outgoing, Source as _};
use futures_util::StreamExt as _;

use super::{Copy, STREAM, config, event, ids, log, make, publish, settings, source};
use crate::support::nats::{Access, NatsServer, Options, PASSWORD, TOKEN, Tls, USER};
use crate::support::wait::Stopwatch;

#[tokio::test]
async fn repeated_events_keep_their_offsets() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    let first = publish(&source, &ids(0..5)).await.unwrap();
    assert_eq!(publish(&source, &ids(0..5)).await.unwrap(), first);
    let more = publish(&source, &ids(3..8)).await.unwrap();
    assert_eq!(more[..2], first[3..]);
    assert_eq!(more[4].seq, 8);
    assert_eq!(Copy::default().until(&source, 8).await, ids(0..8));
}

#[tokio::test]
async fn events_go_to_the_subject_of_their_bot() {
    let server = NatsServer::start(Options::default());
    let stream = make(&server, config()).await;
    let source = source(settings(&server));
    let bots = ["shop-7", "a.b", "*", ">", "日 本"];
    let json: Vec<_> = bots.iter().map(|bot| event(bot, bot, "")).collect();
    let events: Vec<_> =
        bots.iter().zip(&json).map(|(bot, json)| Outgoing { json: json.as_bytes(), bot }).collect();
    source.publish(&events).await.unwrap();
    let consumer = stream.create_consumer(pull::Config::default()).await.unwrap();
    let messages = consumer.fetch().max_messages(5).messages().await.unwrap();
    let subjects: Vec<_> =
        messages.map(|message| message.unwrap().subject.to_string()).collect().await;
    let expected = [
        "events.shop-7",
        "events.a%2Eb",
        "events.%2A",
        "events.%3E",
        "events.%E6%97%A5%20%E6%9C%AC",
    ];
    assert_eq!(subjects, expected);
    assert_eq!(Copy::default().until(&source, 5).await, bots);
}

#[tokio::test]
async fn a_batch_is_added_whole_or_not_at_all_if_the_stream_permits_it() {
    let server = NatsServer::start(Options::default());
    let full = stream::Config { max_messages: 12, discard: DiscardPolicy::New, ..config() };
    make(&server, stream::Config { allow_atomic_publish: true, ..full.clone() }).await;
    let whole = source(settings(&server));
    let first = publish(&whole, &ids(0..10)).await.unwrap();
    assert_eq!(
        first.iter().map(|offset| offset.seq).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
    assert_eq!(publish(&whole, &ids(0..10)).await.unwrap(), first);
    let refused = publish(&whole, &ids(10..15)).await.unwrap_err();
    assert!(matches!(refused, BusError::Refused { .. }), "{refused}");
    assert_eq!(log(&whole).await.last, first[9]);
    publish(&whole, &ids(10..12)).await.unwrap();
    // Without that permission.
    server.jetstream().await.delete_stream(STREAM).await.unwrap();
    make(&server, full).await;
    let single = source(settings(&server));
    let partly = publish(&single, &ids(0..15)).await.unwrap_err();
    assert!(matches!(partly, BusError::Partly { .. }), "{partly}");
    assert_eq!(log(&single).await.last.seq, 12);
}

#[tokio::test]
async fn an_event_that_is_too_large_is_refused_before_anything_is_sent() {
    let server =
        NatsServer::start(Options { more: "max_payload: 4K".to_owned(), ..Options::default() });
    make(&server, config()).await;
    let source = source(settings(&server));
    let (small, large) = (event("a", "b", ""), event("large", "b", &"x".repeat(4_096)));
    let events = [&small, &large].map(|json| Outgoing { json: json.as_bytes(), bot: "b" });
    let text = source.publish(&events).await.unwrap_err().to_string();
    assert!(text.contains("\"large\"") && text.contains("`max_payload` of the server"), "{text}");
    assert_eq!(log(&source).await.last.seq, 0);
}

#[tokio::test]
async fn a_subject_that_no_stream_takes_is_named() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let mut wrong = settings(&server);
    wrong.publish_subject = Some("other.{bot}".to_owned());
    let text = publish(&source(wrong), &ids(0..1)).await.unwrap_err().to_string();
    assert!(text.contains("\"other.b\"") && text.contains("`publish_subject`"), "{text}");
    let mut none = settings(&server);
    none.publish_subject = None;
    let text = publish(&source(none), &ids(0..1)).await.unwrap_err().to_string();
    assert!(text.contains("without wildcards"), "{text}");
}

#[tokio::test]
async fn logins_and_certificates_are_used() {
    for (access, login) in [
        (Access::User, NatsLogin::User { user: USER.to_owned(), password: PASSWORD.to_owned() }),
        (Access::Token, NatsLogin::Token(TOKEN.to_owned())),
    ] {
        let server = NatsServer::start(Options { access, tls: Tls::Mutual, ..Options::default() });
        make(&server, config()).await;
        let mut right = settings(&server);
        right.login = login;
        right.ca_file = Some(server.papers().path("ca"));
        right.cert_file = Some(server.papers().path("cert"));
        right.key_file = Some(server.papers().path("key"));
        let mut untrusting = right.clone();
        untrusting.ca_file = None;
        let mut stranger = right.clone();
        stranger.login = NatsLogin::None;
        publish(&source(right), &ids(0..1)).await.unwrap();
        for wrong in [untrusting, stranger] {
            let error = source(wrong).logs().await.unwrap_err();
            assert!(matches!(error, BusError::Connect { .. }), "{error}");
            assert!(!error.to_string().contains(TOKEN), "{error}");
        }
    }
}

#[tokio::test]
async fn missing_rights_are_told_at_once_and_surveyed() {
    let users = format!(
        "authorization {{ users: [ {{ user: admin, password: \"{PASSWORD}\" }}, \
         {{ user: \"{USER}\", password: \"{PASSWORD}\", permissions: {{ publish: {{ \
         deny: [\"events.>\", \"$JS.API.STREAM.PURGE.>\"] }} }} }} ] }}"
    );
    let server = NatsServer::start(Options { more: users, ..Options::default() });
    let user = |user: &str| {
        let mut settings = settings(&server);
        settings.login = NatsLogin::User { user: user.to_owned(), password: PASSWORD.to_owned() };
        settings
    };
    let admin = async_nats::ConnectOptions::new()
        .user_and_password("admin".to_owned(), PASSWORD.to_owned())
        .connect(server.url())
        .await
        .unwrap();
    async_nats::jetstream::new(admin).create_stream(config()).await.unwrap();
    let survey = source(user("admin")).survey().await.unwrap();
    assert_eq!(
        (survey.can_read, survey.can_purge, survey.can_publish),
        (Some(true), Some(true), Some(true))
    );
    assert!(survey.server.starts_with("2.") && survey.sync_interval.is_none());
    let stream = survey.stream.unwrap();
    assert_eq!((stream.messages, stream.last, stream.problem), (0, 0, None));
    let limited = source(user(USER));
    let survey = limited.survey().await.unwrap();
    assert_eq!(
        (survey.can_read, survey.can_purge, survey.can_publish),
        (Some(true), Some(false), Some(false))
    );
    let watch = Stopwatch::start();
    let error = publish(&limited, &ids(0..1)).await.unwrap_err();
    assert!(
        matches!(&error, BusError::Refused { cause, .. } if cause.contains("events.b")),
        "{error}"
    );
    watch.within(super::SECOND * 2, "the refusal");
}
