//! How the messages of a group go between devices.

use std::time::Duration;

use kyklos::backend::Device;
use kyklos::{Error, Result, Session, SessionOptions};
use kyklos_cuda::{CollectiveChoice, FormedCollective};
use kyklos_transport::Group;

/// What the options `collective` and `nccl_cluster` say.
pub(crate) fn wish(name: &str, cluster: Option<u32>) -> Result<CollectiveChoice> {
    match (name, cluster) {
        ("host", None) => Ok(CollectiveChoice::Host),
        ("host", Some(_)) => Err(Error::request(
            "nccl_cluster without NCCL",
            "add collective=\"nccl\" or collective=\"auto\", or leave it out",
        )),
        ("nccl", _) => Ok(CollectiveChoice::Nccl { cluster: cluster.unwrap_or(0) }),
        ("auto", _) => Ok(CollectiveChoice::Auto { cluster: cluster.unwrap_or(0) }),
        _ => Err(Error::request(
            format!("collective {name:?} is not known"),
            "use \"host\", \"nccl\" or \"auto\"",
        )),
    }
}

/// A session of this rank, and in words how its messages go. All ranks of the group do this
/// together.
pub(crate) fn session(
    wish: CollectiveChoice,
    transport: Group,
    device: Device,
    options: SessionOptions,
    leave: Duration,
) -> Result<(Session, String)> {
    let formed = pollster::block_on(FormedCollective::form(wish, &transport, &device, &options))?;
    let words = formed.to_string();
    let session = Session::with_collective(transport, device, formed.collective, options);
    match (wish, formed.refusal) {
        (CollectiveChoice::Nccl { .. }, Some(refusal)) => {
            // All ranks leave: in order, so that each gets the decision.
            let _ = session.close(leave);
            Err(Error::request(refusal.to_string(), "use collective=\"host\", or \"auto\""))
        }
        _ => Ok((session, words)),
    }
}

/// Of ranks that share a device.
pub(crate) const ONE_DEVICE: &str = "the memory of one device";
