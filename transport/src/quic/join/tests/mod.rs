//! Applicants with a token: which of them are admitted, which are refused, and that no applicant
//! can use the proof of another.

mod register;
mod revoked_keys;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock, SystemTime};

use pollster::block_on;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, Endpoint, ServerConfig};

use super::binding::binding;
use super::pinned::PinnedVerifier;
use super::token::Token;
use super::*;
use crate::error::{BootstrapKind, TransportError};
use crate::quic::forming::config::QuicConfig;
use crate::quic::network::frames::FrameReader;
use crate::quic::tests::free_address::free_address;
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::Subject;
use crate::quic::trust::presented::PresentedIdentity;
use crate::quic::trust::provider::provider;
use crate::quic::trust::revoked::Revoked;
use crate::quic::trust::tls;
use crate::quic::trust::validity::Validity;
use crate::quic::{Carrier, Identity, LinkSettings, QuicTransport};
use crate::rank::Rank;
use crate::rank::Tag;
use crate::transport::Group;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

const LONG: Duration = Duration::from_secs(20);

fn invitation(at: SocketAddr, size: u32) -> Arc<Invitation> {
    let place = at.to_string();
    let terms = InvitationTerms { place: &place, size, job: "train", valid: Duration::from_secs(3600) };
    Arc::new(Invitation::new(&terms).unwrap())
}

/// The same token with one changed digit, at this position from the start.
fn changed(token: &Token, at: usize) -> Token {
    let mut text = token.to_string().into_bytes();
    text[at] = if text[at] == b'0' { b'1' } else { b'0' };
    String::from_utf8(text).unwrap().parse().unwrap()
}

const IN_HASH: usize = 20;
const IN_SECRET: usize = 80;

/// A group in which only rank 0 is present.
struct Waiting {
    invitation: Arc<Invitation>,
    at: SocketAddr,
    zero: JoinHandle<Result<Group, TransportError>>,
}

impl Waiting {
    fn new(size: u32) -> Self {
        Self::over(Carrier::Udp, size)
    }

    fn over(carrier: Carrier, size: u32) -> Self {
        let at = free_address();
        Self::inviting(invitation(at, size), at, carrier, None)
    }

    fn inviting(
        invitation: Arc<Invitation>,
        at: SocketAddr,
        carrier: Carrier,
        revoked: Option<Revoked>,
    ) -> Self {
        let (identity, size) = (invitation.identity().clone(), invitation.size());
        let invites = Some(Arc::clone(&invitation));
        let link = LinkSettings { carrier, ..LinkSettings::default() };
        let config = QuicConfig::new(Rank(0), size, invitation.job(), at, identity);
        let config = QuicConfig { link, revoked, ..config };
        let zero =
            std::thread::spawn(move || QuicTransport::connect(QuicConfig { invitation: invites, ..config }));
        Self { invitation, at, zero }
    }

    fn config(&self, token: &Token) -> EnrolConfig {
        EnrolConfig { deadline: Duration::from_secs(8), ..EnrolConfig::new(token.clone(), self.at) }
    }

    fn enrol(&self, rank: Option<u32>) -> Result<Enrolled, String> {
        let rank = rank.map(Rank);
        enrol(EnrolConfig { rank, ..self.config(self.invitation.token()) }).map_err(|error| error.to_string())
    }

    fn with(&self, token: &Token) -> String {
        enrol(self.config(token)).unwrap_err().to_string()
    }

    fn as_rank(&self, enrolled: &Enrolled) -> QuicConfig {
        let Enrolled { identity, rank, size } = enrolled.clone();
        QuicConfig::new(rank, size, self.invitation.job(), self.at, identity)
    }

    /// The enrolled ranks form the group with rank 0. Each rank sends to the next one, and all
    /// close.
    fn works(self, others: Vec<Enrolled>) {
        let joining = others.iter().map(|one| self.as_rank(one));
        let joining: Vec<_> =
            joining.map(|config| std::thread::spawn(|| QuicTransport::connect(config))).collect();
        let mut group = vec![self.zero.join().unwrap().unwrap()];
        group.extend(joining.into_iter().map(|rank| rank.join().unwrap().unwrap()));
        group.sort_by_key(|rank| rank.rank());
        let tag = Tag { op: 0, message: 0 };
        let size = group.len();
        let posted: Vec<_> = (0..size)
            .map(|me| {
                let (next, last) = ((me + 1) % size, (me + size - 1) % size);
                let sent = group[me].post_send(Rank(next as u32), tag, vec![vec![me as u8; 9].into()], LONG);
                (sent, group[me].post_recv(Rank(last as u32), tag, &[9], LONG), last)
            })
            .collect();
        for (sent, received, last) in posted {
            assert_eq!(block_on(received).unwrap()[0], vec![last as u8; 9]);
            block_on(sent).unwrap();
        }
        let token = self.invitation.token().clone();
        let late = enrol(EnrolConfig::new(token, self.at)).unwrap_err().to_string();
        assert!(late.contains("takes no tokens, because its group is complete"), "{late}");
        let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
        closing.into_iter().for_each(|closed| block_on(closed).unwrap());
    }
}

