//! Waiting for a completion until a moment.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The output of `future`, unless it has none at the moment `until`. Blocks until then.
pub(crate) fn wait_until<F: Future + Unpin>(future: &mut F, until: Instant) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut context) {
            return Some(output);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_completion_is_waited_for_and_not_longer_than_until_the_moment() {
        let mut never = std::future::pending::<()>();
        assert!(wait_until(&mut never, Instant::now()).is_none());
        assert!(wait_until(&mut never, Instant::now() + Duration::from_millis(5)).is_none());
        let (sender, receiver) = futures_util::future::abortable(std::future::pending::<()>());
        let thread = std::thread::spawn(move || receiver.abort());
        assert!(wait_until(&mut Box::pin(sender), Instant::now() + Duration::from_secs(60)).is_some());
        thread.join().expect("the other thread");
    }
}
