//! How a connection ends: the codes and reasons of a close, and what this rank learns about the
//! peer from it.

use std::time::Duration;

use quinn::{ConnectionError, TransportErrorCode};

use crate::error::BootstrapKind;
use crate::wire::harmless::harmless;

/// Why a connection is closed, as the code of its close.
pub(crate) mod close_code {
    use quinn::VarInt;

    /// The rank has left in order.
    pub(crate) const LEFT: VarInt = VarInt::from_u32(1);
    /// The group has been aborted; the reason is the abort's frame.
    pub(crate) const ABORTED: VarInt = VarInt::from_u32(2);
    /// The rank's transport was dropped without a close.
    pub(crate) const DROPPED: VarInt = VarInt::from_u32(3);
    /// The rank is not admitted to the group; the reason says why.
    pub(crate) const REJECTED: VarInt = VarInt::from_u32(4);
    /// The frames after the handshake have not come in time: the rank may dial again.
    pub(crate) const LATE: VarInt = VarInt::from_u32(5);
}

/// Whether the peer has left the group in order.
pub(crate) fn is_leave(reason: &ConnectionError) -> bool {
    matches!(reason, ConnectionError::ApplicationClosed(close) if close.error_code == close_code::LEFT)
}

/// Whether the peer has given up or refused this rank, with a reason.
pub(crate) fn is_rejection(reason: &ConnectionError) -> bool {
    matches!(reason, ConnectionError::ApplicationClosed(close) if close.error_code == close_code::REJECTED)
}

/// Whether packets did not get through; false if a side has refused something.
///
/// A handshake that is complete for this side may lack its last packets on the other, which then
/// gives it up. A refusal has a code of its own.
pub(crate) fn is_silence(reason: &ConnectionError) -> bool {
    match reason {
        ConnectionError::TimedOut | ConnectionError::Reset => true,
        ConnectionError::ConnectionClosed(close) => close.error_code == TransportErrorCode::APPLICATION_ERROR,
        ConnectionError::ApplicationClosed(close) => close.error_code == close_code::LATE,
        _ => false,
    }
}

/// Whether the other side takes no handshake now: it has too many pending ones, or it was too slow
/// for the token of its own Retry. Nothing of this is authenticated.
pub(crate) fn is_busy(reason: &ConnectionError) -> bool {
    let busy = [TransportErrorCode::CONNECTION_REFUSED, TransportErrorCode::INVALID_TOKEN];
    matches!(reason, ConnectionError::ConnectionClosed(close) if busy.contains(&close.error_code))
}

/// TLS' alerts (RFC 8446) of a side that refuses a certificate; a rank sends the first,
/// `handshake_failure`.
const CERTIFICATE_ALERTS: [u8; 8] = [40, 42, 43, 44, 45, 46, 48, 51];

/// TLS' alert `certificate_unknown`, by which a rank refuses a certificate that is not valid yet.
pub(crate) const CLOCK_ALERT: u8 = 46;

fn is_certificate_alert(code: TransportErrorCode) -> bool {
    CERTIFICATE_ALERTS.iter().any(|&alert| code == TransportErrorCode::crypto(alert))
}

/// What kind of failure has ended a handshake, by TLS' alert: a number, whichever side sent it.
pub(crate) fn kind_of(reason: &ConnectionError) -> BootstrapKind {
    let code = match reason {
        ConnectionError::TransportError(error) => error.code,
        ConnectionError::ConnectionClosed(close) => close.error_code,
        _ => return BootstrapKind::Other,
    };
    match code {
        code if code == TransportErrorCode::crypto(CLOCK_ALERT) => BootstrapKind::Clock,
        code if is_certificate_alert(code) => BootstrapKind::Certificate,
        _ => BootstrapKind::Other,
    }
}

