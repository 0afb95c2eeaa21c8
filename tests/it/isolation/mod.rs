//! One tenant cannot stop, delay or look into another, whatever it shares with it.

mod http;
mod tokens;
