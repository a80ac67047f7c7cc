//! A hand-made rank 0 with a valid certificate. It forms a group of two; then the test decides what
//! it sends.

use std::sync::Arc;

use kyklos_transport::wire::{Candidates, Frame, Purpose};
use quinn::Endpoint;
use quinn::crypto::rustls::QuicServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::member::Line;
use super::{Job, LONG, welcome};

/// The coordinator of a group of two.
pub(crate) struct Coordinator {
    /// From rank 1.
    pub(crate) control: Line,
    _data: Line,
    _endpoint: Endpoint,
}

impl Coordinator {
    /// Waits for rank 1 and starts the group. It sends no heartbeats: the test must be over within
    /// two seconds.
    pub(crate) async fn form(job: &Job) -> Self {
        Self::form_after_refusals(job, 0).await
    }

    /// The same, but it first refuses so many handshakes, as a rank 0 does that has too many
    /// pending ones.
    pub(crate) async fn form_after_refusals(job: &Job, refusals: usize) -> Self {
        Self::form_as(job, refusals, &welcome()).await
    }

    /// The same, with this answer to every hello.
    pub(crate) async fn form_as(job: &Job, refusals: usize, welcome: &Frame) -> Self {
        let pem = job.identity_pem(0);
        let certificates = CertificateDer::pem_slice_iter(&pem).map(Result::unwrap).collect();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates, PrivateKeyDer::from_pem_slice(&pem).unwrap())
            .unwrap();
        tls.alpn_protocols = vec![b"kyklos-ctl/1".to_vec(), b"kyklos/1".to_vec()];
        let crypto = Arc::new(QuicServerConfig::try_from(tls).unwrap());
        let endpoint = Endpoint::server(quinn::ServerConfig::with_crypto(crypto), job.coordinator).unwrap();
        for _ in 0..refusals {
            endpoint.accept().await.unwrap().refuse();
        }
        let admit = async |wanted: Purpose| {
            let connection = endpoint.accept().await.unwrap().await.unwrap();
            let (send, recv) = connection.accept_bi().await.unwrap();
            let mut line = Line::new(connection, send, recv);
            let hello = line.hear(LONG).await;
            assert!(matches!(hello, Some(Frame::Hello { purpose, .. }) if purpose == wanted), "{hello:?}");
            line.say(&welcome.encode()).await;
            line
        };
        let mut control = admit(Purpose::Control).await;
        assert_eq!(control.hear(LONG).await, Some(Frame::Advertise { addresses: Vec::new() }));
        let rows = [Vec::new(), vec![control.connection.remote_address()]];
        let candidates = Candidates::split(&rows).remove(0);
        control.say(&Frame::AddressTable { candidates }.encode()).await;
        let data = admit(Purpose::Data).await;
        assert_eq!(control.hear(LONG).await, Some(Frame::Meshed));
        control.say(&Frame::Start.encode()).await;
        Self { control, _data: data, _endpoint: endpoint }
    }
}
