//! Admission of a rank whose certificate comes from the same authority but belongs to another job.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use quinn::Endpoint;

use super::free_address::free_address;
use crate::error::TransportError;
use crate::quic::forming::admission::Admission;
use crate::quic::forming::refusals::AdmissionRefusal;
use crate::quic::network::frames::FrameReader;
use crate::quic::network::path::Path;
use crate::quic::trust::names::rank_name;
use crate::quic::trust::presented::PresentedIdentity;
use crate::quic::trust::tls::TlsConfigs;
use crate::quic::*;
use crate::rank::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

/// An identity of rank 1 for any job.
fn rank_one(authority: &ClusterAuthority, job: JobId) -> Identity {
    authority.issue_at(&Subject::Rank(Rank(1)), job, Validity::days(1)).unwrap()
}

/// Returns rank 0's answer to a stranger. The stranger's certificate comes from this authority, but
/// belongs to another job.
async fn visit(
    authority: &ClusterAuthority,
    (job, other): (JobId, JobId),
    coordinator: SocketAddr,
    looks_for: JobId,
) -> Result<Frame, quinn::ConnectionError> {
    let genuine = rank_one(authority, other);
    let path = Path::new(&LinkSettings::default(), Ipv4Addr::UNSPECIFIED.into(), 2).unwrap();
    let visitor = QuicConfig::new(Rank(1), 2, other, coordinator, genuine);
    let identity = PresentedIdentity::new(visitor.identity.clone(), None).unwrap();
    let tls = TlsConfigs::new(&identity, None, path.transport_config(visitor.timing().idle)).unwrap();
    let endpoint = Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let name = rank_name(Rank::COORDINATOR, looks_for);
    let client = tls.client(Purpose::Control);
    let connection = endpoint.connect_with(client, coordinator, &name).unwrap().await?;
    let (mut send, recv) = connection.open_bi().await?;
    let hello = Frame::Hello {
        protocol: PROTOCOL_VERSION,
        purpose: Purpose::Control,
        job: job.0,
        epoch: 0,
        rank: Rank(1),
        size: 2,
    };
    send.write_all(&hello.encode()).await.unwrap();
    let answer = FrameReader::new(recv).next().await.unwrap().expect("an answer");
    endpoint.close(0_u32.into(), b"");
    Ok(answer)
}

#[test]
fn a_rank_of_another_job_of_the_same_authority_is_refused_whatever_it_says() {
    let (job, other) = (JobId([1; 16]), JobId([2; 16]));
    let authority = ClusterAuthority::new(job).unwrap();
    let coordinator = free_address();
    let config =
        |rank| QuicConfig::new(Rank(rank), 2, job, coordinator, authority.issue(Rank(rank)).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let zero = tokio::spawn(QuicTransport::form(config(0)));
        tokio::task::yield_now().await;
        // The stranger claims this job, and asks for rank 0 of this job.
        let answer = visit(&authority, (job, other), coordinator, job).await.unwrap();
        let Frame::Reject { code: RejectCode::Job, text } = &answer else { panic!("{answer:?}") };
        assert!(text.contains(&format!("this is job {job}")), "{text}");
        // The stranger asks for rank 0 of its own job. The answering rank has another name.
        let error = visit(&authority, (job, other), coordinator, other).await.unwrap_err().to_string();
        assert!(error.to_lowercase().contains("certificate"), "{error}");
        // The same with all checks that a rank makes before it dials.
        let genuine = rank_one(&authority, other);
        let stranger = QuicConfig { job: other, identity: genuine, ..config(1) };
        stranger.check().unwrap();
        let error = QuicTransport::form(stranger).await.unwrap_err();
        assert!(
            matches!(&error, TransportError::Bootstrap { text, .. } if text.contains("rank 0")),
            "{error}"
        );
        // The strangers did not stop the honest ranks from forming their group.
        let one = QuicTransport::form(config(1)).await.unwrap();
        let zero = zero.await.unwrap().unwrap();
        let (zero, one) = (zero.close(Duration::from_secs(20)), one.close(Duration::from_secs(20)));
        one.await.unwrap();
        zero.await.unwrap();
    });
}

#[test]
fn a_stranger_that_gives_ever_new_reasons_is_not_remembered_for_ever() {
    let (job, at) = (JobId([1; 16]), SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    let identity = ClusterAuthority::new(job).unwrap().issue(Rank(0)).unwrap();
    let config = QuicConfig::new(Rank(0), 2, job, at, identity);
    let path = Path::new(&config.link, config.bind, 2).unwrap();
    let identity = PresentedIdentity::new(config.identity.clone(), None).unwrap();
    let tls = TlsConfigs::new(&identity, None, path.transport_config(config.timing().idle)).unwrap();
    let admission = Admission::new(&config, (&identity, &tls), Vec::new()).unwrap();
    for reason in 0..100_000 {
        let text = format!("reason {reason}");
        admission.note_refusal(
            at.ip(),
            &AdmissionRefusal { proven: reason % 2 == 1, ..AdmissionRefusal::of_stranger(text) },
        );
    }
    let (said, _) = admission.refusals();
    assert!(said.contains("reason 0") && said.contains("reason 1") && said.len() < 500, "{said}");
    assert!(said.ends_with("(50000 connections without a proven identity)"), "{said}");
}
