//! `kyklos helpers invite`.

use std::io::{IsTerminal, stderr};

use clap::Args;
use kyklos_helpers::Invitations;
use kyklos_transport::quic::Date;
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;

use crate::failure::{Result, note, print};

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
    let invitation = Invitations::of_user()?.invite(&args.name, args.address.as_deref(), args.port)?;
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
        invitation.token().place().rsplit_once(':').map_or("", |(_, port)| port)
    ));
    Ok(())
}
