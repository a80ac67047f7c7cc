//! A rank of a group over QUIC: how it is set up, and the contract that it keeps.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use quinn::AsyncUdpSocket;
use tokio::sync::mpsc::WeakSender;
use tokio::time::Instant;

use super::control::core::Core;
use super::control::link::Link;
use super::control::state::Deadline;
use super::forming::admission::Admission;
use super::forming::config::QuicConfig;
use super::forming::description::describe_network;
use super::forming::endpoint::RankEndpoint;
use super::forming::first_group::{first_group, report_bad_identity};
use super::forming::prior_group::PriorGroup;
use super::forming::regroup::{self, NextGroup};
use super::lifecycle;
use super::network::binding;
use super::network::io_thread::{Alive, IoThread};
use super::network::path::Path;
use super::network::socket::{Endpoints, SocketSource};
use super::trust::presented::PresentedIdentity;
use super::trust::tls::TlsConfigs;
use crate::error::{Abort, TransportError};
use crate::figures::ConnectionFigures;
use crate::posted::{Completer, Posted};
use crate::pulse::Pulse;
use crate::rank::{Progress, Rank, Tag, Taken, Vote};
use crate::recorder::{Outstanding, Recorder};
use crate::transport::Transport;
use crate::transport::{Group, Regroup};

/// One rank's end of a group over QUIC. Dropping it without [`Transport::close`] means that the
/// rank died.
pub struct QuicTransport {
    pub(crate) core: Arc<Core>,
    network: String,
}

impl From<QuicTransport> for Group {
    fn from(transport: QuicTransport) -> Self {
        let (members, epoch) = (transport.core.members.clone(), transport.core.epoch);
        Self { transport: Arc::new(transport), members, epoch }
    }
}

impl QuicTransport {
    /// Forms the group and returns this rank's end of it, with all I/O on a thread of its own.
    /// Blocks until every rank is there.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the group is not complete by the connect deadline, or this
    /// rank is refused. A rank whose own identity does not fit shows it to rank 0 before it
    /// gives up, so that others can say why it is not there.
    pub fn connect(config: QuicConfig) -> Result<Group, TransportError> {
        let source = bind(&config)?;
        let thread = IoThread::start()?;
        let alive = thread.alive();
        thread.run(async move { Ok(Self::form_on(config, source, Some(alive)).await?.into()) })?
    }

    /// As [`Self::connect`]; but if a rank is lost while the group forms, the others form the next
    /// group, as [`Transport::reform`] does, within another connect deadline. A rank that takes
    /// the place of the lost one uses [`Self::rejoin`]. All ranks say the same.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`], and if the next group does not form.
    pub fn connect_or_regroup(config: QuicConfig, who: Regroup) -> Result<Group, TransportError> {
        let source = bind(&config)?;
        let thread = IoThread::start()?;
        let alive = thread.alive();
        thread.run(async move { Self::form_or_regroup(config, source, Some(alive), who).await })?
    }