/// Why a handshake has ended. What the other side says in it is not repeated: it has not shown who
/// it is.
pub(crate) fn describe_stranger(reason: &ConnectionError) -> String {
    match reason {
        ConnectionError::ConnectionClosed(close) if is_certificate_alert(close.error_code) => {
            "it refuses the certificate of this rank; its own error says why".into()
        }
        ConnectionError::ConnectionClosed(close) => format!("it ended the handshake ({})", close.error_code),
        ConnectionError::ApplicationClosed(_) => "it ended the handshake".into(),
        other => describe(other),
    }
}

/// Why a connection has ended, as a statement about its peer, which has shown who it is.
pub(crate) fn describe(reason: &ConnectionError) -> String {
    match reason {
        ConnectionError::ApplicationClosed(close) if close.error_code == close_code::DROPPED => {
            "its endpoint was dropped without close".into()
        }
        ConnectionError::ApplicationClosed(close) if close.error_code == close_code::LEFT => {
            "it left before the others had finished".into()
        }
        ConnectionError::ApplicationClosed(close) if close.error_code == close_code::REJECTED => {
            harmless(&String::from_utf8_lossy(&close.reason))
        }
        ConnectionError::TimedOut => "its connection timed out".into(),
        ConnectionError::Reset => "its process does not know the connection any more".into(),
        // A refusal in the handshake, in the words of the side that refused.
        ConnectionError::TransportError(error) if !error.reason.is_empty() => {
            harmless(in_words(&error.reason))
        }
        ConnectionError::ConnectionClosed(close) if !close.reason.is_empty() => {
            harmless(in_words(&String::from_utf8_lossy(&close.reason)))
        }
        other => harmless(&other.to_string()),
    }
}

/// rustls puts words around the text of a refusal.
fn in_words(reason: &str) -> &str {
    let of_certificate = reason.strip_prefix("invalid peer certificate: Other(OtherError(");
    match of_certificate.and_then(|rest| rest.strip_suffix("))")) {
        Some(text) => text,
        None => reason.strip_prefix("unexpected error: ").unwrap_or(reason),
    }
}

/// The part of a text that fits the reason of a close, which must fit one small packet.
pub(crate) fn cut(text: &str) -> &str {
    let mut end = text.len().min(700);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// How long to wait until a refused peer has read the reason.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quinn::{ApplicationClose, ConnectionClose};

    use super::*;

    #[test]
    fn a_rank_dials_again_where_the_other_side_had_no_place_or_was_slow() {
        let busy = |error_code| {
            let close = ConnectionClose { error_code, frame_type: None, reason: Bytes::new() };
            is_busy(&ConnectionError::ConnectionClosed(close))
        };
        assert!(busy(TransportErrorCode::CONNECTION_REFUSED));
        assert!(busy(TransportErrorCode::INVALID_TOKEN));
        assert!(!busy(TransportErrorCode::PROTOCOL_VIOLATION));
    }

    #[test]
    fn an_alert_says_what_kind_of_failure_it_is_and_a_text_never_does() {
        let text = "the certificate of rank 1 has expired: issue a new certificate";
        let of_peer = |error_code| {
            let close = ConnectionClose { error_code, frame_type: None, reason: Bytes::from(text) };
            ConnectionError::ConnectionClosed(close)
        };
        assert_eq!(kind_of(&of_peer(TransportErrorCode::crypto(45))), BootstrapKind::Certificate);
        assert_eq!(kind_of(&of_peer(TransportErrorCode::crypto(CLOCK_ALERT))), BootstrapKind::Clock);
        assert_eq!(kind_of(&of_peer(TransportErrorCode::PROTOCOL_VIOLATION)), BootstrapKind::Other);
        let close = ApplicationClose { error_code: close_code::REJECTED, reason: Bytes::from(text) };
        let rejected = ConnectionError::ApplicationClosed(close);
        assert_eq!(kind_of(&rejected), BootstrapKind::Other);
        assert_eq!(describe(&rejected), text);
    }
}