#[test]
fn ranks_come_by_a_token_and_nobody_after_them() {
    let waiting = Waiting::new(4);
    let two = waiting.enrol(Some(2)).unwrap();
    let [one, three] = [(); 2].map(|()| waiting.enrol(None).unwrap());
    assert_eq!([one.rank, two.rank, three.rank], [Rank(1), Rank(2), Rank(3)]);
    let claims = two.identity.claims().unwrap();
    assert_eq!((claims.subject, claims.job_name.as_deref()), (Subject::Rank(Rank(2)), Some("train")));
    assert_eq!(claims.validity.days_left(SystemTime::now()), 6);
    let used_up = waiting.enrol(None).unwrap_err();
    assert!(used_up.contains("used up") && used_up.contains("ranks 1 to 3"), "{used_up}");
    let taken = waiting.enrol(Some(2)).unwrap_err();
    assert!(taken.contains("rank 2 has been given to another one"), "{taken}");
    // From here on the identities work as with files. One of them is written to a file and read again.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-2.pem");
    two.identity.write_file(&path).unwrap();
    let two = Enrolled { identity: Identity::read_file(&path).unwrap(), ..two };
    waiting.works(vec![one, two, three]);
}

#[test]
fn a_token_that_is_not_this_rank_0s_is_refused_with_the_reason() {
    let waiting = Waiting::new(2);
    let token = waiting.invitation.token().clone();
    let pin = waiting.with(&changed(&token, IN_HASH));
    assert!(pin.contains("not of the authority that the token names"), "{pin}");
    let secret = waiting.with(&changed(&token, IN_SECRET));
    assert!(secret.contains("another secret"), "{secret}");
    let zero = waiting.enrol(Some(0)).unwrap_err();
    assert!(zero.contains("rank 0 has the invitation itself"), "{zero}");
    let one = waiting.enrol(None).unwrap();
    waiting.works(vec![one]);
}

#[test]
fn a_token_over_another_carrier_than_rank_0s_is_refused_with_the_reason() {
    for (zero, one) in [(Carrier::Udp, Carrier::Tcp), (Carrier::Tcp, Carrier::Udp)] {
        let waiting = Waiting::over(zero, 2);
        std::thread::sleep(Duration::from_millis(200));
        let config = waiting.config(waiting.invitation.token());
        let config = EnrolConfig { deadline: Duration::from_secs(4), ..config };
        let with = |carrier| EnrolConfig { link: LinkSettings { carrier, ..config.link }, ..config.clone() };
        let started = Clock::now();
        let error = enrol(with(one)).unwrap_err().to_string();
        let words = match zero {
            // Anybody could have said so: it is a hint at the deadline.
            Carrier::Udp => "the refusal of a rank 0 that uses UDP",
            Carrier::Tcp => "rank 0 is reached over TCP, and this rank came over UDP",
        };
        assert!(error.contains(words), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
        assert_eq!(enrol(with(zero)).unwrap().rank, Rank(1));
    }
}

#[test]
fn rank_0_without_an_invitation_takes_no_tokens() {
    let at = free_address();
    let invitation = invitation(at, 2);
    let identity = invitation.identity().clone();
    let config = QuicConfig::new(Rank(0), 2, invitation.job(), at, identity);
    let config = QuicConfig { connect_deadline: Duration::from_secs(3), ..config };
    let zero = std::thread::spawn(|| QuicTransport::connect(config));
    let error = enrol(EnrolConfig::new(invitation.token().clone(), at)).unwrap_err();
    assert_eq!(error.bootstrap_kind(), BootstrapKind::Invitation);
    assert!(error.to_string().contains("takes no tokens"), "{error}");
    assert!(zero.join().unwrap().is_err());
}

/// The answer of the other end of a hand-made connection to some bytes.
async fn say(connection: &Connection, bytes: &[u8]) -> Option<Frame> {
    let (mut send, recv) = connection.open_bi().await.ok()?;
    send.write_all(bytes).await.ok()?;
    FrameReader::new(recv).next().await.ok()?
}

/// A client without a certificate.
fn nobody(authority: KeyHash, protocol: &[u8]) -> ClientConfig {
    let provider = provider();
    let pinned = Arc::new(PinnedVerifier { authority, provider: Arc::clone(&provider) });
    let mut config = tls::applicant(pinned, provider).unwrap();
    config.alpn_protocols = vec![protocol.to_vec()];
    ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()))
}

