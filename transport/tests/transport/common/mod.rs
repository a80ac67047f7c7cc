//! A job whose ranks are threads of the test, and helpers for clients outside and inside the group.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod coordinator;
pub(crate) mod flood;
#[path = "../../../../tests/free_address.rs"]
mod free_address;
pub(crate) mod member;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{
    Carrier, ClusterAuthority, JobId, LinkProfile, LinkSettings, QuicConfig, QuicTransport,
};
use kyklos_transport::wire::{Frame, PROTOCOL_VERSION};
use kyklos_transport::{Group, Rank, Tag, TransportError};
use pollster::block_on;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub(crate) use free_address::free_address;

pub(crate) type Formed = Result<Group, TransportError>;

/// No wait in a test lasts longer than this.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// An end that does not wait for a deadline comes within this time, also on a machine with much
/// other work.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// All messages go over QUIC, though all ranks are on this host.
pub(crate) fn over_quic() -> LinkSettings {
    LinkSettings { shared_memory: false, ..LinkSettings::default() }
}

/// The answer to a hello of a rank with the usual settings.
pub(crate) fn welcome() -> Frame {
    welcome_over(LinkProfile::Lan)
}

/// The same with links of this kind.
pub(crate) fn welcome_over(profile: LinkProfile) -> Frame {
    let (protocol, lane_ports) = (PROTOCOL_VERSION, Vec::new());
    let wan = profile == LinkProfile::Wan;
    let heartbeat_us = if wan { 500_000 } else { 200_000 };
    Frame::Welcome { protocol, lane_ports, heartbeat_us, wan }
}

/// A job with its own free port.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) authority: ClusterAuthority,
    pub(crate) coordinator: SocketAddr,
}

impl Job {
    pub(crate) fn new() -> Self {
        let id = JobId::random().unwrap();
        Self { id, authority: ClusterAuthority::new(id).unwrap(), coordinator: free_address() }
    }

    pub(crate) fn config(&self, rank: u32, size: u32) -> QuicConfig {
        let identity = self.authority.issue(Rank(rank)).unwrap();
        QuicConfig {
            link: over_quic(),
            ..QuicConfig::new(Rank(rank), size, self.id, self.coordinator, identity)
        }
    }

    pub(crate) fn over(&self, carrier: Carrier, rank: u32, size: u32) -> QuicConfig {
        let link = LinkSettings { carrier, ..over_quic() };
        QuicConfig { link, ..self.config(rank, size) }
    }

    /// Runs each honest rank on its own thread while `disturb` runs.
    pub(crate) fn form_while<T>(&self, size: u32, disturb: impl FnOnce() -> T) -> (Vec<Group>, T) {
        let mut ranks = vec![connect(self.config(0, size))];
        // The strangers connect while rank 0 waits for the other ranks.
        std::thread::sleep(Duration::from_millis(100));
        let disturbed = disturb();
        ranks.extend((1..size).map(|rank| connect(self.config(rank, size))));
        (formed(ranks), disturbed)
    }

    /// TLS settings of a hand-made client, as the given rank or without a certificate.
    pub(crate) fn tls(&self, certificate_of: Option<u32>, protocol: &str) -> rustls::ClientConfig {
        let pem = self.identity_pem(certificate_of.unwrap_or(9));
        let mut certificates = CertificateDer::pem_slice_iter(&pem).map(Result::unwrap);
        let (leaf, authority) = (certificates.next().unwrap(), certificates.next().unwrap());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(authority).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut tls = match certificate_of {
            Some(_) => builder
                .with_client_auth_cert(vec![leaf], PrivateKeyDer::from_pem_slice(&pem).unwrap())
                .unwrap(),
            None => builder.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        tls
    }

    /// The file of a rank's identity: its certificate, the one of its authority, its key.
    pub(crate) fn identity_pem(&self, rank: u32) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.pem");
        self.authority.issue(Rank(rank)).unwrap().write_file(&path).unwrap();
        std::fs::read(&path).unwrap()
    }

    /// The server name that a client uses to dial a rank.
    pub(crate) fn name(&self, rank: u32) -> String {
        format!("rank-{rank}.{}.kyklos.internal", self.id)
    }
}

pub(crate) fn connect(config: QuicConfig) -> JoinHandle<Formed> {
    std::thread::spawn(move || QuicTransport::connect(config))
}

pub(crate) fn formed(ranks: Vec<JoinHandle<Formed>>) -> Vec<Group> {
    ranks.into_iter().map(|rank| rank.join().unwrap().expect("an honest rank joins")).collect()
}

/// Connects with a short deadline, and returns the text of the refusal.
pub(crate) fn refused(config: QuicConfig) -> String {
    let config = QuicConfig { connect_deadline: Duration::from_secs(6), ..config };
    match connect(config).join().unwrap() {
        Err(TransportError::Bootstrap { text, .. }) => text,
        other => panic!("a stranger got {other:?}"),
    }
}

/// Each of these ranks sends a megabyte to every other one of them.
pub(crate) fn exchange(ranks: &[Group], op: u64) {
    let (tag, bytes) = (Tag { op, message: 0 }, 1 << 20);
    let (mut received, mut sent) = (Vec::new(), Vec::new());
    for one in ranks {
        for peer in ranks.iter().map(|peer| peer.rank()).filter(|&peer| peer != one.rank()) {
            let parts = vec![Bytes::from(vec![one.rank().0 as u8; bytes])];
            sent.push(one.post_send(peer, tag, parts, LONG));
            received.push((one.post_recv(peer, tag, &[bytes], LONG), peer));
        }
    }
    for (posted, peer) in received {
        assert!(block_on(posted).unwrap()[0].iter().all(|&byte| u32::from(byte) == peer.0));
    }
    for posted in sent {
        block_on(posted).unwrap();
    }
}

pub(crate) fn close(group: &[Group]) {
    let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
    closing.into_iter().for_each(|closed| block_on(closed).unwrap());
}

/// The group exchanges messages and closes.
pub(crate) fn works(group: &[Group]) {
    exchange(group, 0);
    close(group);
}

/// Lock for a test that measures the memory of the process: no other such test runs at the same
/// time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resident memory of this process, in KiB.
#[cfg(target_os = "linux")]
pub(crate) fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
