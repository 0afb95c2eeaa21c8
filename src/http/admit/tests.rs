//! Large bodies, behind a gate of their own.

use axum::http::header;
use axum::{Router, routing};
use futures_util::stream;
use hyper::body::Bytes;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tower::ServiceExt as _;

use super::super::admitted;
use super::*;
use crate::admission::{Settings, system_ticks};

const PATH: &str = "/large";
const LARGE: usize = 1 << 20;

struct Rig {
    admission: Arc<Admission>,
    routes: Router,
    /// How many requests may end.
    ends: Arc<Semaphore>,
    asked: JoinSet<StatusCode>,
}

impl Rig {
    fn new() -> Self {
        let admission = Admission::new(Settings::default(), system_ticks());
        let rows = [("*", PATH, Class::P2, LARGE)];
        let gate = AdmissionGate::new(Arc::clone(&admission), QuotaSettings::default(), &rows);
        let ends = Arc::new(Semaphore::new(0));
        let held = Arc::clone(&ends);
        let handler = async move || held.acquire().await.unwrap().forget();
        let routes = Router::new().route(PATH, routing::post(handler));
        let routes = admitted(routes, Arc::new(gate));
        Self { admission, routes, ends, asked: JoinSet::new() }
    }

    /// Sends a head that announces a large body. The result sends the body.
    fn ask(&mut self) -> oneshot::Sender<Bytes> {
        let (send, body) = oneshot::channel();
        let request = axum::http::Request::post(PATH).header(header::CONTENT_LENGTH, LARGE);
        let request = request.body(Body::from_stream(stream::once(body))).unwrap();
        let routes = self.routes.clone();
        self.asked.spawn(async move { routes.oneshot(request).await.unwrap().status() });
        send
    }

    /// Lets all requests go on as far as they can. Returns how many places are taken, and how many requests
    /// wait for one.
    async fn settles(&self) -> (usize, usize) {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let state = self.admission.state();
        (state.in_flight, state.waiting.iter().sum())
    }
}

#[tokio::test(start_paused = true)]
async fn a_large_body_takes_its_places_only_once_it_is_there_and_then_waits_for_them() {
    let mut rig = Rig::new();
    let bodies: [_; 3] = std::array::from_fn(|_| rig.ask());
    assert_eq!(rig.settles().await, (3, 0), "the heads take one place each");
    // The class may use 28 places; one request gets at most half of them.
    for (body, settled) in bodies.into_iter().zip([(14 + 2, 0), (2 * 14 + 1, 0), (2 * 14, 1)]) {
        body.send(Bytes::from(vec![b' '; LARGE])).unwrap();
        assert_eq!(rig.settles().await, settled);
    }
    rig.ends.add_permits(1);
    assert_eq!(rig.settles().await, (2 * 14, 0), "the third one has its places");
    rig.ends.add_permits(2);
    while let Some(code) = rig.asked.join_next().await {
        assert_eq!(code.unwrap(), StatusCode::OK);
    }
    assert_eq!(rig.settles().await, (0, 0));
}
