//! Devices, hosts and links, resolved and validated: the machine of a simulation.

use std::collections::BTreeMap;

use super::capacity::Capacity;
use super::describe::{AttentionRate, Description, DeviceDescription, LinkDescription};
use crate::error::{Error, Result};
use crate::problem::AttentionProblem;
use crate::remedy::Remedy;

/// A validated [`Description`], with one entry for each host.
#[derive(Clone, Debug)]
pub struct Cluster {
    description: Description,
    hosts: Vec<Host>,
    /// Kind and host of every device, host by host.
    devices: Vec<(String, usize)>,
    between: BTreeMap<(usize, usize), String>,
}

/// One host.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) inside: Option<String>,
    pub(super) nic: Option<String>,
    pub(super) uplink: Option<String>,
}

impl Cluster {
    /// Reads a description in TOML; its fields are in `clusters/README.md`.
    ///
    /// # Errors
    /// [`Error::Request`] that names the wrong key and a right value.
    pub fn from_toml(text: &str) -> Result<Self> {
        let description = toml::from_str::<Description>(text).map_err(|error| {
            let line =
                error.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
            let what = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
            Error::request(
                format!("line {line} of the cluster description: {what}"),
                "clusters/README.md lists every key, its unit and its range",
            )
        })?;
        Self::new(description)
    }

