//! A program with its own handler logs, and explains why it cannot start: `examples/custom_handler.rs`.

use std::net::TcpListener;
use std::time::Duration;

use crate::support::bus::{add, event};
use crate::support::config::STREAM;
use crate::support::http::until_ready;
use crate::support::process::WorkerProcess;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// The example, which listens there.
fn start(server: &RedisServer, http: &str) -> WorkerProcess {
    let environment = [
        // The level is that of the example.
        ("RUST_LOG", String::new()),
        ("FAIRLANE__REDIS__URL", server.url()),
        ("FAIRLANE__HTTP__LISTEN", http.to_owned()),
        ("FAIRLANE__METRICS__LISTEN", "127.0.0.1:0".to_owned()),
    ];
    WorkerProcess::spawn_heard("custom_handler", &environment)
}

#[tokio::test]
async fn the_example_names_the_remedy_if_its_address_is_taken() {
    let server = RedisServer::start(Options::default());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut process = start(&server, &address);
    let ended = process.wait_exit(LONG).and_then(|status| status.code());
    let lines = process.lines();
    assert_eq!(ended, Some(1), "{lines:#?}");
    let cause = format!("error: cannot listen on {address}: ");
    let told = lines.iter().find(|line| line.starts_with(&cause));
    let told = told.unwrap_or_else(|| panic!("{lines:#?}"));
    assert!(told.contains("set http.listen to a free address"), "{told}");
}

#[tokio::test]
async fn the_example_warns_of_an_order_that_it_cannot_read() {
    let server = RedisServer::start(Options::default());
    let mut process = start(&server, "127.0.0.1:0");
    let says = async |texts: &[&str]| {
        eventually(LONG, texts[0], async || {
            process.lines().iter().any(|line| texts.iter().all(|text| line.contains(text)))
        })
        .await;
    };
    let order = |id: u32, field: &str| {
        let data = format!("{{\"data\":{{\"{field}\":12}},");
        event("shop-7", "order.paid", id).replacen('{', &data, 1)
    };
    says(&["fairlane is running"]).await;
    let started = process.lines().into_iter().find(|line| line.contains("is running")).unwrap();
    let metrics = started.split("metrics=").nth(1).unwrap().split(' ').next().unwrap();
    until_ready(metrics).await;
    add(&server, STREAM, &[order(1, "price"), order(2, "prize")]).await;
    says(&["an event became a dead letter", "WARN", "shop-7", "missing field `price`"]).await;
    add(&server, STREAM, &[order(3, "price")]).await;
    says(&["shop-7 has spent 24"]).await;
    process.sigterm();
    assert!(process.wait_exit(LONG).is_some_and(|status| status.success()));
}
