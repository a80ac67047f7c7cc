//! The answers of a register, tested without a network, and the contents of an invitation file.

use std::net::IpAddr;

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
use tokio::time::Instant;

use super::*;
use crate::quic::join::register::{EnrolRefusal, EnrolRequest, Register};

/// An applicant that asks a register without a network.
pub(super) struct Asking {
    pub(super) register: Register,
    pub(super) invitation: Arc<Invitation>,
    now: Instant,
}

impl Asking {
    fn new(size: u32) -> Self {
        Self::of(invitation(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), size), None)
    }

    pub(super) fn of(invitation: Arc<Invitation>, revoked: Option<Revoked>) -> Self {
        let register = Register::new(Arc::clone(&invitation), revoked);
        Self { register, invitation, now: Instant::now() }
    }

    pub(super) fn visit(&self, from: u32) -> EnrolRequest {
        let from = IpAddr::from(from.to_be_bytes());
        EnrolRequest { from, binding: [7; 32], now: self.now, date: SystemTime::now() }
    }

    pub(super) fn ask(&mut self, asked: Option<u32>, request: &[u8]) -> Result<(Rank, Frame), EnrolRefusal> {
        let proof = self.invitation.token().secret.prove(&[7; 32]);
        let visit = self.visit(1);
        self.register.answer(asked.map(Rank), request, &proof, &visit).map(|given| (given.rank, given.frame))
    }
}

fn request_of(key: &KeyPair, names: &[&str]) -> Vec<u8> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    CertificateParams::new(names).unwrap().serialize_request(key).unwrap().der().to_vec()
}

pub(super) fn request() -> Vec<u8> {
    request_of(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap(), &[])
}

#[test]
fn every_rank_but_0_is_given_away_once() {
    let mut asking = Asking::new(4);
    for (asked, code, words) in
        [(0, RejectCode::Rank, "rank 0 has the invitation itself"), (4, RejectCode::Rank, "for 4 ranks")]
    {
        let (found, text) = asking.ask(Some(asked), &request()).unwrap_err();
        assert!(found == code && text.contains(words), "{text}");
    }
    let two = request();
    assert_eq!(asking.ask(Some(2), &two).unwrap().0, Rank(2));
    // The same key again: the first answer was lost.
    assert_eq!(asking.ask(Some(2), &two).unwrap().0, Rank(2));
    assert_eq!(asking.ask(None, &two).unwrap().0, Rank(2));
    let (code, text) = asking.ask(Some(2), &request()).unwrap_err();
    assert!(code == RejectCode::Duplicate && text.contains("rank 2 has been given"), "{text}");
    assert_eq!([(); 2].map(|()| asking.ask(None, &request()).unwrap().0), [Rank(1), Rank(3)]);
    let (code, text) = asking.ask(None, &request()).unwrap_err();
    assert!(code == RejectCode::Duplicate && text.contains("used up, ranks 1 to 3"), "{text}");
}

#[test]
fn a_token_ends_at_its_date_and_says_so_only_to_those_who_have_it() {
    let mut asking = Asking::new(2);
    let (until, token) = (asking.invitation.until(), asking.invitation.token().clone());
    let visit = |date| EnrolRequest { date, ..Asking::new(2).visit(1) };
    let proof = token.secret.prove(&[7; 32]);
    let late = visit(until + Duration::from_secs(1));
    let (code, text) = asking.register.answer(None, &request(), &proof, &late).unwrap_err();
    assert!(code == RejectCode::Token && text.contains("expired on"), "{text}");
    let (_, text) = asking.register.answer(None, &request(), &[0; 32], &late).unwrap_err();
    assert!(text.contains("another secret"), "{text}");
    asking.register.answer(None, &request(), &proof, &visit(until)).unwrap();
}

