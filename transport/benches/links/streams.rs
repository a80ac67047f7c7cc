//! The plain ends: one TCP stream, with or without TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::ends::{Ended, MESSAGE_BYTES, cpu_s, say};

/// A certificate. The other end gets a copy of it.
pub(crate) struct Server {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Server {
    pub(crate) fn new() -> Self {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()]).expect("a certificate");
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        Self { certificate: made.cert.der().clone(), key: key.into() }
    }

    fn accept(self, stream: TcpStream) -> rustls::StreamOwned<rustls::ServerConnection, TcpStream> {
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate], self.key)
            .expect("a certificate");
        let connection = rustls::ServerConnection::new(Arc::new(config)).expect("a connection");
        rustls::StreamOwned::new(connection, stream)
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn connect(stream: TcpStream, certificate: &str) -> rustls::StreamOwned<rustls::ClientConnection, TcpStream> {
    let bytes = (0..certificate.len()).step_by(2);
    let der: Vec<u8> =
        bytes.map(|at| u8::from_str_radix(&certificate[at..at + 2], 16).expect("hex")).collect();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(der.into()).expect("a certificate");
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = NAME.try_into().expect("a name");
    let connection = rustls::ClientConnection::new(Arc::new(config), name).expect("a connection");
    rustls::StreamOwned::new(connection, stream)
}

pub(crate) fn receive(address: SocketAddr, mib: usize, tls: Option<Server>) -> f64 {
    let listener = TcpListener::bind(address).expect("a port");
    say(&tls
        .as_ref()
        .map_or_else(String::new, |tls| tls.certificate.iter().map(|byte| format!("{byte:02x}")).collect()));
    let (stream, _) = listener.accept().expect("a connection");
    match tls {
        None => read(stream, mib),
        Some(tls) => read(tls.accept(stream), mib),
    }
}

/// Reads all messages into buffers of their size, as a receive does, and answers with one byte.
fn read(mut stream: impl Read + Write, mib: usize) -> f64 {
    stream.read_exact(&mut [0]).expect("a start");
    let before = cpu_s();
    for _ in 0..(mib << 20) / MESSAGE_BYTES {
        let mut message = vec![0; MESSAGE_BYTES];
        stream.read_exact(&mut message).expect("a message");
    }
    stream.write_all(&[0]).and_then(|()| stream.flush()).expect("an answer");
    cpu_s() - before
}

pub(crate) fn send(address: SocketAddr, mib: usize, certificate: Option<&str>) -> Ended {
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_nodelay(true).expect("an option");
    match certificate {
        None => write(stream, mib),
        Some(certificate) => write(connect(stream, certificate), mib),
    }
}

fn write(mut stream: impl Read + Write, mib: usize) -> Ended {
    let payload = vec![1; MESSAGE_BYTES];
    stream.write_all(&[0]).and_then(|()| stream.flush()).expect("a start");
    let (before, started) = (cpu_s(), Instant::now());
    for _ in 0..(mib << 20) / MESSAGE_BYTES {
        stream.write_all(&payload).expect("a message");
    }
    stream.flush().expect("all of it");
    stream.read_exact(&mut [0]).expect("an answer");
    Ended {
        mib: mib as f64,
        seconds: started.elapsed().as_secs_f64(),
        cpu_sending_s: cpu_s() - before,
        ..Ended::default()
    }
}

const NAME: &str = "receiver.kyklos.internal";
