//! Texts of strangers and of peers: a stranger's are not repeated, and a peer's cannot forge a line
//! of a log.

use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::quic::QuicConfig;
use kyklos_transport::wire::{Frame, PROTOCOL_VERSION, Purpose};
use kyklos_transport::{Abort, AbortCause, Progress, Rank, RefusalReason, Vote};
use quinn::crypto::rustls::QuicClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

use crate::common::member::Member;
use crate::common::*;

/// Ends every handshake with a text of its own, before it has shown who it is.
#[derive(Debug)]
struct Forger(String);

impl ServerCertVerifier for Forger {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Err(Error::General(self.0.clone()))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256, SignatureScheme::ED25519]
    }
}

/// Dials rank 0, and waits a moment for the end of the connection.
fn dial(job: &Job, tls: rustls::ClientConfig, hello: Option<Frame>) {
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = quinn::Endpoint::client((std::net::Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let connecting = endpoint.connect_with(config, job.coordinator, &job.name(0)).unwrap();
        if let (Ok(connection), Some(hello)) = (connecting.await, hello) {
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            let _ = send.write_all(&hello.encode()).await;
            let _ = tokio::time::timeout(Duration::from_secs(3), connection.closed()).await;
        }
        let _ = tokio::time::timeout(Duration::from_secs(1), endpoint.wait_idle()).await;
    });
}

#[test]
fn a_stranger_cannot_put_words_into_the_error_of_rank_0() {
    let job = Job::new();
    let config = QuicConfig { connect_deadline: Duration::from_secs(12), ..job.config(0, 2) };
    let zero = connect(config);
    std::thread::sleep(Duration::from_millis(200));
    for stranger in 0..6 {
        let mut tls = job.tls(None, "kyklos-ctl/1");
        let text = format!("no\nerror: rank 1 is broken ({stranger})\u{1b}[2J");
        tls.dangerous().set_certificate_verifier(Arc::new(Forger(text)));
        dial(&job, tls, None);
    }
    // The reason of a member is still remembered.
    let hello = Frame::Hello {
        protocol: PROTOCOL_VERSION,
        purpose: Purpose::Control,
        job: job.id.0,
        epoch: 0,
        rank: Rank(1),
        size: 2,
    };
    dial(&job, job.tls(Some(5), "kyklos-ctl/1"), Some(hello));
    let error = zero.join().unwrap().unwrap_err().to_string();
    assert!(!error.contains("broken") && !error.chars().any(char::is_control), "{error:?}");
    assert!(error.contains("rank 1 has the certificate of rank 5"), "{error:?}");
    assert!(error.contains("6 connections without a proven identity"), "{error:?}");
}

/// The error of rank 0 of two, after rank 1 has sent `frame`.
fn error_after(frame: &Frame) -> String {
    let job = Job::new();
    let zero = connect(job.config(0, 2));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let member = Member::join(&job, 2).await;
        let zero = tokio::task::spawn_blocking(move || zero.join().unwrap().unwrap()).await.unwrap();
        let agreed = zero.agree(Vote::ready([0; 32]), Duration::from_secs(10));
        member.control.say(&frame.encode()).await;
        let error = agreed.await.unwrap_err().to_string();
        let _ = zero.close(Duration::from_secs(1)).await;
        error
    })
}

#[test]
fn control_characters_in_the_text_of_a_member_are_escaped() {
    let text = "it ended\nerror: rank 0 is broken\r\u{1b}[2J\u{9b}31m";
    let abort = Abort {
        culprit: Rank(1),
        cause: AbortCause::Failed(text.to_owned()),
        progress: Progress { op: 0, step: 0 },
    };
    let lost = Frame::LinkLost { peer: Rank(1), text: text.to_owned() };
    let refuse = Frame::Vote { vote: Vote::Refuse { reason: RefusalReason::Failed, text: text.to_owned() } };
    for frame in [Frame::Abort { abort }, lost, refuse] {
        let error = error_after(&frame);
        assert!(!error.chars().any(char::is_control), "{error:?}");
        assert!(error.contains(r"it ended\nerror: rank 0 is broken\r\u{1b}[2J\u{9b}31m"), "{error:?}");
    }
}