#[test]
fn only_the_key_of_a_request_counts_and_only_one_that_the_asker_has() {
    let mut asking = Asking::new(3);
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let job = asking.invitation.job();
    let zero = format!("rank-0.{job}.kyklos.internal");
    let (rank, grant) = asking.ask(None, &request_of(&key, &[&zero, "*"])).unwrap();
    let Frame::Grant { certificate, size: 3, .. } = grant else { panic!("{grant:?}") };
    let claims = crate::quic::Claims::of(&certificate.into()).unwrap();
    assert_eq!((rank, claims.subject), (Rank(1), Subject::Rank(Rank(1))));
    // Garbage; a signature that does not match; a key of another kind.
    let mut forged = request();
    let last = forged.len() - 4;
    forged[last] ^= 1;
    let other = request_of(&KeyPair::generate_for(&PKCS_ED25519).unwrap(), &[]);
    for wrong in [&b""[..], &[0x30; 100], &request()[1..], &forged, &other] {
        let (code, text) = asking.ask(None, wrong).unwrap_err();
        assert!(code == RejectCode::Protocol && text.contains("ECDSA P-256"), "{text}");
    }
    assert_eq!(asking.ask(None, &request()).unwrap().0, Rank(2));
}

#[test]
fn guesses_by_the_hundred_thousand_are_cheap_and_give_nothing() {
    let mut asking = Asking::new(2);
    let (request, started) = (request(), Clock::now());
    let mut looked_at = 0;
    for guess in 0..100_000_u32 {
        let mut proof = [0; 32];
        proof[..4].copy_from_slice(&guess.to_le_bytes());
        // The wrong tokens come from sixteen networks.
        let visit = asking.visit(guess % 16);
        let (code, _) = asking.register.answer(None, &request, &proof, &visit).unwrap_err();
        looked_at += u32::from(code == RejectCode::Token);
    }
    assert_eq!(looked_at, 16 * 16, "of 100,000 wrong tokens in no time");
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    // An applicant from another network is admitted during this time.
    let proof = asking.invitation.token().secret.prove(&[7; 32]);
    let visit = asking.visit(99);
    assert_eq!(asking.register.answer(None, &request, &proof, &visit).unwrap().rank, Rank(1));
}

#[test]
fn an_invitation_survives_its_file_and_garbage_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("invitation.pem");
    let made = invitation(SocketAddr::from((Ipv4Addr::LOCALHOST, 29600)), 5);
    made.write_file(&path).unwrap();
    let read = Invitation::read_file(&path).unwrap();
    assert_eq!((read.token(), read.size(), read.until()), (made.token(), 5, made.until()));
    assert_eq!(read.identity().certificate, made.identity().certificate);
    assert_eq!(read.job(), made.job());
    // Rank 0 trusts the identities that its own invitation issues.
    let issued = read.authority.issue(Rank(1)).unwrap();
    assert_eq!(issued.authorities, made.identity().authorities);
    let whole = std::fs::read_to_string(&path).unwrap();
    assert!(!format!("{made:?}").contains(&whole[79..111]), "Debug must not show the secret");
    let other = invitation(SocketAddr::from((Ipv4Addr::LOCALHOST, 29600)), 5);
    for (index, (text, words)) in [
        (String::new(), "no line `token …`"),
        (whole.replace("world 5", "world 1"), "no number of ranks"),
        (whole.replace("world 5", "word 5"), "no line `world …`"),
        (whole.replace("until ", "until 9999999"), "no end"),
        (whole.replace("kyklos1.", "kyklos2."), "not a whole token"),
        (whole.replace(&made.token().to_string(), &other.token().to_string()), "of another authority"),
        (whole[..whole.len() / 2].to_owned(), "does not hold the certificates and keys"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path().join(format!("{index}.pem"));
        crate::quic::trust::private_file::write_new(&path, "invitation", &text).unwrap();
        let error = Invitation::read_file(&path).unwrap_err().to_string();
        assert!(error.contains("is not an invitation") && error.contains(words), "{index}: {error}");
    }
    for (place, size) in [("node1", 3), ("node1:29600", 1), ("node1:29600", 2049)] {
        let terms = InvitationTerms { place, size, job: "train", valid: Duration::from_secs(60) };
        assert!(Invitation::new(&terms).is_err(), "{place} {size}");
    }
    let terms = InvitationTerms { place: "node1:29600", size: 2, job: "train", valid: Duration::MAX };
    let long = Invitation::new(&terms).unwrap_err().to_string();
    assert!(long.contains("use 366 at most"), "{long}");
}
