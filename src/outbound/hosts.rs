//! Limits the concurrent requests to one host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

type Key = (String, u16);

/// The hosts with requests in flight or waiting. Other hosts are forgotten, so there are never more
/// entries than requests.
#[derive(Debug)]
pub(super) struct Hosts {
    max: usize,
    called: Mutex<HashMap<Key, Arc<Semaphore>>>,
}

impl Hosts {
    /// Allows each host `max` concurrent requests.
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, called: Mutex::default() })
    }

    /// The maximum number of concurrent requests to a host.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Waits for a place until `until`. `None`: no place became free.
    ///
    /// # Cancel safety
    /// Nothing is lost, and no place is taken.
    pub(super) async fn place(
        self: &Arc<Self>,
        host: &str,
        port: u16,
        until: Instant,
    ) -> Option<HostPermit> {
        let key = (host.to_owned(), port);
        let places = {
            let mut called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(Semaphore::new(self.max));
            Arc::clone(called.entry(key.clone()).or_insert_with(new))
        };
        // From here on, dropping `place` removes an entry that is no longer used.
        let mut place = HostPermit { hosts: Arc::clone(self), key, places, permit: None };
        let waiting = Arc::clone(&place.places).acquire_owned();
        // The semaphore is never closed.
        place.permit = tokio::time::timeout_at(until, waiting).await.ok()?.ok();
        place.permit.is_some().then_some(place)
    }

    /// Number of hosts with requests in flight or waiting.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.called.lock().unwrap().len()
    }
}

/// A request's place at its host. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct HostPermit {
    hosts: Arc<Hosts>,
    key: Key,
    places: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for HostPermit {
    fn drop(&mut self) {
        let mut called = self.hosts.called.lock().unwrap_or_else(PoisonError::into_inner);
        // The permit also holds a clone of the semaphore. All other clones are made under this
        // lock.
        self.permit = None;
        // No other request: only the map and this permit refer to the semaphore.
        if Arc::strong_count(&self.places) == 2 {
            called.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(1)
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_has_so_many_places_and_another_one_its_own() {
        let hosts = Hosts::new(2);
        let first = hosts.place("a", 80, soon()).await.unwrap();
        let second = hosts.place("a", 80, soon()).await.unwrap();
        assert!(hosts.place("a", 80, soon()).await.is_none());
        assert!(hosts.place("a", 81, soon()).await.is_some());
        assert!(hosts.place("b", 80, soon()).await.is_some());
        drop(first);
        let third = hosts.place("a", 80, soon()).await;
        assert!(third.is_some());
        drop((second, third));
    }

    #[tokio::test(start_paused = true)]
    async fn hosts_that_are_not_called_are_forgotten() {
        let hosts = Hosts::new(1);
        let place = hosts.place("a", 80, soon()).await.unwrap();
        assert!(hosts.place("a", 80, soon()).await.is_none());
        assert_eq!(hosts.len(), 1, "one is still called");
        let mut waiting = Box::pin(hosts.place("a", 80, soon()));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(waiting);
        assert_eq!(hosts.len(), 1);
        drop(place);
        assert_eq!(hosts.len(), 0);
    }
}
