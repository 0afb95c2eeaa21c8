//! Tests with a real `redis-server`.

use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::*;

/// Kills what a failed test leaves running.
struct Guard(u32);

impl Drop for Guard {
    fn drop(&mut self) {
        kill(self.0);
    }
}

fn kill(pid: u32) {
    signal("-KILL", pid);
}

fn signal(signal: &str, pid: u32) {
    // The process may have ended already, as most signals intend.
    let _ = std::process::Command::new("kill")
        .args([signal, &pid.to_string()])
        .stderr(Stdio::null())
        .status();
}

fn of_process(pid: u32, what: &str) -> String {
    let asked = ["-o", &format!("{what}="), "-p", &pid.to_string()].map(str::to_owned);
    let output = std::process::Command::new("ps").args(asked).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

async fn start(dir: &TempDir) -> (PrivateRedis, Guard) {
    let redis = PrivateRedis::start(dir.path()).await.unwrap();
    let guard = Guard(redis.pid());
    (redis, guard)
}

async fn client(redis: &PrivateRedis) -> MultiplexedConnection {
    let client = redis::Client::open(redis.url().expose()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

#[tokio::test]
async fn a_private_server_is_durable_never_evicts_and_is_reached_by_its_url() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("a b%20ä");
    let redis = PrivateRedis::start(&data_dir).await.unwrap();
    let _guard = Guard(redis.pid());
    for private in [data_dir.clone(), data_dir.join("redis")] {
        assert_eq!(private.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
    let mut connection = client(&redis).await;
    let wanted = [
        ("port", "0"),
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
        ("save", ""),
        ("maxmemory-policy", "noeviction"),
        ("unixsocketperm", "700"),
        ("hash-max-listpack-entries", "16"),
        ("zset-max-listpack-entries", "8"),
        ("latency-tracking", "no"),
    ];
    for (name, value) in wanted {
        let (_, found): (String, String) =
            redis::cmd("CONFIG").arg("GET").arg(name).query_async(&mut connection).await.unwrap();
        assert_eq!(found, value, "{name}");
    }
    assert_eq!(of_process(redis.pid(), "pgid"), redis.pid().to_string());
    drop(connection);
    assert!(redis.stop().await.unwrap());
}

#[tokio::test]
async fn the_last_one_out_stops_the_server_and_its_data_is_still_there() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let second = PrivateRedis::start(dir.path()).await.unwrap();
    assert_eq!(second.pid(), first.pid());
    let pid = first.pid();
    let mut connection = client(&second).await;
    let () = redis::cmd("SET").arg("k").arg("v").query_async(&mut connection).await.unwrap();

    assert!(!first.stop().await.unwrap());
    let value: String = redis::cmd("GET").arg("k").query_async(&mut connection).await.unwrap();
    assert_eq!(value, "v");
    drop(connection);
    assert!(second.stop().await.unwrap());
    // The runtime reaps the process a moment after its end.
    let reaped = async {
        while !of_process(pid, "pid").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), reaped).await.expect("the child is reaped");

    let (third, _guard) = start(&dir).await;
    assert_ne!(third.pid(), pid);
    let mut connection = client(&third).await;
    let value: String = redis::cmd("GET").arg("k").query_async(&mut connection).await.unwrap();
    assert_eq!(value, "v");
    drop(connection);
    assert!(third.stop().await.unwrap());
}

#[tokio::test]
async fn a_server_survives_its_starter_and_is_stopped_by_its_adopter() {
    let dir = tempfile::tempdir().unwrap();
    let (starter, _guard) = start(&dir).await;
    let pid = starter.pid();
    drop(starter);
    let adopter = PrivateRedis::start(dir.path()).await.unwrap();
    assert_eq!(adopter.pid(), pid);
    assert!(adopter.child.is_none());
    assert!(adopter.stop().await.unwrap());
    assert!(!dir.path().join("redis/redis.sock").exists());
}

#[tokio::test]
async fn a_client_that_is_still_connected_keeps_the_server_running() {
    let dir = tempfile::tempdir().unwrap();
    let (redis, _guard) = start(&dir).await;
    let mut operator = client(&redis).await;
    assert!(!redis.stop().await.unwrap());
    let () = redis::cmd("PING").query_async(&mut operator).await.unwrap();
}

#[tokio::test]
async fn processes_that_start_concurrently_share_one_server() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b, c) = tokio::join!(
        PrivateRedis::start(dir.path()),
        PrivateRedis::start(dir.path()),
        PrivateRedis::start(dir.path())
    );
    let all = [a.unwrap(), b.unwrap(), c.unwrap()];
    let _guard = Guard(all[0].pid());
    assert!(all.iter().all(|one| one.pid() == all[0].pid()));
    assert_eq!(all.iter().filter(|one| one.child.is_some()).count(), 1);
}

/// The other process stops it later, as its last user.
#[tokio::test]
async fn a_server_that_another_process_starts_is_left_to_it_after_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let (redis, _guard) = start(&dir).await;
    let lock = std::fs::File::open(dir.path().join("redis/lock")).unwrap();
    lock.lock().unwrap();
    tokio::time::pause();
    let stopping = tokio::time::timeout(Duration::from_secs(10), redis.stop());
    assert!(!stopping.await.expect("it does not wait for the start").unwrap());
}