fn dialler() -> Endpoint {
    Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn who_has_no_certificate_can_apply_and_nothing_else() {
    let waiting = Waiting::new(2);
    let authority = waiting.invitation.token().authority;
    let hello = |purpose| Frame::Hello {
        protocol: PROTOCOL_VERSION,
        purpose,
        job: waiting.invitation.job().0,
        epoch: 0,
        rank: Rank(1),
        size: 2,
    };
    let reasons: Vec<String> = runtime().block_on(async {
        let (endpoint, mut reasons) = (dialler(), Vec::new());
        for (protocol, purpose) in [
            (&b"kyklos-ctl/1"[..], Purpose::Control),
            (b"kyklos/1", Purpose::Data),
            (b"kyklos-join/1", Purpose::Data),
        ] {
            let connecting =
                endpoint.connect_with(nobody(authority, protocol), waiting.at, "rank-0").unwrap();
            let connection = connecting.await.unwrap();
            let answer = say(&connection, &hello(purpose).encode()).await;
            let closed = tokio::time::timeout(LONG, connection.closed()).await.unwrap().to_string();
            reasons.push(format!("{answer:?} {closed}"));
        }
        reasons
    });
    assert!(reasons[0].contains("without a certificate"), "{reasons:?}");
    assert!(reasons[1].contains("without a certificate"), "{reasons:?}");
    assert!(reasons[2].contains("no application"), "{reasons:?}");
    assert!(reasons.iter().all(|reason| !reason.contains("Welcome")), "{reasons:?}");
    let one = waiting.enrol(None).unwrap();
    waiting.works(vec![one]);
}

/// An attacker with an identity of the authority. It shows this identity to applicants, and
/// forwards their requests to rank 0.
async fn relay(
    identity: Identity,
    authority: KeyHash,
    to: SocketAddr,
    at: tokio::sync::oneshot::Sender<SocketAddr>,
) -> Option<Frame> {
    let crypto: QuicServerConfig =
        tls::inviting_server(&PresentedIdentity::new(identity, None).unwrap(), None).unwrap();
    let server = ServerConfig::with_crypto(Arc::new(crypto));
    let near = Endpoint::server(server, SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    at.send(near.local_addr().unwrap()).unwrap();
    let victim = near.accept().await?.await.ok()?;
    let (mut answer, recv) = victim.accept_bi().await.ok()?;
    let said = FrameReader::new(recv).next().await.ok()??;
    let client = nobody(authority, b"kyklos-join/1");
    let far = dialler().connect_with(client, to, "rank-0").unwrap().await.ok()?;
    let answered = say(&far, &said.encode()).await?;
    answer.write_all(&answered.encode()).await.ok()?;
    victim.closed().await;
    Some(answered)
}

fn relayed(waiting: &Waiting, as_rank: u32) -> (String, Option<Frame>) {
    let invitation = &waiting.invitation;
    let identity = invitation.authority.issue_to(&Subject::Rank(Rank(as_rank)), Validity::days(1)).unwrap();
    let (authority, to) = (invitation.token().authority, waiting.at);
    let (at, told) = tokio::sync::oneshot::channel();
    let middle = std::thread::spawn(move || {
        let relaying = relay(identity, authority, to, at);
        runtime()
            .block_on(async { tokio::time::timeout(Duration::from_secs(6), relaying).await.ok().flatten() })
    });
    let middleman = block_on(told).unwrap();
    let config = EnrolConfig { coordinator: middleman, ..waiting.config(invitation.token()) };
    let error = enrol(config).unwrap_err().to_string();
    (error, middle.join().unwrap())
}

#[test]
fn one_in_the_middle_gets_nothing_by_the_proof_of_another() {
    let waiting = Waiting::new(2);
    // The attacker even has rank 0's names. But the proof belongs to another connection than the one on
    // which it arrives.
    let (error, answered) = relayed(&waiting, 0);
    assert!(matches!(&answered, Some(Frame::Reject { code: RejectCode::Token, .. })), "{answered:?}");
    assert!(error.contains("another secret"), "{error}");
    // With the names of another member the attacker does not even receive a proof.
    let (error, answered) = relayed(&waiting, 1);
    assert_eq!(answered, None);
    assert!(error.contains("the peer is rank 1") && error.contains("only rank 0"), "{error}");
    let one = waiting.enrol(Some(1)).unwrap();
    waiting.works(vec![one]);
}

#[test]
fn hundreds_of_guesses_over_the_network_do_not_keep_an_honest_rank_out() {
    let waiting = Waiting::new(2);
    let wrong = changed(waiting.invitation.token(), IN_SECRET);
    let answers: Vec<RejectCode> = runtime().block_on(async {
        let endpoint = dialler();
        let mut answers = Vec::new();
        for _ in 0..300 {
            let client = nobody(wrong.authority, b"kyklos-join/1");
            let connection = endpoint.connect_with(client, waiting.at, "rank-0").unwrap().await.unwrap();
            let request = vec![0x30; 500];
            let proof = wrong.secret.prove(&binding(&connection, None, &request).unwrap());
            match say(&connection, &Frame::Apply { rank: None, request, proof }.encode()).await {
                Some(Frame::Reject { code, .. }) => answers.push(code),
                other => panic!("{other:?}"),
            }
            connection.close(0_u32.into(), b"");
        }
        answers
    });
    let looked_at = answers.iter().filter(|code| **code == RejectCode::Token).count();
    let busy = answers.iter().filter(|code| **code == RejectCode::Busy).count();
    assert!(
        looked_at < 100 && looked_at + busy == 300,
        "{looked_at} of 300 guesses were looked at, {busy} not"
    );
    // The applicant waits until rank 0 checks tokens from this network again.
    let one = waiting.enrol(None).unwrap();
    waiting.works(vec![one]);
}
