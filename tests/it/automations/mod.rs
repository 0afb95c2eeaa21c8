//! The automations: rules decide in order, and their actions happen once, whatever fails.

mod actions;
mod faults;
mod hangs;
mod http;
mod indexes;
mod recent;
mod replay;
mod rules;
