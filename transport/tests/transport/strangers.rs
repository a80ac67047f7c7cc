//! Tests which clients may join a group over QUIC, and that refused clients do no harm.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::coordinator::Coordinator;
use crate::common::*;
use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId, QuicConfig};

#[test]
fn ranks_may_come_in_any_order_and_late() {
    let job = Job::new();
    let early: Vec<_> = [2, 1].map(|rank| connect(job.config(rank, 3))).into_iter().collect();
    std::thread::sleep(Duration::from_millis(800));
    let coordinator = connect(job.config(0, 3));
    let mut group = vec![coordinator.join().unwrap().unwrap()];
    let mut others: Vec<_> = early.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
    others.sort_by_key(|rank| rank.rank());
    group.extend(others);
    works(&group);
}

#[test]
fn an_identity_of_another_authority_is_refused() {
    let job = Job::new();
    let forged = ClusterAuthority::new(job.id).unwrap().issue(Rank(1)).unwrap();
    let stranger = QuicConfig { identity: forged, ..job.config(1, 2) };
    let (group, text) = job.form_while(2, || refused(stranger));
    assert!(text.contains("rank 0") && text.to_lowercase().contains("certificate"), "{text}");
    works(&group);
}

#[test]
fn an_identity_of_another_job_is_refused_with_both_jobs() {
    let (job, other) = (Job::new(), JobId::random().unwrap());
    let stranger = QuicConfig { job: other, ..job.config(1, 2) };
    let text = refused(stranger);
    assert!(
        text.contains(&format!("this is job {other}, but the identity is of rank 1 of job {}", job.id)),
        "{text}"
    );
}

#[test]
fn an_identity_of_another_rank_is_refused_with_both_ranks() {
    let job = Job::new();
    let stranger = QuicConfig { rank: Rank(2), ..job.config(1, 3) };
    let text = refused(stranger);
    assert!(text.contains("rank 2") && text.contains("rank 1"), "{text}");
}

#[test]
fn a_heartbeat_that_cannot_be_kept_is_refused() {
    let job = Job::new();
    for heartbeat in [Duration::ZERO, Duration::MAX] {
        let text = refused(QuicConfig { heartbeat: Some(heartbeat), ..job.config(1, 2) });
        assert!(text.contains("heartbeat"), "{text}");
    }
}

#[test]
fn a_rank_with_another_world_size_is_refused_with_both_sizes() {
    let job = Job::new();
    let (group, text) = job.form_while(2, || refused(job.config(2, 4)));
    assert!(text.contains("told 2 ranks") && text.contains("told 4"), "{text}");
    works(&group);
}

#[test]
fn another_epoch_is_refused() {
    let job = Job::new();
    let stale = QuicConfig { epoch: 3, ..job.config(1, 2) };
    let (group, text) = job.form_while(2, || refused(stale));
    assert!(text.contains("epoch"), "{text}");
    works(&group);
}

#[test]
fn a_second_process_of_the_same_rank_is_refused_and_the_first_one_stays() {
    let job = Job::new();
    let first = connect(job.config(1, 3));
    let coordinator = connect(job.config(0, 3));
    // Until the first one is in.
    std::thread::sleep(Duration::from_secs(3));
    let text = refused(job.config(1, 3));
    assert!(text.contains("rank 1 is connected already"), "{text}");
    let last = connect(job.config(2, 3));
    let group: Vec<_> = [coordinator, first, last].map(|rank| rank.join().unwrap().unwrap()).into();
    // Again, after the group is complete.
    let text = refused(job.config(1, 3));
    assert!(text.contains("rank 1 is connected already"), "{text}");
    works(&group);
}

