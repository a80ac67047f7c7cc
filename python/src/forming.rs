//! How groups form: in this process, by a launcher's environment, and with identities that another
//! group has carried.

use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::{Error, Session, SessionOptions};
use kyklos_launch::{Assignment, SecretText, may_share_memory, parse_advertised};
use kyklos_transport::quic::{
    Carrier, ClusterAuthority, Identity, JobId, LinkProfile, LinkSettings, QuicConfig, QuicTransport, look_up,
};
use kyklos_transport::{BootstrapKind, Rank, TransportError, in_process_group};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

use crate::collective::{self, ONE_DEVICE, Wish};
use crate::devices::Chosen;
use crate::errors;
use crate::group::Group;

/// Settings of a session, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct SessionSettings {
    deadline_s: f64,
    leave_s: f64,
    collective: String,
    nccl_cluster: Option<u32>,
    /// Of the same ranks.
    process_group: Option<Py<PyAny>>,
}

/// What a launcher leaves open, as Python passes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LaunchSettings {
    rank: Option<u32>,
    size: Option<u32>,
    coordinator: Option<String>,
    cluster_file: Option<PathBuf>,
    identity: Option<PathBuf>,
    invitation: Option<PathBuf>,
    token: Option<String>,
    job: Option<String>,
    bind: Option<String>,
    port: Option<u16>,
    advertise: Option<String>,
    network: String,
    link: String,
    join_deadline_s: f64,
}

/// A rank that has its identity in memory, as Python passes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Member {
    pem: String,
    rank: u32,
    size: u32,
    host: String,
    port: u16,
    advertise: Option<String>,
    network: String,
    link: String,
    join_deadline_s: f64,
    /// Its number among the ranks of its machine, and how many these are.
    local: (usize, usize),
}

/// All ranks of a group in this process, on the devices of these names: one for all, or one for
/// each rank. `local_rank`: of the first one on this machine.
#[pyfunction]
pub(crate) fn local(
    py: Python<'_>,
    names: Vec<String>,
    size: u32,
    local_rank: usize,
    settings: SessionSettings,
) -> PyResult<Vec<Group>> {
    let wish = settings.wish(py)?;
    let refuse = |mismatch: String, remedy: &str| errors::of_call(py, &Error::request(mismatch, remedy));
    if size == 0 || size > LOCAL_RANKS {
        return Err(refuse(format!("a group of {size} ranks in one process"), "use 1 to 1024 ranks"));
    }
    if names.len() != 1 && names.len() != size as usize {
        return Err(refuse(
            format!("{} devices for {size} ranks", names.len()),
            "name one device for all ranks, or one for each",
        ));
    }
    let open = || -> Result<Vec<Device>, Error> {
        let mut opened: Vec<(Chosen, Device)> = Vec::new();
        let names = names.iter().cycle().take(size as usize).zip(local_rank..);
        names
            .map(|(name, local_rank)| {
                let chosen = Chosen::of(name, local_rank)?;
                if let Some((_, device)) = opened.iter().find(|(known, _)| *known == chosen) {
                    return Ok(device.clone());
                }
                let device = chosen.open()?;
                opened.push((chosen, device.clone()));
                Ok(device)
            })
            .collect()
    };
    let devices = py.detach(open).map_err(|error| errors::of_call(py, &error))?;
    let transports = in_process_group(size);
    if names.len() == 1 && wish.is_host() && devices.iter().all(|one| one.is_same(&devices[0])) {
        let (options, leave) = (settings.options(py)?, settings.leave(py)?);
        let sessions = Session::on_one_device(transports, &devices[0], &options);
        return sessions
            .into_iter()
            .map(|session| Group::new(session, leave, ONE_DEVICE.to_owned()))
            .collect();
    }
    settings.groups(py, transports.into_iter().zip(devices).collect())
}

/// The device of the rank number `local_rank` of the `ranks` on its machine. Warns of a GPU that
/// ranks share.
fn device(py: Python<'_>, name: &str, (local_rank, ranks): (usize, usize)) -> PyResult<Device> {
    let open = || {
        let chosen = Chosen::of(name, local_rank)?;
        Ok((chosen.open()?, chosen.warning(ranks)))
    };
    let (device, warning) = py.detach(open).map_err(|error| errors::of_call(py, &error))?;
    if let Some(text) = warning.filter(|_| local_rank == 0) {
        let text = CString::new(text).unwrap_or_default();
        // Where warnings are errors, the other ranks still wait for this one.
        let _ = PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 1);
    }
    Ok(device)
}

