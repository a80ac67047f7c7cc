//! What a rank makes of a listener that refuses TCP. The refusal is not authenticated: it is a
//! hint, and the rank keeps dialling.

use std::net::SocketAddr;

use tokio::sync::watch;

use super::staggered::listed;

/// Becomes true when a dialled listener has refused TCP; `None` over UDP.
pub(crate) type RefusedFlag = Option<watch::Receiver<bool>>;

/// Waits until a dialled listener has refused TCP; waits for ever over UDP.
pub(crate) async fn refusal(refused: RefusedFlag) {
    if let Some(mut refused) = refused
        && refused.wait_for(|refused| *refused).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// The words for a rank that was not reached at the addresses, if a listener has refused TCP;
/// otherwise empty.
pub(crate) fn refusal_hint(refused: &RefusedFlag, addresses: &[SocketAddr]) -> String {
    if refused.as_ref().is_none_or(|refused| !*refused.borrow()) {
        return String::new();
    }
    format!(
        "; a process at {} answered a TCP stream with the refusal of a rank 0 that uses UDP. Anybody can send that; if it is rank 0, \
         use the same carrier on all ranks",
        listed(addresses)
    )
}