#[test]
fn a_missing_coordinator_is_named_with_its_address() {
    let job = Job::new();
    let started = Instant::now();
    let config = QuicConfig { connect_deadline: Duration::from_secs(2), ..job.config(1, 2) };
    let error = connect(config).join().unwrap().unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains(&job.coordinator.to_string()), "{error}");
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[test]
fn missing_ranks_are_named() {
    let job = Job::new();
    let short = |rank| QuicConfig { connect_deadline: Duration::from_secs(6), ..job.config(rank, 4) };
    let ranks = [connect(short(0)), connect(QuicConfig { connect_deadline: LONG, ..job.config(2, 4) })];
    let started = Instant::now();
    let [zero, two] = ranks.map(|rank| rank.join().unwrap().unwrap_err().to_string());
    assert!(zero.contains("rank 1, 3 did not come"), "{zero}");
    assert!(two.contains("rank 1, 3 did not come"), "the others hear it from rank 0: {two}");
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[test]
fn datagrams_of_garbage_do_not_disturb_a_group() {
    let job = Job::new();
    let noise = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let send_noise = |count: u32| {
        let mut state = 1_u32;
        for index in 0..count {
            let datagram: Vec<u8> = (0..(index * 37 % 1400))
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            // The port may be closed for a moment: errors of these packets do not matter.
            let _ = noise.send_to(&datagram, job.coordinator);
        }
    };
    let (group, ()) = job.form_while(3, || send_noise(500));
    send_noise(500);
    works(&group);
}

#[test]
fn a_rank_whose_handshake_is_refused_dials_again_until_its_deadline() {
    let job = Job::new();
    let started = Instant::now();
    let rank = connect(QuicConfig { connect_deadline: LONG, ..job.config(1, 2) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let coordinator =
            tokio::time::timeout(LONG, Coordinator::form_after_refusals(&job, 4)).await.unwrap();
        let formed = tokio::task::spawn_blocking(move || rank.join().unwrap()).await.unwrap();
        assert!(formed.is_ok(), "{formed:?}");
        // It does not dial as fast as it can.
        assert!(started.elapsed() > Duration::from_millis(500), "{:?}", started.elapsed());
        drop(coordinator);
    });
}

#[test]
fn a_rank_whose_handshakes_are_all_refused_says_so_at_its_deadline() {
    let job = Job::new();
    let config = QuicConfig { connect_deadline: Duration::from_secs(6), ..job.config(1, 2) };
    let rank = connect(config);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refusing = async { Coordinator::form_after_refusals(&job, usize::MAX).await };
    let refusing = async { tokio::time::timeout(Duration::from_secs(12), refusing).await.is_err() };
    assert!(runtime.block_on(refusing));
    let error = rank.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("within 6s") && error.contains("takes no more handshakes now"), "{error}");
}

/// Hand-made clients that send things a rank never sends.
mod by_hand {
    use super::*;
    use kyklos_transport::wire::{Frame, PROTOCOL_VERSION, Purpose};
    use quinn::crypto::rustls::QuicClientConfig;

