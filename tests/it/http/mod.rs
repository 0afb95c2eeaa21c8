//! The HTTP interface: its contract, tokens and refusals, hostile requests, overload, and the web
//! pages in a real browser.

mod audit;
mod auth;
mod balancers;
mod browser;
mod choices;
mod contract;
mod cors;
mod customer;
mod events;
mod explained;
mod far;
mod find;
mod hostile;
mod letters;
mod looks;
mod operators;
mod overload;
mod pages;
mod proxies;
mod refusals;
mod rolling;
mod seconds;
