//! The cryptography of TLS, and the error of settings that it refuses.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use crate::error::TransportError;

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

pub(crate) fn cannot_set_up(error: impl std::fmt::Display) -> TransportError {
    TransportError::bootstrap(format!("cannot set up TLS: {error}"))
}
