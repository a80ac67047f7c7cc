//! The invitation of rank 0, with which others can enrol by token: an authority for this one group,
//! and rank 0's identity.

use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::given_keys::GivenKeys;
use super::token::Token;
use crate::error::{BootstrapKind, TransportError};
use crate::quic::trust::authority::{ClusterAuthority, VALID_DAYS};
use crate::quic::trust::identity::Identity;
use crate::quic::trust::job::JobId;
use crate::quic::trust::key_hash::KeyHash;
use crate::quic::trust::names::Subject;
use crate::quic::trust::private_file::{self, pem_block};
use crate::quic::trust::revoked::Revoked;
use crate::quic::trust::validity::Validity;
use crate::rank::{MAX_RANKS, Rank};

/// Lets the ranks of one group enrol with a token. Its file holds private keys and belongs to rank
/// 0 alone.
pub struct Invitation {
    token: Token,
    size: u32,
    until: SystemTime,
    pub(super) authority: ClusterAuthority,
    identity: Identity,
    /// In earlier runs too, if it is in a file.
    given: Mutex<GivenKeys>,
}

/// The terms of an invitation.
#[derive(Clone, Debug)]
pub struct InvitationTerms<'a> {
    /// Where the others find rank 0, as `host:port`.
    pub place: &'a str,
    /// Number of ranks, rank 0 among them: 2 to [`MAX_RANKS`]. Every other rank is given away once.
    pub size: u32,
    /// Name of the job.
    pub job: &'a str,
    /// For how long the token lets ranks in. What they get by it holds for [`VALID_DAYS`] days from
    /// then on.
    pub valid: Duration,
}

impl Invitation {
    /// Makes a new authority and a token of it, in memory.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the terms do not fit, or keys cannot be made.
    pub fn new(terms: &InvitationTerms<'_>) -> Result<Self, TransportError> {
        let InvitationTerms { place, size, job, valid } = *terms;
        if !(2..=MAX_RANKS).contains(&size) {
            return Err(TransportError::bootstrap(format!(
                "a group that somebody joins has 2 to {MAX_RANKS} ranks, not {size}"
            )));
        }
        let days = valid.as_secs() / (24 * 3600);
        let days = u32::try_from(days).ok().filter(|days| *days <= MOST_DAYS).ok_or_else(|| {
            TransportError::bootstrap(format!(
                "a token that lets ranks in for more than {MOST_DAYS} days: use {MOST_DAYS} at most"
            ))
        })?;
        // In whole seconds, as the file has it.
        let until = seconds(SystemTime::now() + valid)?;
        let until = UNIX_EPOCH + Duration::from_secs(until);
        let authority = ClusterAuthority::of_job(job, days + VALID_DAYS + 1)?;
        // Rank 0's certificate must be valid as long as any that it gives away.
        let identity = authority.issue_to(&Subject::Rank(Rank(0)), authority.validity())?;
        let token = Token::new(KeyHash::of(authority.certificate())?, place)?;
        Ok(Self { token, size, until, authority, identity, given: Mutex::default() })
    }

    /// Writes it into a new file that only its owner can read.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file exists already or cannot be written.
    pub fn write_file(&self, path: &Path) -> Result<(), TransportError> {
        let Self { token, size, until, authority, identity, .. } = self;
        let mut text = format!("token {token}\nworld {size}\nuntil {}\n", seconds(*until)?);
        text.push_str(&pem_block("CERTIFICATE", &identity.certificate));
        text.push_str(&pem_block("CERTIFICATE", authority.certificate()));
        text.push_str(&pem_block("PRIVATE KEY", identity.key.secret_der()));
        text.push_str(&pem_block("PRIVATE KEY", &authority.key_der()));
        private_file::write_new(path, "invitation", &text)
    }