    /// Dials rank 0 of a job as the given rank, or without a certificate, and returns the
    /// connection.
    fn dial<T>(
        job: &Job,
        certificate_of: Option<u32>,
        protocol: &str,
        talk: impl AsyncFnOnce(quinn::Connection) -> T,
    ) -> Result<T, quinn::ConnectionError> {
        let tls = job.tls(certificate_of, protocol);
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let endpoint = quinn::Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
            let connection = endpoint.connect_with(config, job.coordinator, &job.name(0)).unwrap().await?;
            let result = talk(connection).await;
            endpoint.close(0_u32.into(), b"");
            endpoint.wait_idle().await;
            Ok(result)
        })
    }

    /// The reason that the other side gave when it closed the connection.
    async fn verdict(connection: &quinn::Connection) -> String {
        let closed = tokio::time::timeout(Duration::from_secs(8), connection.closed()).await;
        match closed.expect("a stranger is shown out within seconds") {
            quinn::ConnectionError::ApplicationClosed(close) => {
                String::from_utf8_lossy(&close.reason).into_owned()
            }
            other => other.to_string(),
        }
    }

    fn hello(job: JobId, rank: u32, protocol: u16) -> Vec<u8> {
        let (purpose, rank) = (Purpose::Control, Rank(rank));
        Frame::Hello { protocol, purpose, job: job.0, epoch: 0, rank, size: 2 }.encode()
    }

    async fn say(connection: &quinn::Connection, bytes: &[u8]) {
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        let _ = send.write_all(bytes).await;
        let _ = send.finish();
    }

    #[test]
    fn a_client_without_a_certificate_is_refused() {
        let job = Job::new();
        let (group, reason) = job.form_while(2, || {
            // The client finishes its handshake before the server has checked the empty certificate. So the
            // refusal arrives as a close.
            match dial(&job, None, "kyklos-ctl/1", async |connection| verdict(&connection).await) {
                Ok(reason) => reason,
                Err(error) => error.to_string(),
            }
        });
        assert!(reason.to_lowercase().contains("certificate"), "{reason}");
        works(&group);
    }

    #[test]
    fn another_protocol_name_is_refused_in_the_handshake() {
        let job = Job::new();
        let (group, result) = job.form_while(2, || dial(&job, Some(1), "kyklos/0", async |_| ()));
        assert!(result.is_err());
        works(&group);
    }

    #[test]
    fn a_rank_that_says_it_is_another_one_is_refused() {
        let job = Job::new();
        let (group, reason) = job.form_while(2, || {
            dial(&job, Some(5), "kyklos-ctl/1", async |connection| {
                say(&connection, &hello(job.id, 1, PROTOCOL_VERSION)).await;
                verdict(&connection).await
            })
        });
        let reason = reason.unwrap();
        assert!(reason.contains("rank 1 has the certificate of rank 5"), "{reason}");
        works(&group);
    }

    #[test]
    fn a_rank_that_sends_in_the_name_of_another_rank_is_refused() {
        let (job, other) = (Job::new(), JobId::random().unwrap());
        let (group, reason) = job.form_while(2, || {
            dial(&job, Some(1), "kyklos-ctl/1", async |connection| {
                say(&connection, &hello(other, 1, PROTOCOL_VERSION)).await;
                verdict(&connection).await
            })
        });
        let reason = reason.unwrap();
        assert!(reason.contains("another job") && reason.contains(&job.id.to_string()), "{reason}");
        works(&group);
    }

    #[test]
    fn another_protocol_version_is_refused_with_both_numbers() {
        // The version before this one, and one that does not exist yet.
        for other in [PROTOCOL_VERSION - 1, 77] {
            // A port for each group: the one before may not have let go of its own yet.
            let job = Job::new();
            let (group, reason) = job.form_while(2, || {
                dial(&job, Some(1), "kyklos-ctl/1", async |connection| {
                    say(&connection, &hello(job.id, 1, other)).await;
                    verdict(&connection).await
                })
            });
            let reason = reason.unwrap();
            let both = format!("rank 0 speaks protocol version {PROTOCOL_VERSION}, rank 1 {other}");
            assert!(reason.contains(&both), "{reason}");
            works(&group);
        }
    }

    #[test]
    fn garbage_and_silence_on_streams_do_not_disturb_a_group() {
        let job = Job::new();
        let ((group, reasons), ()) = (
            job.form_while(2, || {
                [
                    // A length above the limit, bytes that are not a frame, and a frame that is not a hello.
                    dial(&job, Some(1), "kyklos-ctl/1", async |connection| {
                        say(&connection, &[0xff; 3000]).await;
                        verdict(&connection).await
                    }),
                    dial(&job, Some(1), "kyklos/1", async |connection| {
                        say(&connection, &Frame::Leave.encode()).await;
                        verdict(&connection).await
                    }),
                    // Payload streams before any hello, then silence.
                    dial(&job, Some(1), "kyklos/1", async |connection| {
                        for _ in 0..100 {
                            let mut stream = connection.open_uni().await.unwrap();
                            let _ = stream.write_all(&[0x4b; 500]).await;
                        }
                        verdict(&connection).await
                    }),
                ]
            }),
            (),
        );
        let reasons = reasons.map(|reason| reason.unwrap());
        assert!(reasons[0].contains("longer than allowed"), "{reasons:?}");
        assert!(reasons[1].contains("not a hello"), "{reasons:?}");
        assert!(reasons[2].contains("no hello"), "{reasons:?}");
        works(&group);
    }
}
