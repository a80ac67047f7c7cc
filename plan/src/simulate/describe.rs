//! The fields of a cluster description, as in `clusters/*.toml`.

use std::collections::BTreeMap;

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Devices, hosts and links. Every number has its unit in its name; a GB is 10⁹ bytes, a GiB 2³⁰.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Display name.
    pub name: String,
    /// The source of the numbers.
    #[serde(default)]
    pub about: String,
    /// The link between any two hosts that `[[between]]` does not name.
    #[serde(default)]
    pub between_hosts: Option<String>,
    /// Device of each rank, counted host by host; without it rank i is on device i.
    #[serde(default)]
    pub rank_on_device: Option<Vec<usize>>,
    /// Whether more ranks than devices are allowed; then ranks share devices, in round-robin order.
    #[serde(default)]
    pub share_devices: bool,
    /// Kinds of devices by name.
    pub device: BTreeMap<String, DeviceDescription>,
    /// Kinds of links by name.
    #[serde(default)]
    pub link: BTreeMap<String, LinkDescription>,
    /// Hosts, in the order of their devices.
    pub host: Vec<HostDescription>,
    /// Pairs of hosts with a link of their own.
    #[serde(default)]
    pub between: Vec<Between>,
}

/// A kind of device.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceDescription {
    /// Memory for plan buffers in GiB; without it no plan is refused because of memory.
    #[serde(default)]
    pub memory_gib: Option<f64>,
    /// Sustained speed on visible (query, key) pairs.
    pub attention: Vec<AttentionRate>,
    /// Rows of a tile: an interval that ends inside a tile costs the whole tile.
    #[serde(default = "one")]
    pub tile_rows: u32,
    /// Keys of a tile.
    #[serde(default = "one")]
    pub tile_keys: u32,
    /// Fixed cost of an attend step.
    #[serde(default)]
    pub attend_step_us: f64,
    /// Time of attention between two checks of the cancel token.
    #[serde(default = "default_piece_ms")]
    pub piece_ms: f64,
    /// Fixed cost of the attention between two checks.
    #[serde(default)]
    pub piece_us: f64,
    /// Speed of a copy on the device, such as packing, while other ranks copy too.
    pub copy_gb_per_s: f64,
    /// Speed at which a device that one rank uses alone reads or writes running states; without it,
    /// that of copies.
    #[serde(default)]
    pub state_gb_per_s: Option<f64>,
    /// Speed at which attention reads a block of keys and values before it computes, on a device
    /// that one rank uses alone: a CPU packs a block once, for any number of queries. Without
    /// it, this takes no time.
    #[serde(default)]
    pub key_gb_per_s: Option<f64>,
    /// Fixed cost of a copy.
    #[serde(default)]
    pub copy_us: f64,
    /// Whether all links reach this memory.
    pub memory: MemoryKind,
    /// Speed of copies between discrete memory and the host; every message takes one at each end,
    /// unless the link has [`LinkDescription::device_memory`].
    #[serde(default)]
    pub staging_gb_per_s: Option<f64>,
}

/// Whether links reach a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Links reach it: a CPU, a GPU that shares the host's memory, or a GPU with its own links.
    Unified,
    /// Only links with [`LinkDescription::device_memory`] reach it: other messages are copied to
    /// the host first.
    Discrete,
}

/// Sustained speed of attention. For a head dim without an entry, the nearest head dim is used.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRate {
    /// f32, f16 or bf16.
    pub dtype: String,
    /// The head dim.
    pub head_dim: u32,
    /// 10⁹ floating-point operations in a second: 4 · head dim for each visible pair and head.
    pub gflop_per_s: f64,
    /// Factor on `gflop_per_s`, if `gflop_per_s` is a peak.
    #[serde(default = "whole")]
    pub share_of_it: f64,
    /// Products for the gradients of a pair, each in the time of one of the two products of its
    /// attention: 5 where one kernel makes all gradients, 7 where queries and keys each have a
    /// kernel, 8 where keys and values have too.
    #[serde(default = "products_of_two_kernels")]
    pub backward_products: f64,
}

