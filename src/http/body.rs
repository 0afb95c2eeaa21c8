//! An answer body that keeps a value until it has been sent.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use hyper::body::{Bytes, Frame, SizeHint};

/// A body and a value that is dropped with it: when the connection has sent the body, or closes.
pub(super) struct Keeping<K> {
    body: Body,
    _kept: K,
}

impl<K> Keeping<K> {
    pub(super) fn new(body: Body, kept: K) -> Self {
        Self { body, _kept: kept }
    }
}

impl<K: Unpin> hyper::body::Body for Keeping<K> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