    /// Reads a file that [`Self::write_file`] has written, and the list beside it (`given-…`) of
    /// keys that its token has given.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the file is missing, can be read by others than its owner,
    /// or is something else.
    pub fn read_file(path: &Path) -> Result<Self, TransportError> {
        let bytes = private_file::read(path, "invitation")?;
        let invitation = Self::parse(&bytes).map_err(|what| {
            let text = format!("{} is not an invitation, {what}: make a new invitation", path.display());
            BootstrapKind::Invitation.error(text)
        })?;
        let given = GivenKeys::beside(path, &invitation.token.authority)?;
        Ok(Self { given: Mutex::new(given), ..invitation })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "it is not text")?;
        let mut lines = text.lines();
        let mut field = |name: &str| {
            let line = lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.ok_or_else(|| format!("it has no line `{name} …` where one belongs"))
        };
        let token: Token = field("token")?.parse().map_err(|error: TransportError| error.to_string())?;
        let size = field("world")?.parse().ok().filter(|size| (2..=MAX_RANKS).contains(size));
        let size = size.ok_or("it has no number of ranks")?;
        let until = field("until")?.parse().ok().filter(|seconds| *seconds <= LATEST_SECONDS);
        let until = until.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds)).ok_or("it has no end")?;
        let certificates: Result<Vec<CertificateDer<'static>>, _> =
            CertificateDer::pem_slice_iter(bytes).collect();
        let keys: Result<Vec<PrivateKeyDer<'static>>, _> = PrivateKeyDer::pem_slice_iter(bytes).collect();
        let (Ok([certificate, authority]), Ok([key, authority_key])) = (
            certificates.map_err(|_| ()).and_then(|all| <[_; 2]>::try_from(all).map_err(|_| ())),
            keys.map_err(|_| ()).and_then(|all| <[_; 2]>::try_from(all).map_err(|_| ())),
        ) else {
            return Err("it does not hold the certificates and keys of rank 0 and of its authority".into());
        };
        let in_words = |error: TransportError| error.to_string();
        if KeyHash::of(&authority).map_err(in_words)? != token.authority {
            return Err("its token is of another authority".into());
        }
        let identity = Identity { authorities: vec![authority.clone()], certificate, key };
        let claims = identity.claims().map_err(in_words)?;
        if claims.subject != Subject::Rank(Rank(0)) {
            return Err(format!("it holds the certificate of {claims}, not of rank 0"));
        }
        let authority = ClusterAuthority::of_keys(authority, &authority_key, claims.job, claims.job_name);
        let authority = authority.map_err(in_words)?;
        Ok(Self { token, size, until, authority, identity, given: Mutex::default() })
    }

    /// The same invitation with rank 0 at another place, `host:port`.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] for a place that is none.
    pub fn at(self, place: &str) -> Result<Self, TransportError> {
        Ok(Self { token: self.token.at(place)?, ..self })
    }

    /// The token for the other ranks.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Number of ranks, rank 0 among them.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Until when the token is valid.
    pub fn until(&self) -> SystemTime {
        self.until
    }

    /// Of rank 0.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The job of the group.
    pub fn job(&self) -> JobId {
        self.authority.job()
    }

    /// A revoked key that the token has given: then it lets nobody in any more.
    pub(super) fn revoked_key(&self, revoked: Option<&Revoked>) -> Option<KeyHash> {
        self.given().revoked(revoked?)
    }

    /// The keys that the token has given.
    pub(super) fn given(&self) -> MutexGuard<'_, GivenKeys> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The validity of an identity that is given away now.
    pub(super) fn validity_from_now(&self) -> Validity {
        let all = self.authority.validity();
        Validity { until: Validity::days(VALID_DAYS).until.min(all.until), ..Validity::days(VALID_DAYS) }
    }
}

impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, size, .. } = self;
        f.debug_struct("Invitation").field("token", token).field("size", size).finish_non_exhaustive()
    }
}

fn seconds(time: SystemTime) -> Result<u64, TransportError> {
    let since =
        time.duration_since(UNIX_EPOCH).map_err(|_| TransportError::bootstrap("the clock is before 1970"))?;
    Ok(since.as_secs())
}

/// For a token of a longer life a file is better.
const MOST_DAYS: u32 = 366;

/// The end of the year 9999, which is as far as certificates count.
const LATEST_SECONDS: u64 = 253_402_300_799;