/// The group of a launcher.
#[pyfunction]
pub(crate) fn of_launcher(
    py: Python<'_>,
    name: String,
    launch: LaunchSettings,
    settings: SessionSettings,
) -> PyResult<Group> {
    settings.check(py)?;
    let LaunchSettings { rank, size, port, bind, network, .. } = &launch;
    let bind = match bind.as_deref().map(str::parse) {
        Some(Err(_)) => {
            let error = Error::request("bind is not an IP address", "write it like 10.0.0.1 or fd00::1");
            return Err(errors::of_call(py, &error));
        }
        Some(Ok(address)) => Some(address),
        None => None,
    };
    let mut join = kyklos_launch::Options {
        rank: *rank,
        size: size.and_then(NonZeroU32::new),
        bind,
        port: *port,
        join_deadline: seconds(py, "join_deadline_s", launch.join_deadline_s)?,
        ..kyklos_launch::Options::default()
    };
    (join.link.carrier, join.link.profile) = (carrier(py, network)?, profile(py, &launch.link)?);
    join.coordinator = launch.coordinator;
    join.advertise = launch.advertise;
    join.cluster_file = launch.cluster_file;
    join.identity = launch.identity;
    join.invitation = launch.invitation;
    join.token = launch.token.map(SecretText);
    join.job = launch.job;
    let found = Assignment::find(&join).map_err(|error| errors::of_launch(py, &error))?;
    let local = found.as_ref().map_or((0, 1), |found| (found.local_rank as usize, found.local_size as usize));
    let listed = found.as_ref().and_then(|found| found.device.clone()).filter(|_| name == "auto");
    // Before the group forms: a device that does not open must not end a group.
    let device = device(py, &listed.unwrap_or(name), local)?;
    let formed = interruptible(py, move || match found {
        Some(assignment) => assignment.join(),
        None => join.join(),
    })?;
    let group = formed.map_err(|error| errors::of_launch(py, &error))?;
    settings.group(py, group, device)
}

/// New identities of `size` ranks, as PEM, by rank. Each is the secret of its rank.
#[pyfunction]
pub(crate) fn identities(py: Python<'_>, size: u32) -> PyResult<Vec<String>> {
    let made = || -> Result<Vec<String>, TransportError> {
        let authority = ClusterAuthority::new(JobId::random()?)?;
        (0..size).map(|rank| Ok(authority.issue(Rank(rank))?.to_pem())).collect()
    };
    py.detach(made).map_err(|error| errors::of_forming(py, &error))
}

/// A port of this host on which rank 0 can listen when the others connect to `host`: free for UDP
/// and TCP on all addresses.
#[pyfunction]
pub(crate) fn free_port(py: Python<'_>, host: String) -> PyResult<u16> {
    let find = || {
        let address = (host.as_str(), 0).to_socket_addrs()?.next();
        let unspecified = match address {
            Some(SocketAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        kyklos_launch::free_port(unspecified)
    };
    py.detach(find).map_err(|error| {
        let text = format!(
            "no free port for rank 0 at {host}: {error}: pass an address of rank 0 as host, or its port"
        );
        errors::of_forming(py, &TransportError::Bootstrap { text, kind: BootstrapKind::Other })
    })
}

/// The group of the ranks that have identities of one call of `identities`. Rank 0 listens at
/// `host` and `port`.
#[pyfunction]
pub(crate) fn with_identity(
    py: Python<'_>,
    name: String,
    member: Member,
    settings: SessionSettings,
) -> PyResult<Group> {
    settings.check(py)?;
    let Member { pem, rank, size, host, port, advertise, network, link, join_deadline_s, local } = member;
    let profile = profile(py, &link)?;
    let advertise = advertise.map_or(Ok(Vec::new()), |text| parse_advertised(&text, "advertise"));
    let advertise = advertise.map_err(|error| errors::of_launch(py, &error))?;
    let shared_memory = may_share_memory().map_err(|error| errors::of_launch(py, &error))?;
    let (carrier, deadline) = (carrier(py, &network)?, seconds(py, "join_deadline_s", join_deadline_s)?);
    let device = device(py, &name, local)?;
    let connect = move || -> Result<kyklos_transport::Group, TransportError> {
        let unknown = |why: String| TransportError::Bootstrap {
            text: format!(
                "rank 0 cannot be found at {host}: {why}: pass another host, or a longer join_deadline_s"
            ),
            kind: BootstrapKind::Other,
        };
        let began = Instant::now();
        let addresses = look_up(&host, port, began + deadline, |_| {}).map_err(unknown)?;
        let (&address, also) = addresses.split_first().ok_or_else(|| unknown("no address".to_owned()))?;
        let identity = Identity::of_pem(pem.as_bytes(), "the identity of this rank")?;
        let job = identity.claims()?.job;
        let mut config = QuicConfig::new(Rank(rank), size, job, address, identity);
        config.coordinator_also = also.to_vec();
        config.advertise = advertise;
        config.bind_both_families();
        config.coordinator_name = Some(host.clone());
        // Less whole seconds, because errors quote it.
        let left = deadline.saturating_sub(Duration::from_secs(began.elapsed().as_secs()));
        config.connect_deadline = left.max(deadline.min(Duration::from_secs(1)));
        config.link = LinkSettings { carrier, profile, shared_memory, ..config.link };
        QuicTransport::connect(config)
    };
    let formed = interruptible(py, connect)?;
    let transport = formed.map_err(|error| errors::of_forming(py, &error))?;
    settings.group(py, transport, device)
}

/// Runs `blocking` on a thread of its own, while this one looks for signals. After a signal the
/// thread ends by its own deadline.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    blocking: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (done, mut result) = channel();
    let started = Instant::now();
    std::thread::spawn(move || done.send(blocking()));
    loop {
        let (answer, receiver) = py.detach(move || (result.recv_timeout(SIGNALS), result));
        result = receiver;
        match answer {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let text = format!("forming the group failed after {:?}", started.elapsed());
                return Err(errors::unusable(py, &text));
            }
        }
    }
}

