//! Carries out the faults of a plan.

use std::time::Duration;

use fairlane_testkit::process::signal;
use fairlane_testkit::proxy::{Proxy, ProxyMode};
use fairlane_testkit::redis::RedisServer;
use redis::aio::MultiplexedConnection;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tokio::time::{Instant, sleep, timeout};

use super::STOPS;
use super::plan::{Fault, Planned};
use super::servers::{FOLLOWS, Servers, ask, info, late, other};
use super::worker::now_us;
use super::world::World;
use crate::error::BenchError;

/// Bandwidth of a throttled network, bytes per second.
const LITTLE: u32 = 40_000;

/// A fault that was carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Injected {
    pub(crate) planned: Planned,
    /// When it started, see [`now_us`].
    pub(crate) started: u64,
}

impl World {
    /// Carries out a fault and ends it. Waits before that while its target has another one.
    pub(crate) async fn inject(&self, planned: Planned) -> Result<Injected, BenchError> {
        let node = &self.nodes[planned.process];
        let started = match planned.fault {
            Fault::ProcessKilled
            | Fault::ProcessFrozen
            | Fault::ProcessStopped
            | Fault::ProcessReloaded
            | Fault::ClockStepped => self.inject_process(planned).await?,
            fault if fault.is_between_process_and_redis() => match &node.redis {
                Some(proxy) => {
                    let _line = node.redis_line.lock().await;
                    inject_network(planned, proxy).await
                }
                None => self.inject_network_of_node(planned).await?,
            },
            Fault::MongoThrottled | Fault::MongoRepliesLost => {
                let _line = node.mongo_line.lock().await;
                let started = now_us();
                if planned.fault == Fault::MongoThrottled {
                    node.mongo.set(ProxyMode::Rate(LITTLE));
                    sleep(planned.lasts()).await;
                    node.mongo.set(ProxyMode::Pass);
                } else {
                    node.mongo.lose_replies();
                    sleep(planned.lasts()).await;
                    node.mongo.cut();
                }
                started
            }
            Fault::MongoKilled | Fault::MongoFrozen => self.inject_mongo(planned).await?,
            _ => self.inject_redis(planned).await?,
        };
        Ok(Injected { planned, started })
    }

    async fn inject_process(&self, planned: Planned) -> Result<u64, BenchError> {
        let mut process = self.nodes[planned.process].process.lock().await;
        let started = now_us();
        // It may have ended, because Redis was unavailable when it started.
        if process.has_ended() {
            self.restart(planned.process, &mut process)?;
        }
        match planned.fault {
            Fault::ProcessFrozen => {
                let id = process.id();
                tokio::task::spawn_blocking(move || signal(id, "STOP")).await.map_err(other)?;
                sleep(planned.lasts()).await;
                signal(id, "CONT");
            }
            Fault::ProcessReloaded => {
                self.nodes[planned.process].configure(10 + planned.dice % 90)?;
                // While Redis is unavailable, the new configuration is refused, and nothing changes.
                signal(process.id(), "HUP");
            }
            Fault::ClockStepped => {
                if let Some(clock) = &process.clock {
                    let seconds = 1 + i64::try_from(planned.dice % 20).unwrap_or_default();
                    clock.set(if planned.dice & 1024 == 0 { seconds } else { -seconds })?;
                    sleep(planned.lasts()).await;
                    clock.set(0)?;
                }
            }
            fault => {
                if fault == Fault::ProcessKilled {
                    process.kill();
                } else if !process.stop(STOPS).await {
                    let why = format!("a process did not end within {STOPS:?} of SIGTERM");
                    return Err(BenchError::Campaign(why));
                }
                sleep(planned.lasts()).await;
                self.restart(planned.process, &mut process)?;
            }
        }
        Ok(started)
    }

    /// A fault of what all processes and a primary of the cluster send to each other.
    async fn inject_network_of_node(&self, planned: Planned) -> Result<u64, BenchError> {
        let servers = self.redis.lock().await;
        let Servers::Cluster(cluster) = &*servers else {
            return Err(BenchError::Campaign(format!("{} needs a proxy", planned.fault.name())));
        };
        let primary = cluster.primary(planned.dice).await?;
        Ok(inject_network(planned, &cluster.servers.proxies[primary]).await)
    }

    async fn inject_mongo(&self, planned: Planned) -> Result<u64, BenchError> {
        let mut mongo = self.mongo.lock().await;
        let started = now_us();
        if planned.fault == Fault::MongoFrozen {
            mongo.sigstop();
            sleep(planned.lasts()).await;
            mongo.sigcont();
            return Ok(started);
        }
        mongo.kill9();
        sleep(planned.lasts()).await;
        tokio::task::block_in_place(|| {
            mongo.restart(fairlane_testkit::mongo::Options::default());
        });
        Ok(started)
    }

