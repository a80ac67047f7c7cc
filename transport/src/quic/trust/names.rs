//! The names in a certificate: its rank or host and its job, and which ranks it may be used for.

use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::job::JobId;
use super::validity::{SET_THE_CLOCK, Validity};
use crate::error::{BootstrapKind, TransportError};
use crate::rank::Rank;

/// The rank or the host that a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// One rank, wherever it runs.
    Rank(Rank),
    /// A host: any rank that the bootstrap places on it.
    Host(HostNames),
}

/// Under which names and addresses a host is known, at least one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNames {
    names: Vec<String>,
    addresses: Vec<IpAddr>,
}

impl HostNames {
    /// Reads names and addresses of one host.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if there is none, or one is no host name.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, TransportError> {
        let mut host = Self { names: Vec::new(), addresses: Vec::new() };
        for text in texts {
            match text.parse::<IpAddr>() {
                Ok(address) => host.addresses.push(address.to_canonical()),
                Err(_) if is_host_name(text) => host.names.push(text.to_ascii_lowercase()),
                Err(_) => {
                    return Err(TransportError::bootstrap(format!(
                        "{text:?} is no name of a host: use letters, digits, dots and dashes, or an IP address"
                    )));
                }
            }
        }
        if host.names.is_empty() && host.addresses.is_empty() {
            return Err(TransportError::bootstrap(
                "a host without a name: give its name, its address, or both",
            ));
        }
        Ok(host)
    }

    /// Whether this is the host that a bootstrap calls `place`, by name or by address.
    pub fn is(&self, place: &str) -> bool {
        match place.parse::<IpAddr>() {
            Ok(address) => self.has(address),
            Err(_) => self.names.iter().any(|name| name.eq_ignore_ascii_case(place)),
        }
    }

    fn has(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address.to_canonical())
    }
}

impl fmt::Display for HostNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.iter().cloned().chain(self.addresses.iter().map(IpAddr::to_string));
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank) => write!(f, "rank {rank}"),
            Self::Host(host) => write!(f, "host {host}"),
        }
    }
}

/// The contents of a certificate. They are proven only after its chain has been verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// The rank or the host.
    pub subject: Subject,
    /// The job.
    pub job: JobId,
    /// The job's name, where the job has one.
    pub job_name: Option<String>,
    /// From when until when it is valid.
    pub validity: Validity,
}

impl Claims {
    /// Reads the names of a certificate.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if they are not those of a rank or a host.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Result<Self, TransportError> {
        let unreadable = || TransportError::bootstrap("a certificate that cannot be read");
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| unreadable())?;
        let names = parsed.subject_alternative_name().map_err(|_| unreadable())?.ok_or_else(unreadable)?;
        let (subject, job) = subject_and_job(&names.value.general_names)?;
        let said = parsed.subject().iter_organization().next().and_then(|name| name.as_str().ok());
        // The number in the verified name counts. The words beside it are shown only if they match the
        // number.
        let job_name = said.filter(|name| is_job_name(name) && JobId::from_name(name) == job);
        let validity = Validity::of_asn1(parsed.validity());
        Ok(Self { subject, job, job_name: job_name.map(str::to_owned), validity })
    }

    /// Why the certificate is not valid now, with the remedy and its kind; `None` if it is.
    pub(crate) fn out_of_date(&self) -> Option<(String, BootstrapKind)> {
        let now = SystemTime::now();
        let complaint = self.validity.complaint(now)?;
        // A new one would not be valid here either.
        let (remedy, kind) = match now < self.validity.from {
            true => (SET_THE_CLOCK, BootstrapKind::Clock),
            false => ("issue a new certificate", BootstrapKind::Certificate),
        };
        Some((format!("the certificate of {self} {complaint}: {remedy}"), kind))
    }

    /// Checks that this certificate may be used by `rank`, which is `known` to be on a host or is
    /// seen at `address`.
    pub(crate) fn check_rank(
        &self,
        rank: Rank,
        known: Known<'_>,
        address: Option<IpAddr>,
    ) -> Result<(), String> {
        let host = match &self.subject {
            Subject::Rank(named) if *named == rank => return Ok(()),
            Subject::Rank(named) => return Err(format!("rank {rank} has the certificate of rank {named}")),
            Subject::Host(host) => host,
        };
        match (known.place, known.name, address) {
            (Some(place), ..) if host.is(place) => Ok(()),
            (Some(place), ..) => Err(format!(
                "rank {rank} has its place on host {place}, but has the certificate of host {host}"
            )),
            (None, Some(name), _) if host.is(name) => Ok(()),
            (None, _, Some(address)) if !host.has(address) => Err(format!(
                "rank {rank} is at {}, but has the certificate of host {host}: nothing says on which host the rank \
                 has its place, so the certificate must hold its address",
                address.to_canonical()
            )),
            (None, ..) => Ok(()),
        }
    }
}

