//! tmp
#[global_allocator]
static A: mimalloc::MiMalloc = mimalloc::MiMalloc;
#[tokio::main]
async fn main() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let a: Vec<String> = std::env::args().collect();
    let n = |i: usize, d: usize| a.get(i).and_then(|x| x.parse().ok()).unwrap_or(d);
    match a[1].as_str() {
        "pipeline" => {
            let r = fairlane::bench::pipeline::run(
                fairlane::bench::pipeline::Options {
                    bots: n(2, 50000),
                    events: n(3, 500000),
                    bytes: 200,
                    workers: n(4, 64),
                },
                |_, _| {},
            )
            .await;
            println!("{r:#?}");
        }
        "latency" => {
            let r = fairlane::bench::latency::run(
                fairlane::bench::latency::Options {
                    rate: n(2, 5000) as u64,
                    seconds: n(3, 5) as u64,
                    bots: 10000,
                    workers: n(4, 64),
                },
                |_, _| {},
            )
            .await;
            println!("{r:#?}");
        }
        "demo" => {
            let r = fairlane::demo::run(
                fairlane::demo::Options {
                    bots: n(2, 5000),
                    rate: n(3, 5000) as u64,
                    seconds: n(4, 10) as u64,
                },
                |m| println!("{m}"),
                |look| print!("{}", fairlane::demo::draw(look)),
            )
            .await;
            println!("{r:#?}");
        }
        _ => {
            let r = fairlane::bench::fairness::run(
                fairlane::bench::fairness::Options {
                    busy: 20,
                    backlog: n(2, 5000),
                    quiet: 500,
                    quiet_rate: 100,
                    handling: std::time::Duration::from_millis(3),
                    consumers: 8,
                    giant: n(3, 0),
                    window: std::time::Duration::from_secs(n(4, 20) as u64),
                },
                |_, _| {},
            )
            .await;
            println!("{r:#?}");
        }
    }
}
