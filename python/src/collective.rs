//! How the messages of a group go between devices.

use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{Error, Result, Session, SessionOptions};
use kyklos_cuda::{CudaPeers, NcclCollective, NcclDecision, NcclOptions};
use kyklos_transport::Transport;

/// What the ranks are to agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choice {
    Host,
    /// `partial`: between the ranks that can use it; otherwise all ranks or none.
    Nccl {
        partial: bool,
        cluster: u32,
    },
}

impl Choice {
    /// Of the options `collective` and `nccl_cluster`.
    pub(crate) fn of(name: &str, cluster: Option<u32>) -> Result<Self> {
        let nccl = |partial| Self::Nccl { partial, cluster: cluster.unwrap_or(0) };
        match (name, cluster) {
            ("host", None) => Ok(Self::Host),
            ("host", Some(_)) => Err(Error::request(
                "nccl_cluster without NCCL",
                "add collective=\"nccl\" or collective=\"auto\", or leave it away",
            )),
            ("nccl", _) => Ok(nccl(false)),
            ("auto", _) => Ok(nccl(true)),
            _ => Err(Error::request(
                format!("collective {name:?} is not known"),
                "use \"host\", \"nccl\" or \"auto\"",
            )),
        }
    }

    /// A session of this rank, and in words how its messages go. All ranks of the group do this together.
    pub(crate) fn session(
        self,
        transport: Arc<dyn Transport>,
        device: Device,
        options: SessionOptions,
        leave: Duration,
    ) -> Result<(Session, String)> {
        let Self::Nccl { partial, cluster } = self else {
            return Ok((Session::with_options(transport, device, options), HOST.to_owned()));
        };
        let form_within = options.deadline.min(NcclOptions::default().form_within);
        let nccl = NcclOptions {
            deadline: options.deadline,
            form_within,
            cluster,
            partial,
            ..NcclOptions::default()
        };
        match pollster::block_on(NcclCollective::form(&transport, &device, nccl))? {
            NcclDecision::Use(nccl) => {
                let words = nccl.to_string();
                Ok((Session::with_collective(transport, device, nccl, options), words))
            }
            NcclDecision::Leave(refusal) if partial => {
                match pollster::block_on(CudaPeers::form(&transport, &device, form_within, options.deadline))?
                {
                    Some(peers) => {
                        let words = format!("{peers}; {refusal}");
                        Ok((Session::with_collective(transport, device, peers, options), words))
                    }
                    None => {
                        let session = Session::with_options(transport, device, options);
                        Ok((session, format!("{HOST}; {refusal}")))
                    }
                }
            }
            NcclDecision::Leave(refusal) => {
                let session = Session::with_options(transport, device, options);
                // All ranks leave: in order, so that each gets the decision.
                let _ = session.close(leave);
                Err(Error::request(refusal.to_string(), "use collective=\"host\", or \"auto\""))
            }
        }
    }
}

const HOST: &str = "host memory";
/// Of ranks that share a device.
pub(crate) const ONE_DEVICE: &str = "the memory of one device";
