//! One tenant cannot stop, degrade or learn of another: a test for each shared resource, with one
//! hostile tenant.

mod fleet;
mod keys;
