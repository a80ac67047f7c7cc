//! How the messages of plans go between devices.

use std::sync::Arc;

use clap::Args;
use kyklos::backend::Device;
use kyklos::{Session, SessionOptions};
use kyklos_cuda::{CudaPeers, NcclCollective, NcclDecision, NcclObserver, NcclOptions};
use kyklos_transport::Transport;

use crate::devices::{BackendKind, DeviceRequest};
use crate::failure::{Failure, Result, note};
use crate::options::CollectiveName;

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CollectiveArgs {
    /// How the messages of a plan go between devices
    #[arg(long, value_enum, default_value_t = CollectiveName::Host)]
    collective: CollectiveName,
    /// Number of the cluster of this rank, 0 if not given: NCCL is used between ranks of one cluster only
    #[arg(long, value_name = "N")]
    nccl_cluster: Option<u32>,
}

impl CollectiveArgs {
    /// The ways of a rank.
    pub(crate) fn ways(self) -> Ways {
        let Self { collective, nccl_cluster } = self;
        Ways { collective, nccl_cluster: nccl_cluster.unwrap_or(0) }
    }

    /// Refuses options of NCCL that do not fit, and NCCL where a rank has another of `devices`. `are_all`: whether no rank has a
    /// device that is not named.
    pub(crate) fn fits(self, devices: &[DeviceRequest], are_all: bool) -> Result<()> {
        let Self { collective, nccl_cluster } = self;
        if nccl_cluster.is_some() && collective == CollectiveName::Host {
            return Err(Failure::request(
                "--nccl-cluster without NCCL",
                "add --collective nccl or --collective auto, or leave it away",
            ));
        }
        let cannot = |device: &&DeviceRequest| match device {
            DeviceRequest::Auto => are_all,
            DeviceRequest::Of(kind, _) => *kind != BackendKind::Cuda,
        };
        match devices.iter().find(cannot).filter(|_| collective == CollectiveName::Nccl) {
            Some(device) => Err(Failure::request(
                format!("--collective nccl with --device {device}"),
                "use --device cuda, or leave --collective away",
            )),
            None => Ok(()),
        }
    }
}

/// Which ways a rank may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) collective: CollectiveName,
    nccl_cluster: u32,
}

/// What the ranks have agreed on.
pub(crate) struct AgreedWays {
    /// The ways, in words.
    pub(crate) ways: String,
    pub(crate) nccl: Option<NcclObserver>,
}

impl Ways {
    /// A session of this rank. Where NCCL may be used, all ranks agree first whether they use it, and rank 0 says so.
    pub(crate) fn open(
        self,
        transport: &Arc<dyn Transport>,
        device: Device,
        options: SessionOptions,
    ) -> Result<(Session, Option<AgreedWays>)> {
        let Self { collective, nccl_cluster } = self;
        if collective == CollectiveName::Host {
            return Ok((Session::with_options(Arc::clone(transport), device, options), None));
        }
        let form_within = options.deadline.min(NcclOptions::default().form_within);
        let nccl = NcclOptions {
            deadline: options.deadline,
            form_within,
            resumable: options.resumable,
            cluster: nccl_cluster,
            partial: collective == CollectiveName::Auto,
            ..NcclOptions::default()
        };
        let decision = pollster::block_on(NcclCollective::form(transport, &device, nccl))?;
        let say = |text: String| {
            if transport.rank().0 == 0 {
                note(&text);
            }
        };
        match decision {
            NcclDecision::Use(nccl) => {
                let agreed = AgreedWays { ways: nccl.to_string(), nccl: nccl.observe() };
                say(format!("messages go by {}; this has never been tried on a GPU", agreed.ways));
                Ok((Session::with_collective(Arc::clone(transport), device, nccl, options), Some(agreed)))
            }
            NcclDecision::Leave(refusal) if collective == CollectiveName::Auto => {
                let peers =
                    pollster::block_on(CudaPeers::form(transport, &device, form_within, options.deadline))?;
                let transport = Arc::clone(transport);
                let (session, ways) = match peers {
                    Some(peers) => {
                        say(format!("{refusal}; messages go by {peers}; this has never been tried on a GPU"));
                        let ways = peers.to_string();
                        (Session::with_collective(transport, device, peers, options), ways)
                    }
                    None => {
                        say(format!("{refusal}; messages go through host memory"));
                        (Session::with_options(transport, device, options), "host memory".to_owned())
                    }
                };
                let ways = format!("{ways} ({refusal})");
                Ok((session, Some(AgreedWays { ways, nccl: None })))
            }
            NcclDecision::Leave(refusal) => Err(Failure::run(format!("{refusal}: use --collective host"))),
        }
    }
}
