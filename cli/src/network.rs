//! The options of the network between ranks.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use kyklos::Error;
use kyklos_transport::quic::{Carrier, Congestion, LinkProfile, LinkSettings};

use crate::failure::{Failure, Result};
use crate::options::{ByteSize, headings};

/// Settings of the links between ranks; usually the same on all ranks.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = headings::NETWORK)]
pub(crate) struct NetworkArgs {
    /// Protocol that carries the packets: udp, or tcp where UDP is blocked. The same on all ranks
    /// [default: udp]
    #[arg(long, value_enum)]
    pub(crate) network: Option<CarrierName>,
    /// Kind of the links between ranks: lan within a data centre, wan between data centres, where
    /// links may be away for up to 10 seconds and a dead rank is found after 15. The same on
    /// all ranks [default: lan]
    #[arg(long, value_enum)]
    pub(crate) link: Option<ProfileName>,
    /// Largest IP packet that every link carries, in bytes, such as 9000 with jumbo frames
    /// [default: measured, up to 1500]
    #[arg(long, value_name = "BYTES")]
    pub(crate) link_mtu: Option<u16>,
    /// How much is in flight: as cubic decides, which shares links with other traffic, or
    /// fixed:BYTES in spite of losses, for links without other traffic [default: cubic; with tcp
    /// the choice of the system]
    #[arg(long, value_name = "cubic|fixed:BYTES")]
    pub(crate) congestion: Option<CongestionName>,
    /// Connections between two ranks for messages, each with a port and a thread, for links that
    /// are faster than one core can encrypt. The same on all ranks [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) lanes: Option<u8>,
    /// Whether ranks of one user on one host move tensors through memory that both share, which is
    /// not encrypted; off: over the network as between hosts [default: on]
    #[arg(long, value_enum)]
    pub(crate) shared_memory: Option<OnOff>,
    /// Memory limit of the connections of a rank, such as 512MiB [default: 1GiB, or the minimum for
    /// the group]
    #[arg(long, value_name = "BYTES")]
    pub(crate) net_memory: Option<ByteSize>,
}

impl NetworkArgs {
    /// The settings, not yet checked for a group.
    pub(crate) fn settings(&self) -> LinkSettings {
        LinkSettings {
            mtu: self.link_mtu,
            carrier: match self.network {
                Some(CarrierName::Tcp) => Carrier::Tcp,
                Some(CarrierName::Udp) | None => Carrier::Udp,
            },
            congestion: self.congestion.map(|CongestionName(congestion)| congestion).unwrap_or_default(),
            memory_bytes: self.net_memory.map(|ByteSize(bytes)| bytes),
            lanes: self.lanes.unwrap_or(1),
            profile: match self.link {
                Some(ProfileName::Wan) => LinkProfile::Wan,
                Some(ProfileName::Lan) | None => LinkProfile::Lan,
            },
            shared_memory: self.shared_memory != Some(OnOff::Off),
        }
    }

    /// The settings, checked for `size` ranks that share this process and its loopback interface.
    /// Such ranks are there to try the network, so they share memory only if that is asked for.
    pub(crate) fn here(&self, size: u32) -> Result<LinkSettings> {
        let link = LinkSettings { shared_memory: self.shared_memory == Some(OnOff::On), ..self.settings() };
        // No rank has tried anything yet: it is the request that is wrong.
        link.check(Ipv4Addr::LOCALHOST.into(), size).map_err(|error| Failure::refused(error.to_string()))?;
        Ok(link)
    }

    /// Refuses what would be ignored between ranks that need no network.
    pub(crate) fn refuse_without_network(&self) -> Result<()> {
        let first = (self.network.map(|network| format!("--network {}", network.name())))
            .or_else(|| self.link.map(|link| format!("--link {}", link.name())))
            .or_else(|| self.link_mtu.map(|mtu| format!("--link-mtu {mtu}")))
            .or_else(|| self.congestion.map(|congestion| format!("--congestion {congestion}")))
            .or_else(|| self.lanes.map(|lanes| format!("--lanes {lanes}")))
            .or_else(|| self.shared_memory.map(|on| format!("--shared-memory {}", on.name())))
            .or_else(|| self.net_memory.map(|memory| format!("--net-memory {memory}")));
        first.map_or(Ok(()), |first| {
            Err(Failure::request(
                format!("{first} between ranks that talk within this process"),
                "add --transport quic, or leave it out",
            ))
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CarrierName {
    Udp,
    Tcp,
}

impl CarrierName {
    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProfileName {
    Lan,
    Wan,
}

impl ProfileName {
    fn name(self) -> &'static str {
        match self {
            Self::Lan => "lan",
            Self::Wan => "wan",
        }
    }
}

/// The value of `--shared-memory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

impl OnOff {
    fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// The value of `--congestion`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CongestionName(Congestion);

impl FromStr for CongestionName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            None if text == "cubic" => Ok(Self(Congestion::Cubic)),
            Some(("fixed", bytes)) => {
                let ByteSize(window_bytes) = bytes.parse()?;
                Ok(Self(Congestion::Fixed { window_bytes }))
            }
            _ => Err(Error::request(
                format!("congestion control `{text}` is not known"),
                "use cubic, or fixed:BYTES such as fixed:3MiB on links that nobody else uses",
            )),
        }
    }
}

impl fmt::Display for CongestionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
