//! `attend --watch`: a page that shows the ranks while they run. Rank 0 serves it.
//!
//! `state` keeps what is known of the call, `rows` reads the recorders of the ranks, `page` is the
//! page itself. Whoever reaches the address can read; nothing that a client sends changes the call.
//! The page and its script come from here, and the events are texts of [`state::Live`], at most two
//! in a second for each of a few clients.

mod page;
mod rows;
mod state;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use kyklos::Error;

pub(crate) use self::rows::Call;
pub(crate) use self::state::Live;
use crate::failure::{Failure, Result, note};
use crate::observe::http::{self, Answer, Asked, Service, Text};
use crate::observe::metrics::MetricsArgs;
use crate::options::headings;

/// Where the live page is served.
#[derive(Clone, Debug, Args)]
pub(crate) struct WatchArgs {
    /// Serve a live page from rank 0: ranks, shares, progress, health, and at the end the pages of
    /// --report. The link is printed. Everyone who reaches the address can read the page
    /// [default address: 127.0.0.1, any free port]
    #[arg(help_heading = headings::DIAGNOSIS, long, value_name = "IP[:PORT]", num_args = 0..=1, default_missing_value = "127.0.0.1")]
    pub(crate) watch: Option<WatchAddress>,
}

/// An address of this machine; port 0 is any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WatchAddress(SocketAddr);

impl FromStr for WatchAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let address = text.parse().or_else(|_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, 0)));
        match address {
            Ok(address)
                if !address.ip().is_multicast() && address.ip() != IpAddr::V4(Ipv4Addr::BROADCAST) =>
            {
                Ok(Self(address))
            }
            _ => Err(Error::request(
                format!("`{text}` is no address at which --watch can serve a page"),
                "give an IP address of this machine, with or without a port, such as 127.0.0.1:8080",
            )),
        }
    }
}

impl fmt::Display for WatchAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Refuses a port that the metrics of a rank of this host take.
pub(crate) fn check(args: &WatchArgs, metrics: &MetricsArgs, ranks_here: u32) -> Result<()> {
    let (Some(WatchAddress(watch)), Some(first)) = (args.watch, metrics.metrics) else { return Ok(()) };
    let ports = u32::from(first.port())..u32::from(first.port()) + ranks_here.max(1);
    let meet = watch.ip() == first.ip() || watch.ip().is_unspecified() || first.ip().is_unspecified();
    if meet && watch.port() != 0 && first.port() != 0 && ports.contains(&u32::from(watch.port())) {
        return Err(Failure::request(
            format!(
                "--watch {watch} at a port of --metrics {first}, of which each rank of this host takes one"
            ),
            "use another port for one of the two, or leave the port of --watch out",
        ));
    }
    Ok(())
}

/// Serves the page and prints its link, if it is asked for.
pub(crate) fn serve(args: &WatchArgs, heartbeat_ms: Option<u32>) -> Result<Option<Arc<Live>>> {
    let Some(WatchAddress(address)) = args.watch else { return Ok(None) };
    let live = Arc::new(Live::new(heartbeat_ms));
    let served = Arc::clone(&live);
    let page = page::html();
    let answer = move |asked: &Asked| answer(&served, &page, asked);
    let service = Service {
        name: "the live page",
        usage: "this server only answers GET\n",
        at_once: &[],
        for_programs: false,
        answer: Box::new(answer),
    };
    let address = http::serve(address, service)?;
    note(&format!("live page: http://{address}/"));
    Ok(Some(live))
}

/// Makes the call, and shows its end on the page.
pub(crate) fn to_the_end(live: Option<&Live>, call: impl FnOnce() -> Result<()>) -> Result<()> {
    let result = call();
    if let Some(live) = live {
        live.ended(result.as_ref().err());
    }
    result
}

fn answer(live: &Arc<Live>, page: &Arc<str>, asked: &Asked) -> Answer {
    let wrong = |status, body: &'static str| Answer::Text(Text::plain(status, body));
    let own = asked.site.as_deref().is_none_or(|site| matches!(site, "same-origin" | "none"));
    match &asked.path[..] {
        "/" => Answer::Text(Text {
            status: "200 OK",
            content_type: "text/html; charset=utf-8",
            fields: PAGE_FIELDS,
            body: page.to_string().into(),
        }),
        _ if !own => wrong("403 Forbidden", "this is for the page of this server only\n"),
        "/live.mjs" => Answer::Text(Text {
            status: "200 OK",
            content_type: "text/javascript; charset=utf-8",
            fields: OWN_FIELDS,
            body: page::SCRIPT.into(),
        }),
        "/events" => {
            let live = Arc::clone(live);
            Answer::Events(Box::new(move |sink| live.tell(sink)))
        }
        _ => wrong("404 Not Found", "there are /, /live.mjs and /events\n"),
    }
}

const PAGE_FIELDS: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; connect-src 'self'; \
    style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\n";
const OWN_FIELDS: &str = "Cross-Origin-Resource-Policy: same-origin\r\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_lack_its_port_and_must_be_one_of_a_machine() {
        let read = |text: &str| text.parse::<WatchAddress>().map(|address| address.to_string()).ok();
        assert_eq!(read("127.0.0.1").as_deref(), Some("127.0.0.1:0"));
        assert_eq!(read("[::1]:80").as_deref(), Some("[::1]:80"));
        assert_eq!(
            ["224.0.0.1:80", "255.255.255.255", "localhost:80", ""].map(read),
            [None, None, None, None]
        );
    }
}
