//! Refuses ranks that dial rank 0 over the carrier that it does not use: they would wait for an
//! answer until their deadline.

use std::future::pending;
use std::sync::Arc;

use quinn::{Endpoint, EndpointConfig, TokioRuntime};
use tokio::time::timeout;

use super::admission::Admission;
use super::config::QuicConfig;
use super::endpoint::RankEndpoint;
use super::refusals::AdmissionRefusal;
use crate::quic::network::binding;
use crate::quic::network::connection::{CLOSE_TIMEOUT, close_code};
use crate::quic::network::path::Carrier;
use crate::quic::network::tcp::tunnel;
use crate::quic::trust::tls;
use crate::rank::Rank;

/// Refuses every connection until it is dropped. Does nothing if the port of the other carrier is
/// not free.
pub(crate) async fn refuse_all(endpoint: &RankEndpoint) -> std::convert::Infallible {
    let config = &endpoint.config;
    if config.rank == Rank::COORDINATOR {
        let (mine, other) = match config.link.carrier {
            Carrier::Udp => (Carrier::Udp, Carrier::Tcp),
            Carrier::Tcp => (Carrier::Tcp, Carrier::Udp),
        };
        let text = format!(
            "rank 0 is reached over {mine}, and this rank came over {other}: use the same carrier on all ranks"
        );
        // For the error that says which ranks are missing.
        let words = format!(
            "it came over {other}, and rank 0 is reached over {mine}: use the same carrier on all ranks"
        );
        match other {
            Carrier::Tcp => {
                // Any program can open a stream.
                let note = |from| {
                    endpoint.admission.note_refusal(from, &AdmissionRefusal::of_stranger(words.clone()))
                };
                tunnel::refuse_all(config.local_address(), &text, note).await;
            }
            Carrier::Udp => refuse_all_udp(config, &endpoint.admission, &text, &words).await,
        }
    }
    pending().await
}

/// A refusal needs a handshake: only members and ranks with a token get it, and it cannot be
/// forged.
async fn refuse_all_udp(config: &QuicConfig, admission: &Admission, text: &str, words: &str) {
    let Ok(socket) = binding::bind_udp(config.local_address()) else { return };
    let runtime = Arc::new(TokioRuntime);
    let Ok(endpoint) = Endpoint::new(EndpointConfig::default(), Some(admission.server()), socket, runtime)
    else {
        return;
    };
    while let Some(incoming) = endpoint.accept().await {
        // One after the other: a refusal is not urgent.
        if let Ok(connecting) = incoming.accept_with(Arc::new(admission.server()))
            && let Ok(Ok(connection)) = timeout(CLOSE_TIMEOUT, connecting).await
        {
            connection.close(close_code::REJECTED, text.as_bytes());
            let proven = tls::proven_claims(&connection).is_ok_and(|claims| claims.job == config.job);
            let refusal = AdmissionRefusal { proven, ..AdmissionRefusal::of_stranger(words) };
            admission.note_refusal(connection.remote_address().ip(), &refusal);
        }
    }
}
