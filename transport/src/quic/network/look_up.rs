//! The addresses of a name that may get them only later: a host whose network or resolver is not up
//! yet, or a pod that the name service does not know yet.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The addresses of a name (or an address as text), at least one and at most 16. A name without an
/// address is looked up again until `until`, whatever the resolver says of it; `waits` is called
/// once then, with its words. Blocks.
///
/// # Errors
///
/// For how long the name had no address, with the resolver's last words.
///
/// ```
/// use std::time::Instant;
/// use kyklos_transport::quic::look_up;
///
/// let addresses = look_up("127.0.0.1", 29600, Instant::now(), |_| {});
/// assert_eq!(addresses, Ok(vec!["127.0.0.1:29600".parse().unwrap()]));
/// ```
pub fn look_up(
    host: &str,
    port: u16,
    until: Instant,
    waits: impl FnOnce(&str),
) -> Result<Vec<SocketAddr>, String> {
    let once = || (host, port).to_socket_addrs().map(|all| all.take(MOST_ANSWERS).collect());
    look_up_by(once, until, waits)
}

fn look_up_by(
    mut once: impl FnMut() -> io::Result<Vec<SocketAddr>>,
    until: Instant,
    waits: impl FnOnce(&str),
) -> Result<Vec<SocketAddr>, String> {
    let (began, mut waits) = (Instant::now(), Some(waits));
    loop {
        let why = match once() {
            Ok(addresses) if addresses.is_empty() => "it has none".to_owned(),
            Ok(addresses) => return Ok(addresses),
            Err(error) => error.to_string(),
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let tried = began.elapsed().as_secs_f64();
            return Err(format!("the name had no address for {tried:.0} s ({why})"));
        }
        if let Some(waits) = waits.take() {
            waits(&why);
        }
        std::thread::sleep(PAUSE.min(left));
    }
}

/// Addresses of one name that are tried.
const MOST_ANSWERS: usize = 16;

/// Between two look-ups.
const PAUSE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_gets_its_address_later_is_waited_for_whatever_the_resolver_says() {
        let address: SocketAddr = "10.0.0.1:1".parse().unwrap();
        let words = ["Name or service not known", "Temporary failure in name resolution"];
        let mut answers = vec![Ok(vec![address]), Ok(Vec::new())];
        answers.extend(words.map(|words| Err(io::Error::other(words))));
        let mut said = Vec::new();
        let until = Instant::now() + Duration::from_secs(600);
        let found = look_up_by(|| answers.pop().unwrap(), until, |why| said.push(why.to_owned()));
        assert_eq!(found, Ok(vec![address]));
        assert_eq!(said, [words[1]]);
    }

    #[test]
    fn a_name_without_an_address_is_tried_once_at_the_least_and_the_error_says_for_how_long() {
        let mut times = 0;
        let none = || {
            times += 1;
            Err(io::Error::other("Name or service not known"))
        };
        let error = look_up_by(none, Instant::now(), |_| panic!("it does not wait")).unwrap_err();
        assert_eq!(error, "the name had no address for 0 s (Name or service not known)");
        assert_eq!(times, 1);
    }
}
