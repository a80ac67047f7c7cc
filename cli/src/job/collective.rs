//! How the messages of plans go between devices.

use clap::Args;
use kyklos::backend::Device;
use kyklos::{Session, SessionOptions};
use kyklos_cuda::{CollectiveChoice, FormedCollective, NcclObserver};
use kyklos_transport::Group;

use crate::devices::{BackendKind, DeviceRequest};
use crate::failure::{Failure, Result, note};
use crate::options::{CollectiveName, headings};

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CollectiveArgs {
    /// How the messages of a plan go between devices
    #[arg(help_heading = headings::NETWORK, long, value_enum, default_value_t = CollectiveName::Host)]
    collective: CollectiveName,
    /// Number of the cluster of this rank, 0 if not given: NCCL is used between ranks of one
    /// cluster only
    #[arg(help_heading = headings::NETWORK, long, value_name = "N")]
    nccl_cluster: Option<u32>,
}

impl CollectiveArgs {
    /// The ways of a rank.
    pub(crate) fn ways(self) -> CollectiveOptions {
        let Self { collective, nccl_cluster } = self;
        CollectiveOptions { collective, nccl_cluster: nccl_cluster.unwrap_or(0) }
    }

    /// Refuses options of NCCL that do not fit, and NCCL where a rank has another of `devices`.
    /// `are_all`: whether no rank has a device that is not named.
    pub(crate) fn fits(self, devices: &[DeviceRequest], are_all: bool) -> Result<()> {
        let Self { collective, nccl_cluster } = self;
        if nccl_cluster.is_some() && collective == CollectiveName::Host {
            return Err(Failure::request(
                "--nccl-cluster without NCCL",
                "add --collective nccl or --collective auto, or leave it out",
            ));
        }
        let cannot = |device: &&DeviceRequest| match device {
            DeviceRequest::Auto => are_all,
            DeviceRequest::Of(kind, _) => *kind != BackendKind::Cuda,
        };
        match devices.iter().find(cannot).filter(|_| collective == CollectiveName::Nccl) {
            Some(device) => Err(Failure::request(
                format!("--collective nccl with --device {device}"),
                "use --device cuda, or leave --collective out",
            )),
            None => Ok(()),
        }
    }
}

/// How the messages of a rank may travel between devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveOptions {
    pub(crate) collective: CollectiveName,
    nccl_cluster: u32,
}

/// How messages go, in words, and the state of NCCL if it carries them.
type Way = (String, Option<NcclObserver>);

impl CollectiveOptions {
    /// A session of this rank. Where NCCL may be used, all ranks agree first whether they use it,
    /// and rank 0 says so.
    pub(crate) fn open(
        self,
        transport: &Group,
        device: Device,
        options: SessionOptions,
    ) -> Result<(Session, Option<Way>)> {
        let Self { collective, nccl_cluster: cluster } = self;
        let wish = match collective {
            CollectiveName::Host => {
                return Ok((Session::with_options(transport.clone(), device, options), None));
            }
            CollectiveName::Nccl => CollectiveChoice::Nccl { cluster },
            CollectiveName::Auto => CollectiveChoice::Auto { cluster },
        };
        let formed = pollster::block_on(FormedCollective::form(wish, transport, &device, &options))?;
        let agreed = (formed.to_string(), formed.nccl);
        let why = match formed.refusal {
            Some(refusal) if collective == CollectiveName::Nccl => {
                let failure = Failure::run(format!("{refusal}: use --collective host"));
                return Err(if refusal.has_failed { failure } else { failure.into_refusal() });
            }
            refusal => refusal.map_or_else(String::new, |refusal| format!("{refusal}; ")),
        };
        if transport.rank().0 == 0 {
            let way = formed.way;
            note(&match formed.between_devices {
                true => format!("{why}messages go by {way}; this has never been tried on a GPU"),
                false => format!("{why}messages go through {way}"),
            });
        }
        let session = Session::with_collective(transport.clone(), device, formed.collective, options);
        Ok((session, Some(agreed)))
    }
}
