//! `kyklos helpers invite`.

use std::io::{IsTerminal, stderr};
use std::net::{Ipv6Addr, UdpSocket};

use clap::Args;
use kyklos_helpers::{Invitations, local_address};
use kyklos_launch::HostPort;
use kyklos_transport::quic::Date;
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;

use crate::failure::{Failure, Result, note, print};

#[derive(Debug, Args)]
pub(super) struct InviteArgs {
    /// Name of the helper, as the owner will show it: letters, digits, - and _
    #[arg(value_name = "NAME")]
    name: String,
    /// Name or address at which the helper reaches this machine: of the fastest link between the
    /// two [default: this machine's address on the local network]
    #[arg(long, value_name = "HOST")]
    address: Option<String>,
    /// UDP port of the owner for this helper [default: the first from 29700 that is free and in no
    /// other invitation]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
}

pub(super) fn invite(args: &InviteArgs) -> Result<()> {
    let invitations = Invitations::of_user()?;
    let is_again = args.address.is_none() && args.port.is_none() && invitations.names()?.contains(&args.name);
    let invitation = match is_again {
        true => invitations.read(&args.name)?,
        false => invitations.create(&args.name, &place(args, &invitations)?.to_string())?,
    };
    let token = invitation.token().to_string();
    note(&format!(
        "invitation for {}, until {}. Its token is a secret: whoever has it can be this helper.\n\
         on the other machine:",
        args.name,
        Date(invitation.until())
    ));
    // Only the token goes to standard output, for scripts.
    match std::io::stdout().is_terminal() {
        true => print(&format!("\n  kyklos help-out {token}\n\n"))?,
        false => print(&format!("{token}\n"))?,
    }
    if stderr().is_terminal()
        && let Ok(code) = QrCode::new(&token)
    {
        note(&code.render::<Dense1x2>().build());
    }
    note(&format!(
        "UDP port {} of this machine must be open to it. Here: with kyklos.helpers() in Python, or the node in ComfyUI",
        port(invitation.token().place()).unwrap_or_default()
    ));
    Ok(())
}

/// Where the helper finds this machine.
fn place(args: &InviteArgs, invitations: &Invitations) -> Result<HostPort> {
    let host = match &args.address {
        Some(host) => host.clone(),
        None => local_address().map(|address| address.to_string()).ok_or_else(|| {
            Failure::request(
                "this machine has no address on a network",
                "connect it, or give the address that the helper will reach with --address",
            )
        })?,
    };
    let port = match args.port {
        Some(port) => port,
        None => free_port(&taken(invitations)?)?,
    };
    let inner = host.trim_matches(['[', ']']);
    // An address with colons is one of IPv6; else it is a port too much.
    let is_host = !inner.contains(':') || inner.parse::<Ipv6Addr>().is_ok();
    HostPort::new(inner, port).filter(|_| is_host).ok_or_else(|| {
        Failure::request(
            format!("--address {host} is no name or address"),
            "write it without a port, such as 192.168.1.7; --port has the port",
        )
    })
}

fn port(place: &str) -> Option<u16> {
    place.rsplit_once(':').and_then(|(_, port)| port.parse().ok())
}

/// The ports of the other invitations.
fn taken(invitations: &Invitations) -> Result<Vec<u16>> {
    let places = invitations.names()?.into_iter().filter_map(|name| invitations.read(&name).ok());
    Ok(places.filter_map(|invitation| port(invitation.token().place())).collect())
}

fn free_port(taken: &[u16]) -> Result<u16> {
    let is_free = |port: &u16| !taken.contains(port) && UdpSocket::bind(("0.0.0.0", *port)).is_ok();
    (FIRST_PORT..=LAST_PORT).find(is_free).ok_or_else(|| {
        Failure::request(
            format!("no free UDP port from {FIRST_PORT} to {LAST_PORT}"),
            "choose one with --port",
        )
    })
}

const FIRST_PORT: u16 = 29_700;
const LAST_PORT: u16 = 29_999;
