//! A custom handler: counts the orders of each bot. `cargo run --example custom_handler`
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fairlane::app::{self, App};
use fairlane::config::{Config, PipelineConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::PipelineName;

/// Both instances count in the same map during a reload.
#[derive(Clone, Default)]
struct Orders(Arc<Mutex<HashMap<String, u64>>>);

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
    let (name, orders) = (PipelineName::parse("orders")?, Orders::default());
    let builder = move |mut config: Config| {
        let pipeline = PipelineConfig::new("orders", ["order.*"]);
        config.pipelines.entry(name.clone()).or_insert(pipeline);
        App::builder(config).handler("orders", orders.clone())
    };
    app::serve(Config::load(None)?, builder).await?;
    Ok(())
}