    /// The same in the caller's tokio context, which must have I/O and time and must outlive the
    /// transport.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub async fn form(config: QuicConfig) -> Result<Group, TransportError> {
        let source = bind(&config)?;
        Ok(Self::form_on(config, source, None).await?.into())
    }

    /// The same over sockets that are not the system's, one for each lane, for a simulated network:
    /// with tokio's time paused and quinn's random numbers from `seed`, a group does the same
    /// again and again. The first socket has the address that the config says; no other use has
    /// a reason to choose the seed, which is no secret then.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub async fn form_over(
        config: QuicConfig,
        sockets: Vec<Arc<dyn AsyncUdpSocket>>,
        seed: [u8; 32],
    ) -> Result<Group, TransportError> {
        config.check()?;
        Ok(Self::form_on(config, SocketSource::Simulated(sockets, seed), None).await?.into())
    }

    /// As [`Self::connect_or_regroup`], over sockets that are not the system's, as
    /// [`Self::form_over`].
    ///
    /// # Errors
    ///
    /// As [`Self::connect_or_regroup`].
    pub async fn form_over_or_regroup(
        config: QuicConfig,
        sockets: Vec<Arc<dyn AsyncUdpSocket>>,
        seed: [u8; 32],
        who: Regroup,
    ) -> Result<Group, TransportError> {
        config.check()?;
        Self::form_or_regroup(config, SocketSource::Simulated(sockets, seed), None, who).await
    }

    /// Joins a running job as a restarted rank: with the config of its first start, except for the
    /// time that it waits, which is the connect deadline. It is let in when the others form the
    /// group again, with [`Regroup::Everyone`], and finds them through rank 0. Blocks until
    /// then.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub fn rejoin(config: QuicConfig) -> Result<Group, TransportError> {
        let source = bind(&config)?;
        let thread = IoThread::start()?;
        let alive = thread.alive();
        thread.run(async move { Self::rejoin_on(config, source, Some(alive)).await })?
    }

    /// The same over sockets that are not the system's, as [`Self::form_over`].
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub async fn rejoin_over(
        config: QuicConfig,
        sockets: Vec<Arc<dyn AsyncUdpSocket>>,
        seed: [u8; 32],
    ) -> Result<Group, TransportError> {
        config.check()?;
        Self::rejoin_on(config, SocketSource::Simulated(sockets, seed), None).await
    }

    pub(crate) async fn form_on(
        config: QuicConfig,
        source: SocketSource,
        alive: Option<Alive>,
    ) -> Result<Self, TransportError> {
        let endpoint = Self::open_endpoint(config, source, alive.as_ref()).await?;
        let next = first_group(&endpoint, None).await?;
        Ok(Self::start(endpoint, next, alive))
    }

    async fn form_or_regroup(
        config: QuicConfig,
        source: SocketSource,
        alive: Option<Alive>,
        who: Regroup,
    ) -> Result<Group, TransportError> {
        let endpoint = Self::open_endpoint(config, source, alive.as_ref()).await?;
        let next = first_group(&endpoint, Some(who)).await?;
        Ok(Self::start(endpoint, next, alive).into())
    }

    async fn rejoin_on(
        config: QuicConfig,
        source: SocketSource,
        alive: Option<Alive>,
    ) -> Result<Group, TransportError> {
        let patience = config.connect_deadline;
        let until = Instant::now() + patience;
        let endpoint = Self::open_endpoint(config, source, alive.as_ref()).await?;
        endpoint.listen();
        let coordinator = (Rank::COORDINATOR, endpoint.config.coordinator_candidates());
        let addresses = [coordinator].into_iter().filter(|(rank, _)| *rank != endpoint.config.rank).collect();
        let prior = PriorGroup { claims: Vec::new(), addresses, lost: None };
        let formed = tokio::select! {
            biased;
            formed = regroup::regroup(&endpoint, prior, Regroup::Everyone { within: patience }, until) => formed,
            never = endpoint.warn_of_refusal() => match never {},
        };
        match formed {
            Ok(next) => Ok(Self::start(endpoint, next, alive).into()),
            Err(error) => {
                endpoint.part(&error).await;
                Err(error)
            }
        }
    }

    /// Makes the network side of a rank, unless its own identity does not fit.
    async fn open_endpoint(
        config: QuicConfig,
        source: SocketSource,
        alive: Option<&Alive>,
    ) -> Result<Arc<RankEndpoint>, TransportError> {
        let fits = config.check_identity(&config.identity);
        let endpoint = Self::open_endpoint_unchecked(config, source, alive)?;
        if let Err(error) = fits {
            report_bad_identity(&endpoint).await;
            return Err(error);
        }
        Ok(endpoint)
    }

    pub(crate) fn open_endpoint_unchecked(
        config: QuicConfig,
        source: SocketSource,
        alive: Option<&Alive>,
    ) -> Result<Arc<RankEndpoint>, TransportError> {
        let path = Path::new(&config.link, config.bind, config.size)?;
        let timing = config.timing();
        let identity = PresentedIdentity::new(config.identity.clone(), config.identity_file.clone())?;
        let tls = TlsConfigs::new(&identity, config.revoked.as_ref(), path.transport_config(timing.idle))?;
        source.has_lanes(config.link.lanes)?;
        let is_simulated = source.is_simulated();
        let Endpoints { lanes: lane_endpoints, capabilities, refused } =
            source.endpoints(&path, Some(&tls.server()), alive.is_some())?;
        let beside = lane_endpoints.iter().skip(1).map(|end| end.endpoint.local_addr());
        let lane_ports =
            beside.map(|address| address.map(|address| address.port())).collect::<Result<_, _>>();
        let lane_ports = lane_ports
            .map_err(|error| TransportError::bootstrap(format!("a lane without a port: {error}")))?;
        let admission = Arc::new(Admission::new(&config, (&identity, &tls), lane_ports)?);
        let thread = alive.map(Alive::downgrade);
        Ok(Arc::new(RankEndpoint {
            config,
            lane_endpoints,
            path,
            timing,
            capabilities,
            refused,
            is_simulated,
            identity,
            tls,
            admission,
            thread,
        }))
    }

    /// One rank's end of a group that has been formed. Must be called in a tokio context.
    fn start(endpoint: Arc<RankEndpoint>, next: NextGroup, alive: Option<Alive>) -> Self {
        let network = describe_network(&endpoint, &next.mesh);
        tracing::debug!(rank = %endpoint.config.rank, network);
        let core = lifecycle::start(endpoint, next);
        if let Some(alive) = alive {
            // The I/O thread runs until this rank has left, even if its transport is still held.
            let mut over = core.over.subscribe();
            tokio::spawn(async move {
                let _ = over.wait_for(|over| *over).await;
                tokio::time::sleep(LAST_PACKETS).await;
                drop(alive);
            });
        }
        Self { core, network }
    }

    /// Leaves an aborted group to form the next one; the endpoint is kept.
    fn form_again(core: &Arc<Core>, who: Regroup, patience: Duration, completer: Completer<Group>) {
        let abort = match core.leave_aborted() {
            Ok(abort) => abort,
            Err(error) => return completer.complete(Err(error)),
        };
        let core = Arc::clone(core);
        let until = Deadline::after(patience).at();
        // Held across the time in which no group holds it.
        let alive = core.endpoint.thread.as_ref().and_then(WeakSender::upgrade);
        core.runtime.clone().spawn(async move {
            let leaving = Arc::clone(&core);
            tokio::spawn(async move { leaving.close_aborted_links().await });
            let formed = regroup::regroup(&core.endpoint, core.prior(&abort), who, until).await;
            if let Err(error) = &formed {
                core.endpoint.part(error).await;
            }
            completer
                .complete(formed.map(|next| Self::start(Arc::clone(&core.endpoint), next, alive).into()));
        });
    }
}

