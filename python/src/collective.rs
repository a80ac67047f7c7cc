//! How the messages of a group go between devices.

use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{Error, Result, Session, SessionOptions};
use kyklos_cuda::{CollectiveChoice, FormedCollective};
use kyklos_transport::Group;
use pyo3::{Py, PyAny};

use crate::torch_device;

/// How the messages of plans are to go. The same variant on all ranks.
#[derive(Clone)]
pub(crate) enum Wish {
    /// As NVIDIA GPUs can, or through host memory.
    Formed(CollectiveChoice),
    /// By `torch.distributed`, with a process group like this one of the same ranks.
    Torch(Arc<Py<PyAny>>),
}

impl Wish {
    /// What the options `collective` and `nccl_cluster` say, and the process group if the group is
    /// made of one.
    pub(crate) fn of(
        name: &str,
        cluster: Option<u32>,
        process_group: Option<&Arc<Py<PyAny>>>,
    ) -> Result<Self> {
        let formed = |choice| Ok(Self::Formed(choice));
        match (name, cluster) {
            ("host" | "torch", Some(_)) => Err(Error::request(
                "nccl_cluster without NCCL",
                "add collective=\"nccl\" or collective=\"auto\", or leave it out",
            )),
            ("host", None) => formed(CollectiveChoice::Host),
            ("nccl", _) => formed(CollectiveChoice::Nccl { cluster: cluster.unwrap_or(0) }),
            ("auto", _) => formed(CollectiveChoice::Auto { cluster: cluster.unwrap_or(0) }),
            ("torch", None) => process_group.cloned().map(Self::Torch).ok_or_else(|| {
                Error::request(
                    "collective=\"torch\" without a process group",
                    "form the group with kyklos.Group.from_torch",
                )
            }),
            _ => Err(Error::request(
                format!("collective {name:?} is not known"),
                "use \"host\", \"nccl\", \"auto\" or \"torch\"",
            )),
        }
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Self::Formed(CollectiveChoice::Host))
    }
}

/// A session of this rank, and in words how its messages go. All ranks of the group do this
/// together.
pub(crate) fn session(
    wish: &Wish,
    transport: Group,
    device: Device,
    options: SessionOptions,
    leave: Duration,
) -> Result<(Session, String)> {
    let refused = |text: String, remedy: &str| {
        // All ranks leave: in order, so that each gets the decision.
        let _ = pollster::block_on(transport.close(leave));
        Err(Error::request(text, remedy))
    };
    let (collective, words) = match wish {
        Wish::Torch(process_group) => {
            match torch_device::form(process_group, &transport, &device, &options)? {
                Ok((collective, words)) => (collective as _, words),
                Err(why) => {
                    return refused(
                        format!("torch.distributed is not used: {why}"),
                        "use collective=\"host\"",
                    );
                }
            }
        }
        Wish::Formed(choice) => {
            let formed = pollster::block_on(FormedCollective::form(*choice, &transport, &device, &options))?;
            let words = formed.to_string();
            match (choice, formed.refusal) {
                (CollectiveChoice::Nccl { .. }, Some(refusal)) => {
                    return refused(refusal.to_string(), "use collective=\"host\", or \"auto\"");
                }
                _ => (formed.collective, words),
            }
        }
    };
    Ok((Session::with_collective(transport, device, collective, options), words))
}

/// Of ranks that share a device.
pub(crate) const ONE_DEVICE: &str = "the memory of one device";
