//! Futures that run side by side on one task.

use std::pin::Pin;
use std::task::Poll;

/// Runs futures side by side, until all have their values or one fails.
pub(super) async fn all<T, E, F: Future<Output = Result<T, E>> + Unpin>(
    futures: Vec<F>,
) -> Result<Vec<T>, E> {
    let mut values: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    let mut running: Vec<(usize, F)> = futures.into_iter().enumerate().collect();
    std::future::poll_fn(|context| {
        let mut failed = None;
        running.retain_mut(|(place, future)| match Pin::new(future).poll(context) {
            Poll::Ready(Ok(value)) => {
                values[*place] = Some(value);
                false
            }
            Poll::Ready(Err(error)) => {
                failed.get_or_insert(error);
                false
            }
            Poll::Pending => true,
        });
        match failed {
            Some(error) => Poll::Ready(Err(error)),
            None if running.is_empty() => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    })
    .await?;
    Ok(values.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::all;

    #[test]
    fn futures_run_side_by_side_and_the_first_error_ends_them() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let wait = |result: Result<u64, u64>| {
                Box::pin(async move {
                    tokio::time::sleep(Duration::from_secs(result.unwrap_or_else(|error| error))).await;
                    result
                })
            };
            let started = Instant::now();
            assert_eq!(all(vec![wait(Ok(3)), wait(Ok(1)), wait(Ok(2))]).await, Ok(vec![3, 1, 2]));
            assert_eq!(started.elapsed().as_secs(), 3);
            assert_eq!(all(vec![wait(Ok(9)), wait(Err(1))]).await, Err(1));
            assert_eq!(started.elapsed().as_secs(), 4);
        });
    }
}
