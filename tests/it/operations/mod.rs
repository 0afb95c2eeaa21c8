//! The daily work of an operator: commands, checks, status, dashboards, access rights, the start
//! and the stop of a process. Other tests here keep the documentation, the examples and the
//! deployment files true.

mod acl;
mod check;
mod cli;
mod compose;
mod custom_handler;
mod custom_product;
mod dashboards;
mod docs;
mod embedding;
mod environments;
mod examples;
mod figures;
mod health;
mod kit;
mod lifecycle;
mod listing;
mod log_lines;
mod lookups;
mod missing_primary;
mod operators;
mod panics;
mod presence;
mod private_mongo;
mod receiver_command;
mod reload;
mod reload_requests;
mod running;
mod shell;
mod status;
mod structure;
mod tail;
mod tls;
mod top;
mod traces;
mod troubles;
mod years;
