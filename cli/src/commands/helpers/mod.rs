//! `kyklos helpers`: invitations of helpers, and what helpers would be worth.

mod forecast;
mod invite;
mod models;

use clap::{Args, Subcommand};
use kyklos::plan::table;
use kyklos_helpers::Invitations;
use kyklos_transport::quic::Date;

use self::forecast::ForecastArgs;
use self::invite::InviteArgs;
use crate::failure::{Result, note, print};

#[derive(Debug, Args)]
pub(crate) struct HelpersArgs {
    #[command(subcommand)]
    command: HelpersCommand,
}

#[derive(Debug, Subcommand)]
enum HelpersCommand {
    /// Makes an invitation for one helper, and prints the command for its machine
    ///
    /// The token goes to standard output; a second time for the same name it is the same. Whoever
    /// has it can become this helper, for a year, or until the invitation is removed. The owner
    /// (kyklos.helpers() in Python, the node in ComfyUI) lets in all helpers that have an
    /// invitation.
    Invite(InviteArgs),
    /// Lists the invitations of this user
    List,
    /// Deletes an invitation: its token lets nobody in any more
    Remove(RemoveArgs),
    /// Predicts what a helper would be worth for known models: needs no second machine
    ///
    /// A device of this machine is measured for a moment. The table has, for each model and link,
    /// the attention of one step alone and with a helper, and the gain of the whole step, of which
    /// attention is a part.
    Forecast(ForecastArgs),
}

#[derive(Debug, Args)]
struct RemoveArgs {
    /// Name of the helper
    #[arg(value_name = "NAME")]
    name: String,
}

/// Runs the command.
pub(crate) fn helpers(args: &HelpersArgs) -> Result<()> {
    match &args.command {
        HelpersCommand::Invite(args) => invite::invite(args),
        HelpersCommand::List => list(),
        HelpersCommand::Remove(RemoveArgs { name }) => {
            Invitations::of_user()?.remove(name)?;
            note(&format!(
                "the token of {name} lets nobody in any more, but for programs that run now: they take it until they end"
            ));
            Ok(())
        }
        HelpersCommand::Forecast(args) => forecast::forecast(args),
    }
}

fn list() -> Result<()> {
    let invitations = Invitations::of_user()?;
    let mut rows = Vec::new();
    for name in invitations.names()? {
        let (place, until) = match invitations.read(&name) {
            Ok(invitation) => (invitation.token().place().to_owned(), Date(invitation.until()).to_string()),
            Err(error) => ("-".to_owned(), error.to_string()),
        };
        rows.push(vec![name, place, until]);
    }
    if rows.is_empty() {
        note("no invitations: kyklos helpers invite NAME makes one");
        return Ok(());
    }
    print(&table(&["helper", "owner at", "until"], rows))
}
