//! Private servers, broken networks and further processes for the tests.

pub(crate) mod automating;
pub(crate) mod browser;
pub(crate) mod bus;
pub(crate) mod clocked;
pub(crate) mod cluster;
pub(crate) mod config;
pub(crate) mod counting;
pub(crate) mod fleet;
pub(crate) mod hand;
pub(crate) mod history;
pub(crate) mod http;
pub(crate) mod instance;
pub(crate) mod mongo;
pub(crate) mod mongo_proxy;
pub(crate) mod notifying;
pub(crate) mod process;
pub(crate) mod prometheus;
pub(crate) mod proxy;
pub(crate) mod push;
pub(crate) mod receiver;
pub(crate) mod receivers;
pub(crate) mod recorder;
pub(crate) mod redis;
pub(crate) mod served;
pub(crate) mod trap;
pub(crate) mod wait;