/// How long the I/O thread outlives a rank that has gone, for its last packets.
const LAST_PACKETS: Duration = Duration::from_millis(400);

pub(crate) fn bind(config: &QuicConfig) -> Result<SocketSource, TransportError> {
    config.check()?;
    let sockets = config.lane_addresses().map(|address| binding::bind(address, config.link.carrier));
    Ok(SocketSource::Real(sockets.collect::<Result<_, _>>()?))
}

impl fmt::Debug for QuicTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Core { me, size, job, .. } = &*self.core;
        f.debug_struct("QuicTransport").field("rank", me).field("size", size).field("job", job).finish()
    }
}

impl Transport for QuicTransport {
    fn rank(&self) -> Rank {
        self.core.me
    }

    fn size(&self) -> u32 {
        self.core.size
    }

    fn post_send(&self, to: Rank, tag: Tag, parts: Vec<Bytes>, deadline: Duration) -> Posted<Taken> {
        let (completer, posted) = Posted::pair();
        self.core.send(to, tag, parts, deadline, completer);
        posted
    }

    fn post_recv(
        &self,
        from: Rank,
        tag: Tag,
        part_bytes: &[usize],
        deadline: Duration,
    ) -> Posted<Vec<Bytes>> {
        let (completer, posted) = Posted::pair();
        self.core.recv(from, tag, part_bytes, deadline, completer);
        posted
    }

    fn agree(&self, vote: Vote, deadline: Duration) -> Posted<Vec<Bytes>> {
        let (completer, posted) = Posted::pair();
        self.core.agree(vote, deadline, completer);
        posted
    }

    fn abort(&self, abort: Abort) {
        self.core.ask_for_abort(abort);
    }

    fn report_progress(&self, progress: Progress) {
        self.core.report_progress(progress);
    }

    fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.core.stop_flag)
    }

    fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.core.pulse)
    }

    fn close(&self, deadline: Duration) -> Posted<()> {
        let (completer, posted) = Posted::pair();
        self.core.close(deadline, completer);
        posted
    }

    fn reform(&self, who: Regroup, deadline: Duration) -> Posted<Group> {
        let (completer, posted) = Posted::pair();
        Self::form_again(&self.core, who, deadline, completer);
        posted
    }

    fn recorder(&self) -> Arc<Recorder> {
        Arc::clone(&self.core.recorder)
    }

    fn outstanding(&self) -> Vec<Outstanding> {
        self.core.lock().calls.outstanding()
    }

    fn network(&self) -> Option<String> {
        Some(self.network.clone())
    }

    fn connections(&self) -> Vec<Option<ConnectionFigures>> {
        self.core.links.iter().map(|link| link.as_ref().map(Link::figures)).collect()
    }
}

impl Drop for QuicTransport {
    fn drop(&mut self) {
        self.core.dropped();
    }
}
