//! A custom handler: adds up the prices of each bot's orders. `cargo run --example custom_handler`
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fairlane::app::{self, App};
use fairlane::config::{Config, PipelineConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::PipelineName;
use fairlane::telemetry::{self, LevelFilter, LogFormat};

#[derive(serde::Deserialize)]
struct Order {
    price: u64,
}

/// Both instances add to the same map during a reload.
#[derive(Clone, Default)]
struct Orders(Arc<Mutex<HashMap<String, u64>>>);

impl Handler for Orders {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let mut spent = self.0.lock().map_err(|_| Failure::transient(0, "poisoned"))?;
        for (at, delivery) in slice.events.iter().enumerate() {
            // No attempt can read such an order: it becomes a dead letter.
            let order = delivery.event.data_as::<Order>();
            let order = order.map_err(|error| Failure::permanent(at, error.to_string()))?;
            *spent.entry(slice.bot.to_string()).or_default() += order.price;
        }
        println!("{} has spent {}", slice.bot, spent[slice.bot.as_str()]);
        Ok(Outcomes::done())
    }
}

/// The text of an error names the remedy.
pub(crate) fn main() {
    if let Err(error) = serve() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

#[tokio::main]
async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    // Or install a subscriber of `tracing`.
    telemetry::init(LogFormat::Text, LevelFilter::INFO)?;
    let (name, orders) = (PipelineName::parse("orders")?, Orders::default());
    let builder = move |mut config: Config| {
        let pipeline = PipelineConfig::new("orders", ["order.*"]);
        config.pipelines.entry(name.clone()).or_insert(pipeline);
        App::builder(config).handler("orders", orders.clone())
    };
    app::serve(Config::load(None)?, builder).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fairlane::clock::SystemClock;
    use fairlane::event::Event;
    use fairlane::handler::{Delivery, FailureKind};
    use fairlane::id::{BotId, Fence, Sequence};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn an_order_without_a_price_is_dead_and_those_before_it_count() {
        let bot = BotId::parse("shop-7").unwrap();
        let order = |number, field: &str| {
            let event = Event::builder("order.paid", &bot).data(&HashMap::from([(field, 12)]));
            Delivery { sequence: Sequence::new(number), event: event.unwrap().build().unwrap() }
        };
        let slice = |events| {
            let deadline = Instant::now() + Duration::from_secs(20);
            Slice::new(bot.clone(), Fence::new(1), 1, deadline, events)
        };
        let pipeline = PipelineName::parse("orders").unwrap();
        let environment = Environment { clock: Arc::new(SystemClock), pipeline };
        let orders = Orders::default();
        let handle = async |events| orders.handle(&environment, &slice(events)).await;

        let done = handle(vec![order(1, "price")]).await.unwrap();
        assert_eq!(done.settled(), None, "all are done");
        let failure = handle(vec![order(2, "price"), order(3, "prize")]).await.unwrap_err();
        assert_eq!((failure.kind(), failure.at()), (FailureKind::Permanent, Some(1)));
        assert!(failure.reason().contains("price"), "{}", failure.reason());
        assert_eq!(orders.0.lock().unwrap()["shop-7"], 24);
    }
}