    /// Validates a description.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub fn new(description: Description) -> Result<Self> {
        description.validate()?;
        let (mut hosts, mut devices) = (Vec::new(), Vec::new());
        for group in &description.host {
            for number in 0..group.count {
                let name =
                    if group.count == 1 { group.name.clone() } else { format!("{}-{number}", group.name) };
                for part in &group.devices {
                    devices.extend((0..part.count).map(|_| (part.kind.clone(), hosts.len())));
                }
                let (inside, nic, uplink) = (group.inside.clone(), group.nic.clone(), group.uplink.clone());
                hosts.push(Host { name, inside, nic, uplink });
            }
        }
        let place = |name: &str| {
            hosts.iter().position(|host| host.name == name).ok_or_else(|| {
                Error::request(
                    format!("[[between]] names the host `{name}`, which is not described"),
                    "use names of [[host]]; with count = N they are NAME-0 to NAME-(N-1)",
                )
            })
        };
        let mut between = BTreeMap::new();
        for pair in &description.between {
            let (a, b) = (place(&pair.hosts[0])?, place(&pair.hosts[1])?);
            if a == b || between.insert((a.min(b), a.max(b)), pair.link.clone()).is_some() {
                return Err(Error::request(
                    format!(
                        "[[between]] joins {} and {} again, or a host with itself",
                        pair.hosts[0], pair.hosts[1]
                    ),
                    "give each pair of different hosts at most one link",
                ));
            }
        }
        if let Some(wrong) =
            description.rank_on_device.iter().flatten().find(|device| **device >= devices.len())
        {
            return Err(Error::request(
                format!("rank_on_device names device {wrong}, there are {}", devices.len()),
                "devices are counted from 0, host by host",
            ));
        }
        Ok(Self { description, hosts, devices, between })
    }

    /// The description in TOML, as [`Self::from_toml`] reads it.
    ///
    /// # Errors
    /// [`Error::Request`] if TOML cannot express the description. No such description is known.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(&self.description).map_err(|error| {
            Error::request(
                format!("a description cannot be written as TOML: {error}"),
                "report this as a bug",
            )
        })
    }

    /// The name in the description.
    pub fn name(&self) -> &str {
        &self.description.name
    }

    /// The description.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The same cluster with the `count` of the last kind of host raised for `ranks` ranks, if that
    /// kind may grow.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn grown_for(&self, ranks: u32) -> Result<Self> {
        let mut description = self.description.clone();
        if description.rank_on_device.is_none() && !description.share_devices {
            let here = self.devices.len();
            if let Some(last) = description.host.last_mut()
                && last.grow
                && here < ranks as usize
            {
                let each = last.devices.iter().map(|part| part.count as usize).sum::<usize>().max(1);
                let more = (ranks as usize - here).div_ceil(each);
                last.count += u32::try_from(more).unwrap_or(u32::MAX / 2);
            }
        }
        Self::new(description)
    }

    /// The device of each of `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Request`] where there are fewer devices than ranks.
    pub(super) fn place(&self, ranks: u32) -> Result<Vec<usize>> {
        let (ranks, devices) = (ranks as usize, self.devices.len());
        if let Some(list) = &self.description.rank_on_device {
            if list.len() < ranks {
                return Err(Error::request(
                    format!("{ranks} ranks, rank_on_device places {}", list.len()),
                    "give it an entry for each rank, or leave it out",
                ));
            }
            return Ok(list[..ranks].to_vec());
        }
        if ranks > devices && !self.description.share_devices {
            return Err(Error::request(
                format!("{ranks} ranks for the {devices} devices of {}", self.name()),
                "describe more hosts, give the last host grow = true, or say share_devices = true",
            ));
        }
        Ok((0..ranks).map(|rank| rank % devices).collect())
    }

    pub(super) fn host_of(&self, device: usize) -> usize {
        self.devices[device].1
    }

    pub(super) fn host(&self, host: usize) -> &Host {
        &self.hosts[host]
    }

    pub(super) fn device(&self, device: usize) -> &DeviceDescription {
        &self.description.device[&self.devices[device].0]
    }

    pub(super) fn kind_of(&self, device: usize) -> &str {
        &self.devices[device].0
    }

    pub(super) fn device_count(&self) -> usize {
        self.devices.len()
    }

    pub(super) fn link(&self, name: &str) -> &LinkDescription {
        &self.description.link[name]
    }

    /// Name of the link between two hosts.
    pub(super) fn between(&self, a: usize, b: usize) -> Result<&str> {
        let own = self.between.get(&(a.min(b), a.max(b)));
        own.or(self.description.between_hosts.as_ref()).map(String::as_str).ok_or_else(|| {
            Error::request(
                format!(
                    "ranks talk between {} and {}, which no link joins",
                    self.hosts[a].name, self.hosts[b].name
                ),
                "name one in between_hosts, or in a [[between]] of these two",
            )
        })
    }

    /// Whether messages between two devices go from memory to memory, whatever kind of memory it
    /// is.
    pub(super) fn reaches_memory(&self, from: usize, to: usize) -> Result<bool> {
        let (a, b) = (self.host_of(from), self.host_of(to));
        let link = if a == b { self.hosts[a].inside.as_deref() } else { Some(self.between(a, b)?) };
        Ok(link.is_some_and(|link| self.link(link).device_memory))
    }

    /// Bytes of the device for plan buffers, where the description has them.
    pub(super) fn memory_bytes(&self, device: usize) -> Option<u64> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "validated to be a size of memory"
        )]
        self.device(device).memory_gib.map(|gib| (gib * f64::from(1 << 30)) as u64)
    }

    /// What each of `ranks` ranks can do with `problem`.
    ///
    /// # Errors
    /// [`Error::Request`] where there are fewer devices than ranks, or no attention rate for the
    /// element type.
    pub fn capacities(&self, problem: &AttentionProblem, ranks: u32) -> Result<Vec<Capacity>> {
        let places = self.place(ranks)?;
        let of = |device: &usize| {
            let sharing = places.iter().filter(|other| *other == device).count();
            #[expect(clippy::cast_precision_loss, reason = "ranks are few")]
            let pairs_per_s = 1e9 / self.ns_per_pair(*device, problem)? / sharing as f64;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "speeds and times of descriptions are positive; casts saturate"
            )]
            Ok(Capacity {
                pairs_per_s: pairs_per_s as u64,
                step_ns: (self.device(*device).attend_step_us * 1e3) as u64,
                memory_bytes: self.memory_bytes(*device),
            })
        };
        places.iter().map(of).collect()
    }

    /// Nanoseconds for one visible (query, key) pair of one head.
    pub(super) fn ns_per_pair(&self, device: usize, problem: &AttentionProblem) -> Result<f64> {
        let rate = self.rate(device, problem)?;
        Ok(4.0 * f64::from(problem.head_dim) / (rate.gflop_per_s * rate.share_of_it))
    }

    /// Nanoseconds for the gradients of one visible pair of one head.
    pub(super) fn backward_ns_per_pair(&self, device: usize, problem: &AttentionProblem) -> Result<f64> {
        Ok(self.ns_per_pair(device, problem)? * self.rate(device, problem)?.backward_products / 2.0)
    }

    /// The rate for the element type and the nearest head dim.
    fn rate(&self, device: usize, problem: &AttentionProblem) -> Result<&AttentionRate> {
        let rates = &self.device(device).attention;
        let dim = f64::from(problem.head_dim);
        let distance = |head_dim: u32| (f64::from(head_dim) / dim).ln().abs();
        let nearest = rates
            .iter()
            .filter(|rate| rate.dtype == problem.dtype.name())
            .min_by(|a, b| distance(a.head_dim).total_cmp(&distance(b.head_dim)));
        nearest.ok_or_else(|| {
            Error::request(
                format!("{} has no attention rate for {}", self.kind_of(device), problem.dtype),
                Remedy::DescribeDtypeOrUseAnother { device: self.kind_of(device).to_owned() },
            )
        })
    }

    /// The same cluster with infinitely fast links: bytes take no time.
    pub(super) fn with_endless_bandwidth(&self) -> Self {
        self.with_links(|link| link.gb_per_s = ENDLESS_GB_PER_S)
    }

    /// The same cluster with messages that cost only the time of their bytes.
    pub(super) fn without_latency(&self) -> Self {
        self.with_links(|link| (link.latency_us, link.message_us) = (0.0, 0.0))
    }

    fn with_links(&self, mut change: impl FnMut(&mut LinkDescription)) -> Self {
        let mut cluster = self.clone();
        cluster.description.link.values_mut().for_each(&mut change);
        cluster
    }
}

/// A terabyte in a picosecond.
const ENDLESS_GB_PER_S: f64 = 1e15;
