//! The collective of a group whose ranks may have CUDA devices: by NCCL, by copies between devices,
//! or through host memory.

use std::fmt;
use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::collective::HostStaged;
use kyklos::{DeviceCollective, Result, SessionOptions};
use kyklos_transport::Group;

use crate::nccl::{NcclCollective, NcclDecision, NcclObserver, NcclOptions, NcclRefusal};
use crate::peers::CudaPeers;

/// How the messages of plans are to go between the devices of a group. The same variant on all
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveChoice {
    /// Through host memory.
    Host,
    /// By NCCL between all ranks.
    Nccl {
        /// See [`NcclOptions::cluster`].
        cluster: u32,
    },
    /// By NCCL between the ranks that can. If no rank uses it, by copies between the CUDA devices
    /// of each process. All other messages through host memory.
    Auto {
        /// See [`NcclOptions::cluster`].
        cluster: u32,
    },
}

/// The collective that the ranks of a group have agreed on. `Display` says how messages go, and why
/// not by NCCL: `host memory; NCCL is not used: rank 1: …`.
pub struct FormedCollective {
    /// The collective, for [`Session::with_collective`](kyklos::Session::with_collective).
    pub collective: Arc<dyn DeviceCollective>,
    /// How messages go, for people: that of [`NcclCollective`], that of [`CudaPeers`], or `host
    /// memory`. The same on all ranks.
    pub way: String,
    /// Whether messages between some ranks go from device to device.
    pub between_devices: bool,
    /// Why no rank uses NCCL, if the ranks were to. The same on all ranks. With
    /// [`CollectiveChoice::Nccl`] messages then go through host memory: a caller that insists
    /// on NCCL ends with this refusal, on all ranks.
    pub refusal: Option<NcclRefusal>,
    /// What NCCL does for this rank, if it uses NCCL.
    pub nccl: Option<NcclObserver>,
}

impl FormedCollective {
    /// Agrees with all ranks of the group of `transport` how messages go: [`NcclCollective::form`],
    /// and [`CudaPeers::form`] where that is to follow. All ranks call it, at the same place
    /// between two operations of the group, also those on other devices; for
    /// [`CollectiveChoice::Host`] there is nothing to agree on. `options` are those of the session
    /// that uses it.
    ///
    /// The future must be polled to its end: other ranks wait for its votes. If it is dropped
    /// before, abort the group.
    ///
    /// ```
    /// use kyklos::backend::Device;
    /// use kyklos::{Session, SessionOptions};
    /// use kyklos_cuda::{CollectiveChoice, FormedCollective};
    /// use kyklos_transport::in_process_group;
    ///
    /// let group = in_process_group(1).remove(0);
    /// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
    /// let (choice, options) = (CollectiveChoice::Auto { cluster: 0 }, SessionOptions::default());
    /// let formed = pollster::block_on(FormedCollective::form(choice, &group, &device, &options))?;
    /// println!("messages go by {formed}");
    /// let session = Session::with_collective(group, device, formed.collective, options);
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Transport`](kyklos::Error::Transport) if the group fails.
    pub async fn form(
        wish: CollectiveChoice,
        group: &Group,
        device: &Device,
        options: &SessionOptions,
    ) -> Result<Self> {
        let SessionOptions { deadline, .. } = *options;
        let (cluster, partial) = match wish {
            CollectiveChoice::Host => return Ok(Self::host(group, options, None)),
            CollectiveChoice::Nccl { cluster } => (cluster, false),
            CollectiveChoice::Auto { cluster } => (cluster, true),
        };
        let nccl = NcclOptions::default();
        let form_within = deadline.min(nccl.form_within);
        let nccl = NcclOptions { deadline, form_within, cluster, partial, ..nccl };
        let refusal = match NcclCollective::form(group, device, nccl).await? {
            NcclDecision::Use(nccl) => {
                return Ok(Self {
                    way: nccl.to_string(),
                    nccl: nccl.observe(),
                    collective: nccl,
                    between_devices: true,
                    refusal: None,
                });
            }
            NcclDecision::Leave(refusal) => refusal,
        };
        let peers = if partial { CudaPeers::form(group, device, form_within, deadline).await? } else { None };
        Ok(match peers {
            Some(peers) => Self {
                way: peers.to_string(),
                collective: peers,
                between_devices: true,
                refusal: Some(refusal),
                nccl: None,
            },
            None => Self::host(group, options, Some(refusal)),
        })
    }

    fn host(group: &Group, options: &SessionOptions, refusal: Option<NcclRefusal>) -> Self {
        Self {
            collective: Arc::new(HostStaged::new(group.clone(), options.deadline)),
            way: "host memory".to_owned(),
            between_devices: false,
            refusal,
            nccl: None,
        }
    }
}

impl fmt::Display for FormedCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.way)?;
        self.refusal.as_ref().map_or(Ok(()), |refusal| write!(f, "; {refusal}"))
    }
}

impl fmt::Debug for FormedCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FormedCollective").field("way", &self.to_string()).finish_non_exhaustive()
    }
}
