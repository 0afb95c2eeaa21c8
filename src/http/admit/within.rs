//! A future that ends at its deadline.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::Instant;

/// The deadline passed.
pub(super) struct Late;

/// A future that is not polled after its deadline, so that it starts no new work.
pub(super) struct Within<F> {
    deadline: Pin<Box<tokio::time::Sleep>>,
    inner: Pin<Box<F>>,
}

impl<F> Within<F> {
    pub(super) fn new(deadline: Instant, inner: F) -> Self {
        Self { deadline: Box::pin(tokio::time::sleep_until(deadline)), inner: Box::pin(inner) }
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Result<F::Output, Late>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if Instant::now() >= self.deadline.deadline() {
            return Poll::Ready(Err(Late));
        }
        if let Poll::Ready(output) = self.inner.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        self.deadline.as_mut().poll(context).map(|()| Err(Late))
    }
}
