//! What rank 0 says to those who come over the carrier that it does not use: they would wait in vain for an answer.

use std::future::pending;

use quinn::{Endpoint, EndpointConfig, TokioRuntime};
use tokio::time::timeout;

use super::QuicConfig;
use super::bootstrap::GOODBYE_PATIENCE;
use super::control::close_code;
use super::core::COORDINATOR;
use super::link::Carrier;
use super::seat::Seat;
use super::socket;
use super::tls::TlsConfigs;
use super::tunnel;

/// Turns everybody away until it is dropped. Does nothing if the port of the other carrier is not free.
pub(crate) async fn turn_away(seat: &Seat) -> std::convert::Infallible {
    let (config, tls) = (&seat.config, &seat.tls);
    if config.rank == COORDINATOR {
        let (mine, other) = match config.link.carrier {
            Carrier::Udp => (Carrier::Udp, Carrier::Tcp),
            Carrier::Tcp => (Carrier::Tcp, Carrier::Udp),
        };
        let text = format!(
            "rank 0 is reached over {mine}, and this rank came over {other}: say the same of the network on all ranks"
        );
        match other {
            Carrier::Tcp => tunnel::turn_away(config.local_address(), &text).await,
            Carrier::Udp => turn_away_udp(config, tls, &text).await,
        }
    }
    pending().await
}

/// A refusal needs a handshake, so that it is heard by members only and cannot be forged.
async fn turn_away_udp(config: &QuicConfig, tls: &TlsConfigs, text: &str) {
    let Ok(socket) = socket::bind_udp(config.local_address()) else { return };
    let runtime = std::sync::Arc::new(TokioRuntime);
    let Ok(endpoint) = Endpoint::new(EndpointConfig::default(), Some(tls.server()), socket, runtime) else {
        return;
    };
    while let Some(incoming) = endpoint.accept().await {
        // One after the other: nobody is in a hurry to be refused.
        if let Ok(connecting) = incoming.accept()
            && let Ok(Ok(connection)) = timeout(GOODBYE_PATIENCE, connecting).await
        {
            connection.close(close_code::REJECTED, text.as_bytes());
        }
    }
}