#[tokio::test]
async fn a_killed_server_is_replaced_and_its_former_users_leave_the_new_one_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let (second, _) = start(&dir).await;
    kill(first.pid());
    let mut first = first;
    drop(first.child.as_mut().unwrap().wait().await);
    let (third, _guard) = start(&dir).await;
    assert_ne!(third.pid(), first.pid());
    assert!(!first.stop().await.unwrap());
    assert!(!second.stop().await.unwrap());
    assert!(third.stop().await.unwrap());
}

async fn refusal(dir: &Path, options: Options) -> String {
    PrivateRedis::start_with(dir, options).await.unwrap_err().to_string()
}

#[tokio::test]
async fn a_server_that_hangs_is_waited_for_and_then_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (redis, _guard) = start(&dir).await;
    signal("-STOP", redis.pid());
    let short = Options { start_within: Duration::from_millis(100), ..Options::default() };
    let message = refusal(dir.path(), short).await;
    assert!(message.ends_with("did not answer within 100ms; see redis.log beside it"), "{message}");

    let waiting = PrivateRedis::start(dir.path());
    let resumed = async { signal("-CONT", redis.pid()) };
    let (adopted, ()) = tokio::join!(waiting, resumed);
    assert_eq!(adopted.unwrap().pid(), redis.pid());
}

/// Another server would load the same data from the start.
#[tokio::test]
async fn a_server_that_loads_its_data_is_waited_for_without_a_limit() {
    const WITHIN: Duration = Duration::from_secs(3);
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let mut connection = client(&first).await;
    // Redis answers after every 1024 commands that it loads.
    for part in 0..36 {
        let mut sets = redis::pipe();
        for n in 0..1_024 {
            sets.set(format!("{part}:{n}"), n).ignore();
        }
        let () = sets.query_async(&mut connection).await.unwrap();
    }
    drop(connection);
    assert!(first.stop().await.unwrap());

    // In microseconds.
    let arguments = ["--key-load-delay", "100"].map(OsString::from).to_vec();
    let slow = Options { arguments, start_within: WITHIN, ..Options::default() };
    let started = Instant::now();
    let second = PrivateRedis::start_with(dir.path(), slow).await.unwrap();
    let _guard = Guard(second.pid());
    assert!(started.elapsed() > WITHIN, "{:?}", started.elapsed());
    assert!(second.stop().await.unwrap());
}

#[tokio::test]
async fn a_missing_program_is_named_with_its_package_and_the_alternative() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { program: "no-such-redis".into(), ..Options::default() };
    assert_eq!(
        refusal(dir.path(), options).await,
        "\"no-such-redis\" cannot be run: No such file or directory (os error 2); install the package redis-server (7.0 or newer), or set redis.url to a running Redis"
    );
}

#[tokio::test]
async fn an_old_or_foreign_program_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("old-redis");
    std::fs::write(&script, "#!/bin/sh\necho Redis server v=6.2.14 sha=0\n").unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
    let options = Options { program: script.into(), ..Options::default() };
    let message = refusal(dir.path(), options).await;
    assert!(message.contains("is version 6.2.14; install"), "{message}");
    let options = Options { program: "true".into(), ..Options::default() };
    assert_eq!(
        refusal(dir.path(), options).await,
        "\"true\" is not a Redis server with a readable version; install the package redis-server in version 7.0 or newer, or set redis.url to a running Redis"
    );
}

#[tokio::test]
async fn a_server_that_ends_while_starting_is_reported_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--no-such-setting", "1"].map(OsString::from).to_vec();
    let message = refusal(dir.path(), Options { arguments, ..Options::default() }).await;
    assert!(message.starts_with("redis-server ended while starting (exit status: 1)"), "{message}");
    assert!(message.contains("no-such-setting"), "{message}");
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let message = refusal(&dir.path().join("x".repeat(100)), Options::default()).await;
    assert!(message.contains("a unix socket at most 103; choose a shorter data_dir"), "{message}");
}

/// Otherwise the next start reads later writes as a part of the transaction that was cut off.
#[tokio::test]
async fn after_a_truncated_file_was_loaded_it_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let mut connection = client(&first).await;
    let mut both = redis::pipe();
    both.atomic().set("a", "x".repeat(100)).set("b", "x".repeat(100));
    let () = both.query_async(&mut connection).await.unwrap();
    let mut first = first;
    kill(first.pid());
    drop(first.child.as_mut().unwrap().wait().await);
    let parts = std::fs::read_dir(dir.path().join("redis/appendonlydir")).unwrap();
    let mut parts = parts.map(|entry| entry.unwrap().path());
    let part = parts.find(|path| path.to_string_lossy().ends_with(".incr.aof")).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&part).unwrap();
    file.set_len(file.metadata().unwrap().len() - 30).unwrap();

    let (second, _guard) = start(&dir).await;
    let mut connection = client(&second).await;
    let rewritten = async {
        loop {
            let info: redis::InfoDict =
                redis::cmd("INFO").arg("persistence").query_async(&mut connection).await.unwrap();
            let done = info.get::<u64>("aof_rewrites") >= Some(1);
            if done && info.get::<u64>("aof_rewrite_in_progress") == Some(0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), rewritten).await.expect("it is written anew");
    let () = redis::cmd("SET").arg("c").arg(1).query_async(&mut connection).await.unwrap();
    drop(connection);
    assert!(second.stop().await.unwrap());
    // The writes after the cut are there; the transaction that was cut off is not.
    let (third, _guard) = start(&dir).await;
    let mut connection = client(&third).await;
    let found: (bool, bool, bool) = redis::pipe()
        .exists("a")
        .exists("b")
        .exists("c")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert_eq!(found, (false, false, true));
    drop(connection);
    assert!(third.stop().await.unwrap());
}
