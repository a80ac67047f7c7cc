//! Dialling several addresses of one peer: one after the other with a short pause, and the first
//! that succeeds wins (RFC 8305).

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::sleep;

/// Starts the futures in their order, each [`STAGGER`] after the one before or as soon as one has
/// failed. Returns the first value and drops the other futures, or all errors.
pub(crate) async fn first_ok<T, E, F: Future<Output = Result<T, E>>>(futures: Vec<F>) -> Result<T, Vec<E>> {
    let mut waiting = futures.into_iter().peekable();
    let mut running: Vec<Pin<Box<F>>> = Vec::new();
    let mut errors = Vec::new();
    loop {
        running.extend(waiting.next().map(Box::pin));
        if running.is_empty() {
            return Err(errors);
        }
        let more = waiting.peek().is_some();
        let mut pause = std::pin::pin!(sleep(STAGGER));
        let ended = std::future::poll_fn(|context| {
            for at in 0..running.len() {
                if let Poll::Ready(result) = running[at].as_mut().poll(context) {
                    drop(running.remove(at));
                    return Poll::Ready(Some(result));
                }
            }
            if more && pause.as_mut().poll(context).is_ready() { Poll::Ready(None) } else { Poll::Pending }
        });
        match ended.await {
            Some(Ok(value)) => return Ok(value),
            Some(Err(error)) => errors.push(error),
            None => {}
        }
    }
}

/// Addresses in a sentence: `10.0.0.1:1` or `10.0.0.1:1 or [fd00::1]:1`.
pub(crate) fn listed(addresses: &[SocketAddr]) -> String {
    let mut text = String::new();
    for address in addresses {
        let or = if text.is_empty() { "" } else { " or " };
        let _ = write!(text, "{or}{address}");
    }
    text
}

/// Between the dials of two addresses.
const STAGGER: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[test]
    fn the_first_success_wins_and_a_failure_starts_the_next_at_once() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let dial = async |ms, result: Result<u8, u8>| {
                sleep(Duration::from_millis(ms)).await;
                result
            };
            let started = Instant::now();
            // Silent for ever, then a fast one: it is dialled after the pause.
            assert_eq!(first_ok(vec![dial(1_000_000, Err(0)), dial(10, Ok(1))]).await, Ok(1));
            assert_eq!(started.elapsed().as_millis(), 260);
            // The first needs longer than the pause, and is still faster.
            assert_eq!(first_ok(vec![dial(300, Ok(0)), dial(200, Ok(1))]).await, Ok(0));
            assert_eq!(started.elapsed().as_millis(), 560);
            assert_eq!(first_ok(vec![dial(10, Err(0)), dial(10, Err(1)), dial(10, Ok(2))]).await, Ok(2));
            assert_eq!(started.elapsed().as_millis(), 590);
            assert_eq!(first_ok(vec![dial(20, Err(0)), dial(10, Err(1))]).await, Err(vec![0, 1]));
            assert_eq!(first_ok(vec![dial(20, Err(0))].split_off(1)).await, Err(Vec::new()));
        });
    }
}
