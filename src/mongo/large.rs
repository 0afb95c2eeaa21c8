//! Reads of many documents. While their documents are not in the memory of MongoDB, they may take
//! longer than the timeout of a read although MongoDB works. So each tenant has one at a time, and a
//! process has few, by turns over tenants. A timeout does not open the circuit breaker that all tenants
//! share.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::client::MongoError;
use crate::admission::aside::in_line;
use crate::id::BotId;
use crate::request_tenant;

/// Maximum number of large reads of one kind in a process: one tenant alone cannot use all.
const PLACES: usize = 2;

/// Lets large reads of one kind take turns.
#[derive(Debug, Clone, Default)]
pub(crate) struct LargeReads(Arc<Mutex<State>>);

/// For whom a read is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tenant {
    /// One that may have several bots.
    Known(u64),
    Bot(BotId),
}

#[derive(Debug, Default)]
struct State {
    /// The tenants with a place.
    reading: Vec<Tenant>,
    /// The tenants that wait, each with its reads in order of arrival. The first one without a place is
    /// next.
    waiting: VecDeque<(Tenant, VecDeque<oneshot::Sender<Place>>)>,
}

/// The place of a large read, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    /// `None`: it leaves none.
    of: Option<(LargeReads, Tenant)>,
}

impl LargeReads {
    /// Waits for the turn of the tenant, and for a place. A request that waits holds no place in flight. Few
    /// requests of a caller wait.
    ///
    /// # Errors
    /// [`MongoError::Crowded`].
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(crate) async fn take(&self, bot: &BotId) -> Result<Place, MongoError> {
        let tenant = request_tenant::current();
        let tenant = tenant.map_or_else(|| Tenant::Bot(bot.clone()), Tenant::Known);
        Ok(in_line(self.turn(tenant)).await?)
    }

    async fn turn(&self, tenant: Tenant) -> Place {
        let told = {
            let mut state = self.state();
            if state.reading.len() < PLACES && !state.reading.contains(&tenant) {
                state.reading.push(tenant.clone());
                return self.place(tenant);
            }
            state.wait(tenant)
        };
        // The sender is dropped only together with all reads that wait.
        told.await.unwrap_or(Place { of: None })
    }

    fn place(&self, tenant: Tenant) -> Place {
        Place { of: Some((self.clone(), tenant)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes the place of a tenant on.
    fn pass(&self, tenant: &Tenant) {
        let mut state = self.state();
        state.reading.retain(|other| other != tenant);
        while let Some((tenant, next)) = state.next() {
            match next.send(self.place(tenant.clone())) {
                Ok(()) => state.reading.push(tenant),
                // The read was cancelled. Dropping the place here must not call this function again.
                Err(mut place) => place.of = None,
            }
        }
    }
}

impl State {
    fn wait(&mut self, tenant: Tenant) -> oneshot::Receiver<Place> {
        let (tell, told) = oneshot::channel();
        match self.waiting.iter_mut().find(|(other, _)| *other == tenant) {
            Some((_, reads)) => {
                reads.retain(|one| !one.is_closed());
                reads.push_back(tell);
            }
            None => self.waiting.push_back((tenant, VecDeque::from([tell]))),
        }
        told
    }

    /// The first read of the next tenant, which then waits behind all others, if there is a place for it.
    fn next(&mut self) -> Option<(Tenant, oneshot::Sender<Place>)> {
        if self.reading.len() >= PLACES {
            return None;
        }
        let at = self.waiting.iter().position(|(tenant, _)| !self.reading.contains(tenant))?;
        let (tenant, mut reads) = self.waiting.remove(at)?;
        let next = reads.pop_front()?;
        if !reads.is_empty() {
            self.waiting.push_back((tenant.clone(), reads));
        }
        Some((tenant, next))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((reads, tenant)) = self.of.take() {
            reads.pass(&tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use futures_util::future::LocalBoxFuture;

    use super::*;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    /// The place of a read that does not wait.
    fn now(taking: impl Future<Output = Result<Place, MongoError>>) -> Option<Place> {
        taking.now_or_never().and_then(Result::ok)
    }

    /// A read of a bot of this tenant.
    fn read<'a>(
        reads: &'a LargeReads,
        tenant: u64,
        bot: &'a BotId,
    ) -> LocalBoxFuture<'a, Result<Place, MongoError>> {
        request_tenant::of(Some(tenant), reads.take(bot)).boxed_local()
    }

    #[test]
    fn a_bot_has_one_large_read_at_a_time_and_leaves_a_place_to_others() {
        let reads = LargeReads::default();
        let [greedy, quiet, third] = ["greedy", "quiet", "third"].map(bot);
        let first = now(reads.take(&greedy)).unwrap();
        assert!(now(reads.take(&greedy)).is_none());
        let other = now(reads.take(&quiet)).expect("the second place");
        assert!(now(reads.take(&third)).is_none());
        drop(other);
        assert!(now(reads.take(&third)).is_some());
        drop(first);
        assert!(now(reads.take(&greedy)).is_some());
        assert!(reads.state().reading.is_empty());
    }

    #[test]
    fn a_tenant_with_large_reads_of_many_bots_leaves_a_place_and_the_next_turn_to_others() {
        let reads = LargeReads::default();
        let bots: Vec<_> = (0..12).map(|number| bot(&format!("greedy-{number}"))).collect();
        let [quiet, third] = ["quiet", "third"].map(bot);
        let mut waiting: Vec<_> = bots.iter().map(|bot| read(&reads, 1, bot)).collect();
        let first = now(waiting.remove(0)).expect("nothing else is read");
        for one in &mut waiting {
            assert!(one.as_mut().now_or_never().is_none(), "its tenant reads already");
        }
        let other = now(read(&reads, 2, &quiet)).expect("the second place");
        let mut third = read(&reads, 3, &third);
        assert!(third.as_mut().now_or_never().is_none(), "both places are taken");
        drop(first);
        // The first tenant waited before the third one came. From then on they take turns.
        drop(now(waiting.remove(0)).expect("its tenant is next"));
        let third = now(third).expect("the other ten of the first tenant wait for it");
        assert!(waiting[0].as_mut().now_or_never().is_none());
        drop(other);
        assert!(now(waiting.remove(0)).is_some());
        drop((third, waiting));
        let state = reads.state();
        assert!(state.reading.is_empty() && state.waiting.len() <= 1, "{state:?}");
    }

    #[test]
    fn the_place_of_a_cancelled_read_goes_to_the_next() {
        let reads = LargeReads::default();
        let bot = bot("b");
        let first = now(read(&reads, 1, &bot)).unwrap();
        let mut cancelled = read(&reads, 1, &bot);
        let (mut late, mut next) = (read(&reads, 1, &bot), read(&reads, 1, &bot));
        for one in [&mut cancelled, &mut late, &mut next] {
            assert!(one.as_mut().now_or_never().is_none());
        }
        drop(cancelled);
        drop(first);
        // It has the place, and is cancelled before it sees it.
        drop(late);
        assert!(now(next).is_some());
        assert!(now(read(&reads, 1, &bot)).is_some());
    }
}
