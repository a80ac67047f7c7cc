//! A small HTTP/1.0 server for a few short texts, and for streams of events.
//!
//! The size, the time and the number of simultaneous requests are bounded: a slow or hostile client
//! holds one of a few threads for at most two seconds, or one of a few streams, and never a thread
//! that computes or sends messages. Nobody is answered who asks by a name that others choose: the
//! page of a stranger may have given its own name the address of the server, to read the answers.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos::machine::host_name;

use crate::failure::{Failure, Result};

/// What is served at one address.
pub(super) struct Service {
    /// For errors and names of threads.
    pub(super) name: &'static str,
    /// The text for requests that are no GET.
    pub(super) usage: &'static str,
    /// Paths that are answered while all threads are taken: the state of the process, which a
    /// supervisor asks for to decide about its life.
    pub(super) at_once: &'static [&'static str],
    /// Whether requests are answered too that have no `Host`, or the name of this machine: programs
    /// send them. A browser always has a `Host`, and no stranger chooses the name of this machine.
    pub(super) for_programs: bool,
    pub(super) answer: Box<dyn Fn(&Asked) -> Answer + Send + Sync>,
}

/// A request that can be answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) path: String,
    pub(super) host: Option<String>,
    /// Of browsers: how the page that asks is related to this server (`Sec-Fetch-Site`).
    pub(super) site: Option<String>,
}

/// The answer to a request.
pub(super) enum Answer {
    Text(Text),
    /// Events, for as long as the function runs.
    Events(Box<dyn FnOnce(&mut Sink) + Send>),
}

/// A text with its status line and header fields.
pub(super) struct Text {
    pub(super) status: &'static str,
    pub(super) content_type: &'static str,
    /// More fields, each with its line end.
    pub(super) fields: &'static str,
    pub(super) body: Cow<'static, str>,
}

impl Text {
    pub(super) fn plain(status: &'static str, body: impl Into<Cow<'static, str>>) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", fields: "", body: body.into() }
    }
}

/// Listens at `address` for as long as the process lives. Returns the address, with the port that
/// was chosen.
pub(super) fn serve(address: SocketAddr, service: Service) -> Result<SocketAddr> {
    let name = service.name;
    let cannot = |error: io::Error| {
        let failure = Failure::run(format!("cannot serve {name} at {address}: {error}"));
        // An address that this machine has not, or that is closed to this user.
        let is_wrong = match error.kind() {
            ErrorKind::PermissionDenied => (1..1024).contains(&address.port()),
            kind => kind == ErrorKind::AddrNotAvailable,
        };
        if is_wrong { failure.into_refusal() } else { failure }
    };
    let listener = TcpListener::bind(address).map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    let names = Names::of(address.ip(), service.for_programs);
    let server = Arc::new(Server { service, names, requests: Arc::new(()), streams: Arc::new(()) });
    let spawned = thread().spawn(move || server.listen(&listener));
    spawned.map_err(cannot)?;
    Ok(address)
}

struct Server {
    service: Service,
    names: Names,
    /// Each request that has a thread holds a reference.
    requests: Arc<()>,
    /// Each stream holds a reference.
    streams: Arc<()>,
}

