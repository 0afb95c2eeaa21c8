//! The automations: rules decide in order, and their actions happen once, whatever fails.

mod actions;
mod faults;
mod hangs;
mod http;
mod recent;
mod replay;
mod rules;