/// The host of a rank, as far as it is known before the rank connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known<'a> {
    /// The host on which the bootstrap places it: then it can be nowhere else.
    pub(crate) place: Option<&'a str>,
    /// A name that resolves to its address: as good as the address.
    pub(crate) name: Option<&'a str>,
}

impl fmt::Display for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.job_name {
            Some(name) => write!(f, "{} of job {name}", self.subject),
            None => write!(f, "{} of job {}", self.subject, self.job),
        }
    }
}

/// The name under which a rank is looked for when it is dialled.
pub(crate) fn rank_name(rank: Rank, job: JobId) -> String {
    format!("rank-{rank}.{job}{SUFFIX}")
}

/// The names that a certificate holds, the one that counts in the handshake first.
pub(crate) fn names_of(subject: &Subject, job: JobId) -> Vec<String> {
    match subject {
        Subject::Rank(rank) => vec![rank_name(*rank, job)],
        // A host answers to the name of any rank; which one it may be is checked after the handshake.
        Subject::Host(host) => std::iter::once(any_rank_name(job))
            .chain(host.names.iter().cloned())
            .chain(host.addresses.iter().map(IpAddr::to_string))
            .collect(),
    }
}

pub(crate) fn any_rank_name(job: JobId) -> String {
    format!("*.{job}{SUFFIX}")
}

