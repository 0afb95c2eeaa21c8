//! One tenant cannot stop, degrade or learn of another: a test for each shared resource, with one
//! hostile tenant.

mod answers;
mod backlog;
mod fleet;
mod http;
mod input;
mod keys;
mod leases;
mod limits;
mod listings;
mod outbound;
mod passing;
mod profiles;
mod quotas;
mod reads;
mod rule_sets;
mod rules;
mod signatures;
mod slices;
mod slots;
mod tokens;