/// A kind of link.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct LinkDescription {
    /// Bytes in a second in each direction; of both directions together where it is half duplex.
    pub gb_per_s: f64,
    /// Latency from one end to the other. A message takes it twice, because the receiver requests
    /// the message first.
    pub latency_us: f64,
    /// Time of the sender to post a message.
    #[serde(default)]
    pub message_us: f64,
    /// full or half.
    #[serde(default)]
    pub duplex: Duplex,
    /// Compute time of the device at each end for each GB carried: 0 if an adapter carries the
    /// bytes.
    #[serde(default)]
    pub host_s_per_gb: f64,
    /// Whether it also reaches discrete memory of devices, as NCCL does: messages on it are not
    /// staged on the host.
    #[serde(default)]
    pub device_memory: bool,
}

/// Whether each direction of a link has the whole bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Duplex {
    /// Each direction has all of it.
    #[default]
    Full,
    /// Both directions share it.
    Half,
}

/// Hosts of one kind.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct HostDescription {
    /// The name; with several hosts, the part before the number.
    pub name: String,
    /// Their number.
    #[serde(default = "one")]
    pub count: u32,
    /// Whether the planner may look at clusters with more of these hosts.
    #[serde(default)]
    pub grow: bool,
    /// The devices of a host.
    pub devices: Vec<DeviceCount>,
    /// Link of each device to the others of the host.
    #[serde(default)]
    pub inside: Option<String>,
    /// Link of each device to the network, if each device has its own.
    #[serde(default)]
    pub nic: Option<String>,
    /// Link of the host to the network, which its ranks share.
    #[serde(default)]
    pub uplink: Option<String>,
}

/// A number of devices of one kind.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCount {
    /// A name of `[device]`.
    pub kind: String,
    /// Their number.
    #[serde(default = "one")]
    pub count: u32,
}

/// The link between two hosts.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Between {
    /// The names of both hosts.
    pub hosts: [String; 2],
    /// A name of `[link]`.
    pub link: String,
}

impl Description {
    pub(super) fn validate(&self) -> Result<()> {
        for (name, device) in &self.device {
            device.validate(name)?;
        }
        for (name, link) in &self.link {
            let at = |key| format!("link.{name}.{key}");
            positive(at("gb_per_s"), link.gb_per_s)?;
            not_negative(at("latency_us"), link.latency_us)?;
            not_negative(at("message_us"), link.message_us)?;
            not_negative(at("host_s_per_gb"), link.host_s_per_gb)?;
        }
        let mut devices: u64 = 0;
        let mut names = std::collections::BTreeSet::new();
        for host in &self.host {
            if !names.insert(&host.name) {
                return Err(Error::request(
                    format!("two [[host]] are called {}", host.name),
                    "give each a name of its own, or one of them a count",
                ));
            }
            for part in &host.devices {
                if !self.device.contains_key(&part.kind) {
                    let known: Vec<_> = self.device.keys().map(String::as_str).collect();
                    return Err(unknown(
                        &format!("host {} has a device", host.name),
                        &part.kind,
                        "device",
                        &known,
                    ));
                }
                devices = devices.saturating_add(u64::from(host.count) * u64::from(part.count));
            }
            for link in [&host.inside, &host.nic, &host.uplink].into_iter().flatten() {
                self.knows_link(&format!("host {} has a link", host.name), link)?;
            }
        }
        if devices == 0 || devices > MAX_DEVICES {
            return Err(Error::request(
                format!("{} describes {devices} devices", self.name),
                format!("describe 1 to {MAX_DEVICES}"),
            ));
        }
        self.between_hosts.iter().try_for_each(|link| self.knows_link("between_hosts is", link))?;
        self.between.iter().try_for_each(|pair| self.knows_link("[[between]] has a link", &pair.link))
    }