fn subject_and_job(names: &[GeneralName<'_>]) -> Result<(Subject, JobId), TransportError> {
    let Some((GeneralName::DNSName(first), rest)) = names.split_first() else {
        return Err(TransportError::bootstrap("a certificate without a DNS name"));
    };
    if let (Some((rank, job)), []) = (parse_rank_name(first), rest) {
        return Ok((Subject::Rank(rank), job));
    }
    let strange = || {
        TransportError::bootstrap(format!(
            "a certificate whose names are not those of a rank or a host: {first:?}"
        ))
    };
    let job = first.strip_prefix("*.").and_then(|rest| rest.strip_suffix(SUFFIX));
    let job: JobId = job.and_then(|job| job.parse().ok()).ok_or_else(strange)?;
    if any_rank_name(job) != *first {
        return Err(strange());
    }
    let texts = rest.iter().map(|name| match name {
        GeneralName::DNSName(name) if !name.ends_with(SUFFIX) => Ok((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match (<[u8; 4]>::try_from(*bytes), <[u8; 16]>::try_from(*bytes)) {
            (Ok(v4), _) => Ok(IpAddr::from(v4).to_string()),
            (_, Ok(v6)) => Ok(IpAddr::from(v6).to_string()),
            _ => Err(strange()),
        },
        _ => Err(strange()),
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    Ok((Subject::Host(HostNames::new(texts.iter().map(String::as_str))?), job))
}

fn parse_rank_name(name: &str) -> Option<(Rank, JobId)> {
    let (rank, rest) = name.strip_prefix("rank-")?.split_once('.')?;
    let parsed = (Rank(rank.parse().ok()?), rest.strip_suffix(SUFFIX)?.parse().ok()?);
    // Only the spelling that is issued: no leading zeros, no capitals.
    (rank_name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// Whether it can be written into a certificate and printed in one line.
pub(crate) fn is_job_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-:/@+".contains(&byte))
}

fn is_host_name(name: &str) -> bool {
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
        })
}

/// Every name by which ranks look for each other ends like this; no resolver knows it.
const SUFFIX: &str = ".kyklos.internal";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_issued_spelling_of_a_name_is_a_rank() {
        let job = "0123456789abcdef0123456789abcdef";
        let good = format!("rank-12.{job}.kyklos.internal");
        assert_eq!(parse_rank_name(&good), Some((Rank(12), job.parse().unwrap())));
        for bad in [
            format!("rank-012.{job}.kyklos.internal"),
            format!("rank-+1.{job}.kyklos.internal"),
            format!("rank-1.{}.kyklos.internal", job.to_uppercase()),
            format!("rank-1.{job}.kyklos.internal.example"),
            format!("rank-99999999999.{job}.kyklos.internal"),
            format!("rank-1.{job}"),
            String::new(),
        ] {
            assert_eq!(parse_rank_name(&bad), None, "{bad}");
            assert!(subject_and_job(&[GeneralName::DNSName(&bad)]).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_host_has_the_wildcard_of_its_job_and_names_of_its_own() {
        let job = JobId([7; 16]);
        let any = any_rank_name(job);
        let host = |rest: &[GeneralName<'static>]| {
            let mut names = vec![GeneralName::DNSName(&any)];
            names.extend(rest.iter().cloned());
            subject_and_job(&names)
        };
        let (subject, said) =
            host(&[GeneralName::DNSName("node1"), GeneralName::IPAddress(&[10, 0, 0, 1])]).unwrap();
        assert_eq!(said, job);
        assert_eq!(subject.to_string(), "host node1,10.0.0.1");
        for wrong in [
            &[][..],
            &[GeneralName::DNSName("rank-1.07070707070707070707070707070707.kyklos.internal")],
            &[GeneralName::DNSName("*")],
            &[GeneralName::DNSName("*.example.org")],
            &[GeneralName::IPAddress(&[10, 0, 0])],
            &[GeneralName::URI("node1")],
        ] {
            assert!(host(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_host_may_be_the_ranks_that_have_their_place_there_and_no_others() {
        let host = HostNames::new(["Node1", "10.0.0.1", "::ffff:10.0.0.2"]).unwrap();
        let validity = Validity::days(1);
        let claims = |subject| Claims { subject, job: JobId([1; 16]), job_name: None, validity };
        let (host, rank) = (claims(Subject::Host(host)), claims(Subject::Rank(Rank(3))));
        let at = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let on = |place| Known { place: Some(place), name: None };
        let found_as = |name| Known { place: None, name: Some(name) };
        for place in ["node1", "NODE1", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1"] {
            assert_eq!(host.check_rank(Rank(3), on(place), at("192.0.2.1")), Ok(()), "{place:?}");
            assert_eq!(host.check_rank(Rank(3), found_as(place), at("192.0.2.1")), Ok(()), "{place:?}");
        }
        for place in ["node2", "node1.example.org", "10.0.0.3", ""] {
            let text = host.check_rank(Rank(3), on(place), at("10.0.0.1")).unwrap_err();
            assert!(text.contains("rank 3") && text.contains("node1"), "{text}");
            assert_eq!(host.check_rank(Rank(3), found_as(place), at("10.0.0.1")), Ok(()), "{place:?}");
            assert!(host.check_rank(Rank(3), found_as(place), at("192.0.2.1")).is_err(), "{place:?}");
        }
        let nothing = Known::default();
        assert_eq!(host.check_rank(Rank(3), nothing, at("10.0.0.2")), Ok(()));
        assert!(host.check_rank(Rank(3), nothing, at("10.0.0.3")).unwrap_err().contains("10.0.0.3"));
        assert_eq!(rank.check_rank(Rank(3), on("anywhere"), at("192.0.2.1")), Ok(()));
        assert!(rank.check_rank(Rank(4), nothing, None).unwrap_err().contains("rank 3"));
    }

    #[test]
    fn what_is_no_host_name_is_refused() {
        for wrong in ["", "*", "*.a", "a b", "-a", "a..b", "a/b", "ä", &"a".repeat(64), &"a.".repeat(200)] {
            assert!(HostNames::new([wrong]).is_err(), "{wrong:?}");
        }
        assert!(HostNames::new([]).is_err());
    }
}
