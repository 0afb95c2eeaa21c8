//! Private servers, faulty networks and further processes for the tests.

pub(crate) mod admission;
pub(crate) mod automation_rig;
pub(crate) mod balancer;
pub(crate) mod browser;
pub(crate) mod bus;
pub(crate) mod cli;
pub(crate) mod collector;
pub(crate) mod config;
pub(crate) mod counter_fleet;
pub(crate) mod disk;
pub(crate) mod fleet;
pub(crate) mod instance;
#[cfg(feature = "kafka")]
pub(crate) mod kafka;
pub(crate) mod kills;
pub(crate) mod manual_clock;
pub(crate) mod name_server;
#[cfg(feature = "nats")]
pub(crate) mod nats;
pub(crate) mod notification_rig;
pub(crate) mod papers;
pub(crate) mod process;
pub(crate) mod prometheus;
pub(crate) mod push;
pub(crate) mod receivers;
pub(crate) mod recorder;
pub(crate) mod roles;
pub(crate) mod script_harness;
pub(crate) mod sentinel;
pub(crate) mod served;
pub(crate) mod terminal;
pub(crate) mod tokens;

pub(crate) use fairlane_testkit::{
    cluster, history, http, interceptor, mongo, mongo_proxy, proxy, receiver, redis, wait,
};
