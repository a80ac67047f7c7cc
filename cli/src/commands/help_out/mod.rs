//! `kyklos help-out`: this machine's device computes a share of somebody else's attention.

mod leaving;
mod owner;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use kyklos::Error;
use kyklos::backend::Device;
use kyklos_helpers::{HelperOptions, Knock, OwnerSearch, help};
use kyklos_launch::variables::JOIN;

use self::leaving::Leaving;
use self::owner::{Owner, wrong_token};
use self::watch::Watch;
use crate::devices::{self, BackendKind, DeviceId, DeviceRequest};
use crate::failure::{Result, note, print};
use crate::options::{ByteSize, TabArgs};

#[derive(Debug, Args)]
pub(crate) struct HelpOutArgs {
    /// Token that kyklos helpers invite printed on the owner's machine [or KYKLOS_JOIN, which other
    /// users do not see]. Without one: lists the owners that announce themselves on the local
    /// network
    #[arg(value_name = "TOKEN")]
    token: Option<String>,
    /// Where the owner is, if it is not where the token says
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
    #[arg(
        long,
        value_name = "D",
        default_value = "auto",
        help = format!("The device that helps: {}", devices::names())
    )]
    device: DeviceRequest,
    /// Most bytes of tensors that this helper takes at a time, such as 6GiB; the owner then sends
    /// smaller pieces [default: half of this machine's memory]
    #[arg(long, value_name = "BYTES")]
    memory: Option<ByteSize>,
    /// End when the owner needs no help any more, or is gone, instead of waiting for it
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    tabs: TabArgs,
}

/// Runs the command.
pub(crate) fn help_out(args: &HelpOutArgs) -> Result<()> {
    let done = run(args);
    devices::say_goodbye();
    done
}

fn run(args: &HelpOutArgs) -> Result<()> {
    let of_environment = || std::env::var(JOIN).ok().filter(|token| !token.is_empty());
    let Some(token) = args.token.clone().or_else(of_environment) else {
        return list();
    };
    let knock = Knock::new(&token).map_err(|error| wrong_token(&error))?;
    let mut owner = Owner::new(knock, args.address.clone())?;
    match args.device {
        DeviceRequest::Of(BackendKind::Tab, _) => args.tabs.let_in(TAB_PATIENCE)?,
        _ => args.tabs.refuse_without_tabs()?,
    }
    let id = devices::choose(&[args.device], 0)?;
    // Before anything waits: for a tab, or for the owner.
    let leaving = Leaving::on_interrupt()?;
    let mut device = open(id)?;
    let watch = Arc::new(Watch::new());
    let told = Arc::clone(&watch);
    let options = HelperOptions {
        memory_bytes: args.memory.map(|ByteSize(bytes)| bytes),
        on_event: Arc::new(move |event| told.event(event)),
    };
    let mut pause = FIRST_PAUSE;
    while !leaving.is_asked() {
        let group = owner.enter()?;
        watch.entered(&owner.place());
        let began = Instant::now();
        leaving.group(Some(&group));
        let helped = help(group, &device, &options);
        leaving.group(None);
        if leaving.is_asked() {
            break;
        }
        let device_failed = matches!(helped, Err(Error::Device { .. }));
        watch.left(helped.as_ref().err());
        if args.once {
            watch.sum_up();
            // Told above: an owner that is gone is an end as good as another.
            return match helped {
                Err(Error::Transport(_)) => Ok(()),
                helped => Ok(helped?),
            };
        }
        // Who comes again at once is not wanted, or does not work.
        pause = if began.elapsed() > LONG_STAY { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        std::thread::sleep(pause);
        if device_failed {
            drop(device);
            device = open(id)?;
        }
    }
    watch.sum_up();
    Ok(())
}

/// Opens the device; of a tab it waits for one.
fn open(id: DeviceId) -> Result<Device> {
    let device = id.open()?;
    note(&format!("this machine helps with {id}: {}", device.info().name));
    Ok(device)
}

/// Prints the owners on the local network.
fn list() -> Result<()> {
    note("no token: looking for owners on the local network");
    let found = OwnerSearch::new().map(|mut search| search.look(LOOK).to_vec()).unwrap_or_default();
    if found.is_empty() {
        return print(
            "no owner announces itself here. On the owner's machine, kyklos helpers invite NAME makes a token; with it,\n\
             kyklos help-out TOKEN also finds an owner that does not announce itself\n",
        );
    }
    let rows = found.into_iter().map(|owner| {
        let at = owner.addresses.first().map(ToString::to_string).unwrap_or_default();
        vec![owner.helper, at, owner.owner]
    });
    print(&kyklos::plan::table(&["waits for helper", "at", "owner"], rows.collect()))?;
    print(
        "kyklos help-out needs the token of one of them, which kyklos helpers invite printed on its machine\n",
    )
}

const LOOK: Duration = Duration::from_secs(3);
/// A tab may come much later.
const TAB_PATIENCE: Duration = Duration::from_secs(24 * 3600);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const LONG_STAY: Duration = Duration::from_secs(10);
