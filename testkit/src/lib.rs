//! What tests and load tools share: private servers, faulty networks in front of them, a receiver of
//! calls, and the checker of histories.
//!
//! It does not depend on Fairlane, so it judges Fairlane from outside.

#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    clippy::return_self_not_must_use,
    reason = "only tests and load tools of this repository use it, and a panic fails them"
)]

pub mod cluster;
pub mod directory;
pub mod history;
pub mod http;
pub mod interceptor;
pub mod mongo;
pub mod mongo_proxy;
pub mod process;
pub mod proxy;
pub mod receiver;
pub mod redis;
pub mod wait;