impl Server {
    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                // Out of file descriptors, for example: wait before the next try.
                std::thread::sleep(PAUSE);
                continue;
            };
            let place = Arc::clone(&self.requests);
            if Arc::strong_count(&self.requests) > MOST_REQUESTS + 1 {
                self.converse_at_once(stream);
                continue;
            }
            let server = Arc::clone(self);
            // If no thread can start, the connection is dropped.
            let _ = thread().spawn(move || server.converse(stream, place));
        }
    }

    fn converse(&self, mut stream: TcpStream, place: Arc<()>) {
        let until = Instant::now() + PATIENCE;
        let answer = match read_request(&mut stream, until).of(&self.names) {
            Request::Whole(asked) => (self.service.answer)(&asked),
            Request::Wrong(status) => Answer::Text(Text::plain(status, self.service.usage)),
            Request::Misdirected => Answer::Text(Text::plain(MISDIRECTED, MISDIRECTED_TEXT)),
            Request::Gone => return,
        };
        match answer {
            Answer::Text(text) => reply(stream, until, &text),
            Answer::Events(events) => {
                let held = Arc::clone(&self.streams);
                if Arc::strong_count(&self.streams) > MOST_STREAMS + 1 {
                    return reply(stream, until, &Text::plain(BUSY, "too many streams\n"));
                }
                // A stream takes no place of requests.
                drop(place);
                let mut sink = Sink(stream);
                if sink.send(EVENTS_HEAD.as_bytes(), PATIENCE) {
                    events(&mut sink);
                }
                drop(held);
            }
        }
    }

    /// For a client when all threads are taken, on the listener's own thread, if the client asks at
    /// once.
    fn converse_at_once(&self, mut stream: TcpStream) {
        let request = read_request(&mut stream, Instant::now() + AT_ONCE).of(&self.names);
        let until = Instant::now() + PAUSE;
        let busy = || Text::plain(BUSY, "too many at once\n");
        let text = match request {
            Request::Whole(asked) if self.service.at_once.contains(&&asked.path[..]) => {
                match (self.service.answer)(&asked) {
                    Answer::Text(text) => text,
                    Answer::Events(_) => busy(),
                }
            }
            _ => busy(),
        };
        reply(stream, until, &text);
    }
}

fn thread() -> std::thread::Builder {
    std::thread::Builder::new().name("kyklos-http".into())
}

/// The connection of a client that gets events.
#[derive(Debug)]
pub(super) struct Sink(TcpStream);

impl Sink {
    /// Whether the client has taken all bytes in time.
    pub(super) fn send(&mut self, bytes: &[u8], patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.0.set_write_timeout(Some(left)).is_err() {
                return false;
            }
            match self.0.write(rest) {
                Ok(0) | Err(_) => return false,
                Ok(written) => rest = &rest[written..],
            }
        }
        true
    }
}

/// What a client has sent.
#[derive(Debug)]
pub(super) enum Request {
    Whole(Asked),
    Wrong(&'static str),
    /// For a server of another name.
    Misdirected,
    /// Closed or too slow: no answer is sent.
    Gone,
}

impl Request {
    /// This request to a server of these names.
    pub(super) fn of(self, names: &Names) -> Self {
        match self {
            Self::Whole(asked) if !names.take(asked.host.as_deref()) => Self::Misdirected,
            other => other,
        }
    }
}

/// By which names a server may be asked. A name that others choose is none of these.
#[derive(Debug)]
pub(super) struct Names {
    /// The address of its links.
    bound: IpAddr,
    for_programs: bool,
    /// Of this machine, whole and without its domain.
    machine: Vec<String>,
}

impl Names {
    pub(super) fn of(bound: IpAddr, for_programs: bool) -> Self {
        let whole = host_name().filter(|_| for_programs);
        let short = whole.as_ref().and_then(|name| name.split('.').next()).map(str::to_owned);
        Self { bound, for_programs, machine: whole.into_iter().chain(short).collect() }
    }

    /// Whether the `Host` of a request names this server.
    fn take(&self, host: Option<&str>) -> bool {
        let Some(host) = host else { return self.for_programs };
        let (name, port) = match host.strip_prefix('[') {
            Some(rest) => rest.split_once(']').unwrap_or((rest, "no port")),
            None => host.find(':').map_or((host, ""), |colon| host.split_at(colon)),
        };
        // Another port is well: it may be forwarded.
        let digits = port.strip_prefix(':').unwrap_or(port);
        if digits.len() > 5 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return false;
        }
        match name.parse::<IpAddr>() {
            Ok(ip) => self.bound.is_unspecified() || ip == self.bound || ip.is_loopback(),
            Err(_) => {
                let machine = self.machine.iter().map(String::as_str);
                machine.chain(["localhost"]).any(|ours| !name.is_empty() && name.eq_ignore_ascii_case(ours))
            }
        }
    }
}

fn read_request(stream: &mut TcpStream, until: Instant) -> Request {
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
            return parse(&request);
        }
        if request.len() > MOST_REQUEST_BYTES {
            return Request::Wrong("431 Request Header Fields Too Large");
        }
    }
}