    async fn inject_redis(&self, planned: Planned) -> Result<u64, BenchError> {
        let mut servers = self.redis.lock().await;
        match (planned.fault, &mut *servers) {
            (Fault::Failover, Servers::Pair(pair)) => {
                let started = now_us();
                pair.fail_over(|address| {
                    for proxy in self.nodes.iter().filter_map(|node| node.redis.as_ref()) {
                        proxy.lead_to(address);
                        proxy.cut();
                    }
                })
                .await?;
                return Ok(started);
            }
            (Fault::ClusterFailover, Servers::Cluster(cluster)) => {
                return cluster.fail_over(planned.dice).await;
            }
            (Fault::SlotsMoved, Servers::Cluster(cluster)) => {
                return cluster.move_shard(planned.dice).await;
            }
            _ => {}
        }
        let server = servers.target(planned.dice).await?;
        let started = now_us();
        match planned.fault {
            Fault::RedisKilled => {
                server.kill9();
                sleep(planned.lasts()).await;
                tokio::task::block_in_place(|| server.restart());
            }
            Fault::RedisFrozen => {
                server.sigstop();
                sleep(planned.lasts()).await;
                server.sigcont();
            }
            fault => {
                let mut connection = server.connection().await;
                match fault {
                    Fault::RedisSleeps => {
                        let seconds = planned.lasts().as_secs_f64().to_string();
                        ask(&mut connection, &["DEBUG", "SLEEP", &seconds]).await?;
                    }
                    Fault::RedisFull => {
                        ask(&mut connection, &["CONFIG", "SET", "maxmemory", "1mb"]).await?;
                        sleep(planned.lasts()).await;
                        ask(&mut connection, &["CONFIG", "SET", "maxmemory", "0"]).await?;
                    }
                    Fault::DiskFull => {
                        disk_full(server, &mut connection, planned.lasts()).await?;
                    }
                    Fault::ScriptsFlushed => ask(&mut connection, &["SCRIPT", "FLUSH"]).await?,
                    Fault::ClientsKilled => {
                        let kill = ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];
                        ask(&mut connection, &kill).await?;
                    }
                    other => {
                        let why = format!("{} needs other servers", other.name());
                        return Err(BenchError::Campaign(why));
                    }
                }
            }
        }
        Ok(started)
    }
}

async fn inject_network(planned: Planned, proxy: &Proxy) -> u64 {
    let started = now_us();
    let mode = match planned.fault {
        Fault::NetworkSlow => Some(ProxyMode::Delay(Duration::from_millis(5 + planned.dice % 95))),
        Fault::NetworkHeld => Some(ProxyMode::Hold),
        Fault::NetworkThrottled => Some(ProxyMode::Rate(LITTLE)),
        Fault::NetworkRefused => Some(ProxyMode::Refuse),
        _ => None,
    };
    if let Some(mode) = mode {
        proxy.set(mode);
        if planned.fault == Fault::NetworkRefused {
            proxy.cut();
        }
        sleep(planned.lasts()).await;
        proxy.set(ProxyMode::Pass);
        return started;
    }
    match planned.fault {
        Fault::RepliesLost => {
            proxy.lose_replies();
            sleep(planned.lasts()).await;
        }
        Fault::ReplySwallowed => {
            let nth = 1 + u32::try_from(planned.dice % 20).unwrap_or_default();
            proxy.swallow("EVALSHA", nth);
            // Until it is met, or the process has nothing to do.
            let before = proxy.swallowed();
            let _ = timeout(Duration::from_secs(2), async {
                while proxy.swallowed() == before {
                    sleep(Duration::from_millis(5)).await;
                }
            })
            .await;
        }
        _ => proxy.cut(),
    }
    started
}

/// Limits the files of Redis to their present length for some time. With `appendfsync always`, Redis
/// ends when it cannot write. So it syncs every second meanwhile, and refuses writes.
async fn disk_full(
    server: &RedisServer,
    connection: &mut MultiplexedConnection,
    lasts: Duration,
) -> Result<(), BenchError> {
    ask(connection, &["CONFIG", "SET", "appendfsync", "everysec"]).await?;
    let id = i32::try_from(server.id()).ok().and_then(Pid::from_raw);
    let limit = Rlimit { current: Some(server.aof_bytes()), maximum: None };
    prlimit(id, Resource::Fsize, limit).map_err(other)?;
    sleep(lasts).await;
    let limit = Rlimit { current: None, maximum: None };
    prlimit(id, Resource::Fsize, limit).map_err(other)?;
    // Redis tries again once a second, and accepts writes when it succeeded.
    let until = Instant::now() + FOLLOWS;
    while !info(connection, "persistence").await?.contains("aof_last_write_status:ok") {
        late(until, "Redis does not write its file again")?;
        sleep(Duration::from_millis(50)).await;
    }
    ask(connection, &["CONFIG", "SET", "appendfsync", "always"]).await
}