    fn knows_link(&self, who: &str, link: &str) -> Result<()> {
        if self.link.contains_key(link) {
            return Ok(());
        }
        let known: Vec<_> = self.link.keys().map(String::as_str).collect();
        Err(unknown(who, link, "link", &known))
    }
}

impl DeviceDescription {
    fn validate(&self, name: &str) -> Result<()> {
        let at = |key: &str| format!("device.{name}.{key}");
        if let Some(gib) = self.memory_gib {
            positive(at("memory_gib"), gib)?;
        }
        positive(at("copy_gb_per_s"), self.copy_gb_per_s)?;
        for (key, rate) in [("state_gb_per_s", self.state_gb_per_s), ("key_gb_per_s", self.key_gb_per_s)] {
            if let Some(rate) = rate {
                positive(at(key), rate)?;
            }
        }
        positive(at("piece_ms"), self.piece_ms)?;
        for (key, value) in
            [("attend_step_us", self.attend_step_us), ("piece_us", self.piece_us), ("copy_us", self.copy_us)]
        {
            not_negative(at(key), value)?;
        }
        match (self.memory, self.staging_gb_per_s) {
            (MemoryKind::Discrete, Some(rate)) => positive(at("staging_gb_per_s"), rate)?,
            (MemoryKind::Unified, None) => {}
            (MemoryKind::Discrete, None) => {
                return Err(Error::request(
                    format!("device.{name} has discrete memory and no staging_gb_per_s"),
                    "say how fast it copies to and from the host, or memory = \"unified\"",
                ));
            }
            (MemoryKind::Unified, Some(_)) => {
                return Err(Error::request(
                    format!("device.{name} has unified memory and staging_gb_per_s"),
                    "leave staging_gb_per_s out, or say memory = \"discrete\"",
                ));
            }
        }
        if self.tile_rows == 0 || self.tile_keys == 0 {
            return Err(Error::request(
                format!("device.{name} has tiles of {} x {}", self.tile_rows, self.tile_keys),
                "use at least 1 row and 1 key",
            ));
        }
        if self.attention.is_empty() {
            return Err(Error::request(
                format!("device.{name} has no attention rate"),
                format!("add a [[device.{name}.attention]] with dtype, head_dim and gflop_per_s"),
            ));
        }
        for rate in &self.attention {
            rate.dtype.parse::<Dtype>()?;
            positive(at("attention.gflop_per_s"), rate.gflop_per_s)?;
            positive(at("attention.backward_products"), rate.backward_products)?;
            if rate.head_dim == 0 || !(rate.share_of_it > 0.0 && rate.share_of_it <= 1.0) {
                return Err(Error::request(
                    format!(
                        "device.{name}.attention has head_dim {} and share_of_it {}",
                        rate.head_dim, rate.share_of_it
                    ),
                    "use a head dim of at least 1, and a share above 0 up to 1",
                ));
            }
        }
        Ok(())
    }
}

fn positive(key: String, value: f64) -> Result<()> {
    if value > 0.0 && value <= LARGEST {
        return Ok(());
    }
    Err(Error::request(format!("{key} = {value}"), format!("use a number above 0, up to {LARGEST:e}")))
}

fn not_negative(key: String, value: f64) -> Result<()> {
    if (0.0..=LARGEST).contains(&value) {
        return Ok(());
    }
    Err(Error::request(format!("{key} = {value}"), format!("use a number from 0 to {LARGEST:e}")))
}

fn unknown(who: &str, name: &str, what: &str, known: &[&str]) -> Error {
    Error::request(
        format!("{who} `{name}`, which is not described"),
        format!("described under [{what}]: {}", known.join(", ")),
    )
}

fn one() -> u32 {
    1
}

fn whole() -> f64 {
    1.0
}

fn products_of_two_kernels() -> f64 {
    7.0
}

fn default_piece_ms() -> f64 {
    100.0
}

/// A larger number is a mistake, and times would not fit 64 bits.
const LARGEST: f64 = 1e12;
const MAX_DEVICES: u64 = 65_536;