pub(super) fn parse(request: &[u8]) -> Request {
    let text = String::from_utf8_lossy(request);
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split_whitespace();
    let path = match (words.next(), words.next(), words.next()) {
        (Some("GET"), Some(target), Some(version)) if version.starts_with("HTTP/1.") => {
            target.split('?').next().unwrap_or_default().to_owned()
        }
        (Some(_), Some(_), Some(version)) if version.starts_with("HTTP/1.") => {
            return Request::Wrong("405 Method Not Allowed");
        }
        _ => return Request::Wrong(BAD),
    };
    let mut asked = Asked { path, ..Asked::default() };
    for line in lines.take_while(|line| !line.is_empty()) {
        let Some((name, value)) = line.split_once(':') else { return Request::Wrong(BAD) };
        let field = match &name.to_ascii_lowercase()[..] {
            "host" => &mut asked.host,
            "sec-fetch-site" => &mut asked.site,
            _ => continue,
        };
        // Of two values, another program may take the other one.
        if field.replace(value.trim().to_owned()).is_some() {
            return Request::Wrong(BAD);
        }
    }
    Request::Whole(asked)
}

fn reply(stream: TcpStream, until: Instant, text: &Text) {
    let Text { status, content_type, fields, body } = text;
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\n{fields}Connection: close\r\n\r\n",
        body.len()
    );
    let mut sink = Sink(stream);
    let whole = [head.as_bytes(), body.as_bytes()].concat();
    if sink.send(&whole, until.saturating_duration_since(Instant::now())) {
        let _ = sink.0.shutdown(std::net::Shutdown::Write);
    }
}

/// Time limit of a request with its answer, and of one event.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit of requests on the listener's own thread.
const AT_ONCE: Duration = Duration::from_millis(20);
/// Time limit of answers on the listener's own thread.
const PAUSE: Duration = Duration::from_millis(50);
const MOST_REQUESTS: usize = 8;
const MOST_STREAMS: usize = 8;
const MOST_REQUEST_BYTES: usize = 4 << 10;
const BAD: &str = "400 Bad Request";
const BUSY: &str = "503 Service Unavailable";
const EVENTS_HEAD: &str = "HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                           X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n";
pub(super) const MISDIRECTED: &str = "421 Misdirected Request";
const MISDIRECTED_TEXT: &str = "use the address that kyklos has printed, or localhost\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn is_ours(host: &str, bound: IpAddr) -> bool {
        let browsers = Names::of(bound, false).take(Some(host));
        let mut programs = Names::of(bound, true);
        programs.machine = vec!["node1.example".to_owned(), "node1".to_owned()];
        assert_eq!(programs.take(Some(host)), browsers, "{host}");
        browsers
    }

    #[test]
    fn programs_may_ask_by_the_name_of_the_machine_or_by_none() {
        let here = IpAddr::from([192, 168, 1, 7]);
        let mut programs = Names::of(here, true);
        programs.machine = vec!["node1.example".to_owned(), "node1".to_owned()];
        let browsers = Names::of(here, false);
        for host in [Some("node1:9400"), Some("NODE1"), Some("node1.example:9400"), None] {
            assert!(programs.take(host) && !browsers.take(host), "{host:?}");
        }
        for host in ["node1.evil.example", "node2:9400", "node1:x", "", ":9400", "example"] {
            assert!(!programs.take(Some(host)), "{host}");
        }
        // Where the system tells no name, no name is its.
        programs.machine = Vec::new();
        assert!(programs.take(None) && !programs.take(Some("")) && programs.take(Some("localhost")));
    }

    #[test]
    fn only_the_names_of_the_link_are_ours() {
        let [here, any, lan] = ["127.0.0.1", "0.0.0.0", "192.168.1.7"].map(|ip| ip.parse().expect("an IP"));
        for host in ["127.0.0.1:80", "localhost", "LOCALHOST:4000", "[::1]:4000", "[::1]", "127.0.0.1"] {
            assert!(is_ours(host, here) && is_ours(host, any) && is_ours(host, lan), "{host}");
        }
        assert!(is_ours("192.168.1.7:80", lan) && is_ours("192.168.1.7:80", any));
        assert!(!is_ours("192.168.1.7:80", here));
        for host in
            ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""]
        {
            assert!(!is_ours(host, here) && !is_ours(host, any) && !is_ours(host, lan), "{host}");
        }
        for host in ["127.0.0.1:80:80", "[::1", "[::1]x", "localhost:x", "localhost:123456", "::1"] {
            assert!(!is_ours(host, here), "{host}");
        }
    }
}
