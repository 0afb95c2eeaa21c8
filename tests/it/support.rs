//! Private servers, broken networks and further processes for the tests.

pub(crate) mod clocked;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod wait;