fn carrier(py: Python<'_>, network: &str) -> PyResult<Carrier> {
    match network {
        "udp" => Ok(Carrier::Udp),
        "tcp" => Ok(Carrier::Tcp),
        other => {
            let error = Error::request(format!("network {other:?} is not known"), "use \"udp\" or \"tcp\"");
            Err(errors::of_call(py, &error))
        }
    }
}

fn profile(py: Python<'_>, link: &str) -> PyResult<LinkProfile> {
    match link {
        "lan" => Ok(LinkProfile::Lan),
        "wan" => Ok(LinkProfile::Wan),
        other => {
            let error = Error::request(format!("link {other:?} is not known"), "use \"lan\" or \"wan\"");
            Err(errors::of_call(py, &error))
        }
    }
}

fn seconds(py: Python<'_>, name: &str, value: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => {
            let error = Error::request(format!("{name}={value}"), "give a positive number of seconds");
            Err(errors::of_call(py, &error))
        }
    }
}

impl SessionSettings {
    fn options(&self, py: Python<'_>) -> PyResult<SessionOptions> {
        Ok(SessionOptions {
            deadline: seconds(py, "deadline_s", self.deadline_s)?,
            ..SessionOptions::default()
        })
    }

    fn leave(&self, py: Python<'_>) -> PyResult<Duration> {
        seconds(py, "leave_s", self.leave_s)
    }

    fn wish(&self, py: Python<'_>) -> PyResult<Wish> {
        let process_group = self.process_group.as_ref().map(|group| Arc::new(group.clone_ref(py)));
        let wish = Wish::of(&self.collective, self.nccl_cluster, process_group.as_ref());
        wish.map_err(|error| errors::of_call(py, &error))
    }

    /// Before the group forms: wrong settings must not end a group.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.options(py)?;
        self.leave(py)?;
        self.wish(py).map(|_| ())
    }

    /// The group of a rank.
    fn group(&self, py: Python<'_>, group: kyklos_transport::Group, device: Device) -> PyResult<Group> {
        let mut groups = self.groups(py, vec![(group, device)])?;
        Ok(groups.pop().expect("a group for each rank"))
    }

    /// The groups of ranks of this process, which agree on how messages go.
    fn groups(&self, py: Python<'_>, places: Vec<(kyklos_transport::Group, Device)>) -> PyResult<Vec<Group>> {
        let (options, leave, wish) = (self.options(py)?, self.leave(py)?, self.wish(py)?);
        let sessions = interruptible(py, move || {
            std::thread::scope(|scope| {
                let open = |(transport, device)| {
                    let (wish, options) = (&wish, options.clone());
                    scope.spawn(move || collective::session(wish, transport, device, options, leave))
                };
                let opening: Vec<_> = places.into_iter().map(open).collect();
                let joined = opening.into_iter().map(|thread| thread.join().expect("forming does not panic"));
                joined.collect::<Result<Vec<_>, Error>>()
            })
        })?;
        let sessions = sessions.map_err(|error| errors::of_call(py, &error))?;
        sessions.into_iter().map(|(session, words)| Group::new(session, leave, words)).collect()
    }
}

/// How often a thread that waits looks for signals.
const SIGNALS: Duration = Duration::from_millis(100);
/// Most ranks in one process.
const LOCAL_RANKS: u32 = 1024;
