//! A custom handler: counts the orders of each bot. `cargo run --example custom_handler`
use std::collections::HashMap;
use std::sync::Mutex;

use fairlane::app::App;
use fairlane::config::{Config, PipelineConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::PipelineName;
use fairlane::lifecycle::Shutdown;

#[derive(Default)]
struct Orders(Mutex<HashMap<String, u64>>);

impl Handler for Orders {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let mut orders = self.0.lock().map_err(|_| Failure::transient(0, "poisoned"))?;
        let count = orders.entry(slice.bot.to_string()).or_default();
        *count += slice.events.len() as u64;
        println!("{} has {count} orders", slice.bot);
        Ok(Outcomes::done())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = Config::load(None)?;
    let orders = PipelineConfig::new("orders", ["order.*"]);
    config.pipelines.insert(PipelineName::parse("orders")?, orders);
    let shutdown = Shutdown::new();
    shutdown.listen_for_signals(config.shutdown_delay, config.shutdown_grace)?;
    App::builder(config).handler("orders", Orders::default()).build().await?.run(shutdown).await?;
    Ok(())
}
