//! What `fairlane check` says about replicas and sentinels.

use super::*;
use crate::support::sentinel::{SERVICE, Sentinel, Watched};

#[tokio::test]
async fn too_few_replicas_for_fairlane_or_for_redis_are_found() {
    let redis = redis();
    check(&redis, &[]).expect(0, &["ok replicas none"]);
    let waits = [("redis.wait_replicas", "1")];
    let ran = check(&redis, &waits);
    ran.expect(69, &[
        "fail replicas none; redis.wait_replicas is 1",
        "nothing is accepted, copied or completed; connect its replicas, or lower redis.wait_replicas",
    ]);
    let _first = redis.replica().await;
    check(&redis, &waits).expect(
        0,
        &[
            "warn replicas 1 in step, ",
            "without one of them, nothing is accepted, copied or completed; connect one more",
        ],
    );
    let _second = redis.replica().await;
    check(&redis, &waits).expect(0, &["ok replicas 2 in step, the last one "]);
    redis.ask(&["CONFIG", "SET", "min-replicas-to-write", "3"]).await;
    let ran = check(&redis, &[]);
    assert!(ran.says("fail replicas 2 in step, the last one "), "{}", ran.out);
    assert!(ran.says("Redis refuses all writes"), "{}", ran.out);
    assert!(
        ran.says("nothing is accepted or handled while Redis has too few replicas"),
        "{}",
        ran.out
    );
}

#[tokio::test]
async fn a_private_redis_is_not_asked_for_replicas() {
    let settings = [("redis.wait_replicas", "1"), ("redis.wait_timeout", "\"1s\"")];
    let ran = ConfigDirectory::new("", &settings).run(&[]);
    assert!(ran.out.contains("is set, but redis.url is empty"), "{}", ran.out);
    let redis = redis();
    let late = check(&redis, &[("redis.wait_timeout", "\"11s\"")]);
    assert!(late.out.contains("write 10ms to 10s"), "{}", late.out);
    let many = check(&redis, &[("redis.wait_replicas", "11")]);
    assert!(many.out.contains("redis.wait_replicas"), "{}", many.out);
}

#[tokio::test]
async fn the_primary_that_the_sentinels_name_is_checked() {
    let persistence = Persistence::EverySecond;
    let watched = Watched::start(Options { persistence, ..Options::default() }, 1).await;
    let primary = watched.servers[0].tcp_addr();
    let place = ConfigDirectory::new(&watched.url(), &[]);
    place.run(&[]).expect(
        0,
        &[
            &format!("ok redis answers at {primary}"),
            "ok role master",
            "ok sentinels 3 of 3 name this primary",
            "ok replicas 1 in step, ",
            "ok scripts may be loaded and run",
            "ok channels ",
        ],
    );
}

#[tokio::test]
async fn an_address_of_sentinels_that_leads_to_no_primary_is_explained() {
    let redis = redis();
    let sentinel = Sentinel::start(redis.tcp_addr().port());
    let at = sentinel.address();
    let run = |url: &str| ConfigDirectory::new(url, &[]).run(&[]);
    run(&format!("redis+sentinel://{at}/other")).expect(
        1,
        &[
            "fail redis Redis at other of the sentinels",
            "nothing starts without the primary; follow the error text",
        ],
    );
    let ran = run(&format!("redis+sentinel://{at}/other"));
    assert!(ran.out.contains("the sentinels know no service \"other\""), "{}", ran.out);

    let ran = run(&format!("redis+sentinel://127.0.0.1:{}/{SERVICE}", free_port()));
    assert!(
        ran.out.contains("no sentinel answers; start them, or correct redis.url"),
        "{}",
        ran.out
    );
    assert_eq!(ran.code, 69, "{}", ran.out);

    let ran = run(&format!("redis+sentinel://{}/{SERVICE}", redis.tcp_addr()));
    assert!(ran.out.contains("for a server by itself write redis://"), "{}", ran.out);

    // One sentinel alone cannot fail over, so it keeps naming the replica.
    let replica = redis.replica().await;
    let misled = Sentinel::start(replica.tcp_addr().port());
    let ran = run(&format!("redis+sentinel://{}/{SERVICE}", misled.address()));
    assert!(ran.out.contains("name it as the primary, but its role is \"slave\""), "{}", ran.out);

    let ran = run(&format!("redis+sentinel://{at}"));
    assert!(ran.out.contains("names no service of the sentinels"), "{}", ran.out);
}
