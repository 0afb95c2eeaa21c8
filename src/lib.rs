//! Fairlane: a per-tenant event fan-out worker pool on Redis.
//!
//! A bot is a tenant. A bus consumer copies each event into one Redis list per bot, and adds the
//! bot's id to a control set, which holds it at most once. The workers of a pool take the bots
//! in turns (weighted round robin), each under a lock that expires. One worker at a time handles a bot's queue, in
//! order, and a busy bot does not delay a quiet one.
//!
//! ```text
//! producers ── XADD ──▶ bus ──▶ fanout ──▶ queue (lists + control set) ──▶ pool ──▶ handler
//!                              match, copy        lua/*.lua            lease, renew,
//!                                                                      retry, complete
//! ```
//!
//! # The map, in the order of the data
//!
//! The core, which names no product:
//!
//! | module | contents |
//! |---|---|
//! | [`id`], [`event`], `expression`, [`clock`], [`ledger`], [`pipeline`], `quotas` | the base: parsed ids, the event and its wire formats, globs and CEL, time, the ledger and the kind of a pipeline, how much a bot may hold |
//! | `redis` | Redis: connections, the key table, one typed call per script in `lua/` |
//! | `bus` | `trait Source`, the bus on Redis Streams, the reader that drives the fan-out |
//! | `admission` | admission control and quotas |
//! | `fanout` | which pipelines take an event; the copy into the queues |
//! | [`queue`] | one pipeline's queues: the ordering contract, leases, operators' commands |
//! | `pool` | dispatcher, workers, committer; the retry policy; the worker target |
//! | [`handler`] | `trait Handler` and the handlers `log` and `push` |
//! | `outbound` | calls to other HTTP servers: the address rules, names, limits and breakers per bot, signatures |
//! | `receiver` | a small receiver for tests of pushes and notifications |
//! | [`pressure`], `breaker` | how slow a store is, and which share of its work should continue |
//!
//! The products, each with its records, handler, stores, scripts, keys and gauges:
//!
//! | module | contents |
//! |---|---|
//! | [`product`] | the interface of a product: its pipeline, and its part of a running instance |
//! | `products` | the list of the built-in products |
//! | `counters` | views of ads, counted in Redis and written to `MongoDB` |
//! | `notifications` | delayed notifications: scheduling, release, sending |
//! | `automations` | rules of bots: their form, their decisions, their effects |
//!
//! Around them:
//!
//! | module | contents |
//! |---|---|
//! | `http` | the HTTP interface: routes, tokens, problems, the `OpenAPI` document, the pages |
//! | [`formats`] | which formats the stored data has, and which ones this program reads |
//! | `mongo` | `MongoDB`: the client, grouped writes, the private server |
//! | [`app`] | builds and runs an instance |
//! | `presence` | the registry of running processes: rates, workers |
//! | `problems` | what is wrong: the findings of `status`, of the page and of the metrics |
//! | `condition` | the state of a bot in one sentence |
//! | `spelling` | texts that are spelled like another one, for hints |
//! | `trail` | the audit trail: what operators did, and why |
//! | `trend` | the state of the pipelines in the last 15 minutes and 24 hours, for charts |
//! | `replay` | puts events of the bus at the end of the queues of one pipeline again |
//! | `roles`, `startup` | what a process runs, and its start until it is ready |
//! | `caught` | calls of a pipeline's code whose panic ends only that call |
//! | `request_deadline`, `request_tenant`, `signed_token` | the deadline and the tenant of a request; lease capabilities and list cursors |
//! | `cli`, `demo` | the command line, and `fairlane demo` |
//! | `signals` | the signals that end a command or a run instead of its process |
//! | `private` | the common part of the private servers, Redis and `MongoDB` |
//! | `sandbox` | private servers for the demo, and for the load tools in `benches/` |
//! | [`config`], [`lifecycle`], [`metrics`], [`telemetry`] | settings and their defaults, shutdown, all metrics, logging |
//! | `trace` | trace contexts, spans and their export |
//!
//! This documentation shows the whole interface of the crate. Modules without a link are public
//! only for the tests and the load tools of this repository, and change without notice.
//!
//! # The order of the modules
//!
//! Imports between modules never form a circle; a test checks this. From the bottom up: the base
//! ([`clock`], [`id`], [`event`], `expression`, [`metrics`], …) and `admission`; the stores (`redis`,
//! `mongo`) and `outbound`; [`queue`], [`handler`]; [`config`], which knows the settings of all of
//! them; `fanout`, `pool`, `bus`; [`product`]; the products; their list; `http`; [`app`]; the
//! command line.
//!
//! # Invariants
//!
//! 1. A bot with a queue that is not empty is in exactly one state: in the control set; in the busy
//!    set (leased or parked); or paused and not busy. So no bot is forgotten.
//! 2. A bot has at most one live fence. A stale fence commits nothing.
//! 3. Only three things remove an event from its queue: a fenced completion after its effect, a
//!    script that moves it to the dead letters or to the delayed events, and a purge by an operator.
//! 4. Events of one bot are handled in the order of the queue, or in that of each lane. A retry
//!    blocks that bot's queue or lane, and no other.
//! 5. The depth of a shard is the sum of its queues' lengths.
//! 6. What a bot holds is counted with each change: its queued, delayed and dead events.
//!
//! # Use as a library
//!
//! ```no_run
//! use fairlane::app::{self, App};
//! use fairlane::config::{Config, PipelineConfig};
//! use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
//! use fairlane::id::PipelineName;
//! use fairlane::telemetry::{self, LevelFilter, LogFormat};
//!
//! struct Billing;
//!
//! impl Handler for Billing {
//!     async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
//!         for delivery in &slice.events {
//!             println!("{} {}", slice.bot, delivery.event.kind());
//!         }
//!         Ok(Outcomes::done())
//!     }
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! telemetry::init(LogFormat::Text, LevelFilter::INFO)?;
//! let name = PipelineName::parse("billing")?;
//! // Called for the first instance and at each reload, with the configuration of that time.
//! let builder = move |mut config: Config| {
//!     let billing = PipelineConfig::new("billing", ["invoice.*"]);
//!     config.pipelines.entry(name.clone()).or_insert(billing);
//!     App::builder(config).handler("billing", Billing)
//! };
//! app::serve(Config::load(None)?, builder).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Without [`telemetry::init`] or a subscriber of `tracing` of its own, a program logs nothing. Print an
//! error with `{error}`: the text names the remedy. `examples/custom_handler.rs` does both, and tests its
//! handler.

