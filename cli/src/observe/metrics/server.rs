//! A small HTTP/1.0 server for three short texts.
//!
//! The size, the time and the number of simultaneous requests are bounded: a slow or hostile client holds one of a few
//! threads for at most two seconds, and never a thread that computes or sends messages.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result};

/// Gives the status and the text for a path.
type Answer = fn(&str) -> (&'static str, String);

/// Listens at `address` for as long as the process lives. Returns the address, with the port that was chosen.
pub(super) fn serve(address: SocketAddr, answer: Answer) -> Result<SocketAddr> {
    let cannot = |error| Failure::run(format!("cannot serve metrics at {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    let spawned =
        std::thread::Builder::new().name("kyklos-metrics".into()).spawn(move || listen(&listener, answer));
    spawned.map_err(cannot)?;
    Ok(address)
}

fn listen(listener: &TcpListener, answer: Answer) {
    // Each connection holds a reference.
    let open = Arc::new(());
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Out of file descriptors, for example: wait before the next try.
            std::thread::sleep(PAUSE);
            continue;
        };
        let guard = Arc::clone(&open);
        if Arc::strong_count(&open) > MOST_CONNECTIONS + 1 {
            converse_at_once(stream, answer);
            continue;
        }
        // If no thread can start, the connection is dropped.
        let _ = std::thread::Builder::new().name("kyklos-metrics".into()).spawn(move || {
            converse(stream, answer);
            drop(guard);
        });
    }
}

fn converse(mut stream: TcpStream, answer: Answer) {
    let until = Instant::now() + PATIENCE;
    match read_path(&mut stream, until) {
        Request::Path(path) => {
            let (status, text) = answer(&path);
            reply(stream, until, status, &text);
        }
        Request::Wrong(status) => reply(stream, until, status, "GET /metrics\n"),
        Request::Gone => {}
    }
}

/// For a client when all threads are taken, on the listener's own thread: the state of the process, which a supervisor asks for
/// to decide about its life, if the client asks for it at once.
fn converse_at_once(mut stream: TcpStream, answer: Answer) {
    let request = read_path(&mut stream, Instant::now() + AT_ONCE);
    let until = Instant::now() + PAUSE;
    match request {
        Request::Path(path) if matches!(&path[..], "/healthz" | "/readyz") => {
            let (status, text) = answer(&path);
            reply(stream, until, status, &text);
        }
        _ => reply(stream, until, "503 Service Unavailable", "too many at once\n"),
    }
}

pub(super) enum Request {
    Path(String),
    Wrong(&'static str),
    /// Closed or too slow: no answer is sent.
    Gone,
}

fn read_path(stream: &mut TcpStream, until: Instant) -> Request {
    let mut request = Vec::new();
    let mut piece = [0; 512];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return Request::Gone;
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return Request::Gone,
            Ok(read) => request.extend_from_slice(&piece[..read]),
        }
        if request.windows(4).any(|four| four == b"\r\n\r\n") || request.windows(2).any(|two| two == b"\n\n")
        {
            return path_of(&request);
        }
        if request.len() > MOST_REQUEST_BYTES {
            return Request::Wrong("431 Request Header Fields Too Large");
        }
    }
}

pub(super) fn path_of(request: &[u8]) -> Request {
    let line = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some("GET"), Some(target), Some(version)) if version.starts_with("HTTP/1.") => {
            Request::Path(target.split('?').next().unwrap_or_default().to_owned())
        }
        (Some(_), Some(_), Some(version)) if version.starts_with("HTTP/1.") => {
            Request::Wrong("405 Method Not Allowed")
        }
        _ => Request::Wrong("400 Bad Request"),
    }
}

fn reply(mut stream: TcpStream, until: Instant, status: &str, text: &str) {
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n",
        text.len()
    );
    let whole = [head.as_bytes(), text.as_bytes()].concat();
    let mut rest = &whole[..];
    while !rest.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_write_timeout(Some(left)).is_err() {
            return;
        }
        match stream.write(rest) {
            Ok(0) | Err(_) => return,
            Ok(written) => rest = &rest[written..],
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

/// Time limit of a request with its answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit of requests on the listener's own thread.
const AT_ONCE: Duration = Duration::from_millis(20);
/// Time limit of answers on the listener's own thread.
const PAUSE: Duration = Duration::from_millis(50);
const MOST_CONNECTIONS: usize = 8;
const MOST_REQUEST_BYTES: usize = 4 << 10;
