//! Buses beside Redis Streams, with the servers that `.ci/setup test` installs.

mod engines;