#[doc(hidden)]
pub mod admission;
pub mod app;
#[doc(hidden)]
pub mod automations;
mod breaker;
#[doc(hidden)]
pub mod bus;
mod caught;
#[doc(hidden)]
pub mod cli;
pub mod clock;
mod condition;
pub mod config;
#[doc(hidden)]
pub mod counters;
#[doc(hidden)]
pub mod demo;
pub mod event;
#[doc(hidden)]
pub mod expression;
#[doc(hidden)]
pub mod fanout;
mod find;
pub mod formats;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod handler;
pub mod history;
mod http;
pub mod id;
pub mod ledger;
pub mod lifecycle;
pub mod metrics;
#[doc(hidden)]
pub mod mongo;
#[doc(hidden)]
pub mod notifications;
#[doc(hidden)]
pub mod outbound;
pub mod pipeline;
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod presence;
pub mod pressure;
mod private;
mod problems;
pub mod product;
mod products;
pub mod queue;
#[doc(hidden)]
pub mod quotas;
#[doc(hidden)]
pub mod rate;
mod receiver;
#[doc(hidden)]
pub mod redis;
mod reload;
mod replay;
mod request_deadline;
mod request_tenant;
mod roles;
#[doc(hidden)]
pub mod sandbox;
mod signals;
mod signed_token;
mod spelling;
mod startup;
pub mod telemetry;
#[doc(hidden)]
pub mod trace;
#[doc(hidden)]
pub mod trail;
mod trend;
