//! Decoders of requests for an identity and their answers, for the fuzz targets: see
//! `quic/decoders.rs`.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use tokio::time::Instant;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::applicant::Applicant;
use super::register::{EnrolRequest, Register};
use super::{Invitation, InvitationTerms};
use crate::quic::trust::names::Subject;
use crate::rank::Rank;
use crate::wire::{Frame, RejectCode};

/// Rank 0 and one applicant, for as long as the process runs.
struct Pair {
    invitation: Arc<Invitation>,
    applicant: Applicant,
    granted: Vec<u8>,
}

/// A request for a certificate in DER, with the right secret: a rank is given for the key of the
/// request, and again for the same key; a refused request changes nothing.
pub fn application(der: &[u8]) {
    let pair = pair();
    let mut register = Register::new(Arc::clone(&pair.invitation), None);
    let Ok((rank, certificate)) = ask(&mut register, &pair.invitation, der) else {
        let (free, _) =
            ask(&mut register, &pair.invitation, pair.applicant.words().1).expect("a whole request");
        assert_eq!(free, Rank(1), "a rank was given to one who was refused");
        return;
    };
    let (_, parsed) = X509Certificate::from_der(&certificate).expect("a certificate was made");
    let key = parsed.public_key().subject_public_key.data.as_ref();
    assert!(der.windows(key.len()).any(|window| window == key), "a key that was not in the request");
    let again = ask(&mut register, &pair.invitation, der).map(|(rank, _)| rank);
    assert_eq!(again.ok(), Some(rank));
}

/// The certificate in DER that rank 0 gave: it is taken only for the key that was made here, and
/// for the rank it names.
pub fn grant(der: &[u8]) {
    let pair = pair();
    let chain: Vec<CertificateDer<'_>> =
        pair.invitation.identity().authorities.iter().map(|der| CertificateDer::from(der.as_ref())).collect();
    for rank in [Rank(1), Rank(2)] {
        if let Ok(enrolled) = pair.applicant.accept(&chain, (rank, WORLD), der.to_vec()) {
            let claims = enrolled.identity.claims().expect("it has been read");
            assert_eq!((claims.subject, enrolled.rank, enrolled.size), (Subject::Rank(rank), rank, WORLD));
        }
    }
}

/// A request to begin with; its key is new in each process.
pub fn request_of_mine() -> Vec<u8> {
    pair().applicant.words().1.to_vec()
}

/// The certificate that is right for [`grant`], to begin with.
pub fn certificate_of_mine() -> Vec<u8> {
    pair().granted.clone()
}

fn pair() -> MutexGuard<'static, Pair> {
    static PAIR: OnceLock<Mutex<Pair>> = OnceLock::new();
    let pair = PAIR.get_or_init(|| {
        let terms =
            InvitationTerms { place: "a:1", size: WORLD, job: "fuzz", valid: Duration::from_secs(86_400) };
        let invitation = Arc::new(Invitation::new(&terms).expect("an invitation"));
        let applicant = Applicant::new(invitation.token().clone(), None).expect("an applicant");
        let mut register = Register::new(Arc::clone(&invitation), None);
        let (_, granted) = ask(&mut register, &invitation, applicant.words().1).expect("a grant");
        Mutex::new(Pair { invitation, applicant, granted })
    });
    pair.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ask(
    register: &mut Register,
    invitation: &Invitation,
    request: &[u8],
) -> Result<(Rank, Vec<u8>), (RejectCode, String)> {
    let (binding, from) = ([7; 32], IpAddr::from(Ipv4Addr::LOCALHOST));
    let proof = invitation.token().secret.prove(&binding);
    let visit = EnrolRequest { from, binding, now: Instant::now(), date: SystemTime::now() };
    let given = register.answer(None, request, &proof, &visit)?;
    let Frame::Grant { certificate, .. } = given.frame else { unreachable!("what a register gives") };
    Ok((given.rank, certificate))
}

const WORLD: u32 = 3;
