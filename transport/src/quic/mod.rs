//! Ranks in different processes, over QUIC with certificates on both sides.
//!
//! Rank 0 listens on the coordinator's address and is the coordinator of the group. Every two ranks have a data
//! connection; every rank has a control connection to rank 0, so that heartbeats and aborts never queue behind
//! payload. All I/O of a rank runs on one thread of its own ([`QuicTransport::connect`]), or in the caller's tokio
//! context ([`QuicTransport::form`]).
//!
//! The coordinator's [`Transport::close`] ends when all other ranks have left, because they need it until then. The
//! last 0.6 s of a close's deadline (half of it, if it is short) are for the last packets rather than for peers. After
//! an abort, close the transport before the process ends: that is when the others are sure to have heard of it.

mod agreement;
mod assembly;
mod authority;
mod bootstrap;
mod config;
mod congestion;
mod control;
mod coordinator;
mod core;
#[doc(hidden)]
pub mod decoders;
mod door;
#[cfg(test)]
mod door_tests;
mod frames;
mod hex;
mod identity;
mod io_thread;
mod job;
mod join;
mod key_hash;
#[cfg(test)]
mod lane_tests;
mod lifecycle;
mod link;
mod loopback;
mod messages;
mod names;
mod other_door;
mod payload;
mod private_file;
mod receiving;
mod regroup;
mod revoked;
mod seat;
mod sending;
mod socket;
mod stalls;
mod state;
mod tls;
mod told;
#[cfg(test)]
mod trust_tests;
mod tunnel;
mod validity;
mod verifier;
mod visitors;
mod windows;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use quinn::AsyncUdpSocket;
use tokio::time::Instant;

pub use self::authority::{ClusterAuthority, VALID_DAYS};
pub use self::config::QuicConfig;
pub use self::congestion::Congestion;
use self::core::{COORDINATOR, Core};
use self::door::Door;
pub use self::identity::Identity;
use self::io_thread::{Alive, IoThread};
pub use self::job::JobId;
pub use self::join::{EnrolConfig, Enrolled, Invitation, InvitationTerms, Token, enrol};
pub use self::key_hash::KeyHash;
use self::link::Path;
pub use self::link::{Carrier, LinkSettings};
pub use self::loopback::{quic_loopback_group, quic_loopback_group_over};
pub use self::names::{Claims, HostNames, Subject};
use self::regroup::{Next, Past};
pub use self::revoked::Revoked;
use self::seat::Seat;
use self::socket::{Ends, Ground};
pub use self::validity::{Date, Validity};
use crate::error::{Abort, TransportError};
use crate::figures::ConnectionFigures;
use crate::pulse::Pulse;
use crate::recorder::{Outstanding, Recorder};
use crate::reform::{Reformed, Regroup};
use crate::transport::{Posted, Progress, Rank, Tag, Taken, Transport, Vote};

/// One rank's end of a group over QUIC. Dropping it without [`Transport::close`] means that the rank died.
pub struct QuicTransport {
    core: Arc<Core>,
    network: String,
}

impl QuicTransport {
    /// Forms the group and returns this rank's end of it, with all I/O on a thread of its own. Blocks until every
    /// rank is there.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the group is not complete by the connect deadline, or this rank is refused. A
    /// rank whose own identity does not fit shows it to rank 0 before it gives up, so that others can say why it is not
    /// there.
    pub fn connect(config: QuicConfig) -> Result<Arc<dyn Transport>, TransportError> {
        let ground = bind(&config)?;
        let thread = IoThread::start()?;
        let alive = thread.alive();
        thread.run(async move {
            let transport: Arc<dyn Transport> = Arc::new(Self::form_on(config, ground, Some(alive)).await?);
            Ok(transport)
        })?
    }

    /// The same in the caller's tokio context, which must have I/O and time and must outlive the transport.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub async fn form(config: QuicConfig) -> Result<Arc<dyn Transport>, TransportError> {
        let ground = bind(&config)?;
        Ok(Arc::new(Self::form_on(config, ground, None).await?))
    }

    /// The same over sockets that are not the system's, one for each lane, for a simulated network: with tokio's time paused
    /// and quinn's random numbers from `seed`, a group does the same again and again. The first socket has the address that
    /// the config says; no other use has a reason to choose the seed, which is no secret then.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub async fn form_over(
        config: QuicConfig,
        sockets: Vec<Arc<dyn AsyncUdpSocket>>,
        seed: [u8; 32],
    ) -> Result<Arc<dyn Transport>, TransportError> {
        bootstrap::check(&config)?;
        Ok(Arc::new(Self::form_on(config, Ground::Simulated(sockets, seed), None).await?))
    }

    /// Joins a job that runs already, as a rank that was started anew: with the config of its first start, but for the time
    /// that it waits, which is the connect deadline. It is let in when the others form the group again, with
    /// [`Regroup::Everyone`], and finds them through rank 0. Blocks until then.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub fn rejoin(config: QuicConfig) -> Result<Reformed, TransportError> {
        let ground = bind(&config)?;
        let thread = IoThread::start()?;
        let alive = thread.alive();
        thread.run(async move { Self::rejoin_on(config, ground, Some(alive)).await })?
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
    ) -> Result<Reformed, TransportError> {
        bootstrap::check(&config)?;
        Self::rejoin_on(config, Ground::Simulated(sockets, seed), None).await
    }

    async fn form_on(
        config: QuicConfig,
        ground: Ground,
        alive: Option<Alive>,
    ) -> Result<Self, TransportError> {
        let seat = Self::sit_down(config, ground, alive.as_ref()).await?;
        seat.door.invite();
        seat.listen();
        let is_simulated = seat.is_simulated;
        let mesh = tokio::select! {
            biased;
            mesh = bootstrap::form(&seat) => mesh?,
            text = seat.refusal() => return Err(TransportError::Bootstrap { text }),
            never = other_door::turn_away(&seat), if !is_simulated => match never {},
        };
        seat.door.invite_no_more();
        let (epoch, members) = (seat.config.epoch, (0..seat.config.world).map(Rank).collect());
        Ok(Self::start(seat, Next { epoch, members, mesh }, alive))
    }

    async fn rejoin_on(
        config: QuicConfig,
        ground: Ground,
        alive: Option<Alive>,
    ) -> Result<Reformed, TransportError> {
        let patience = config.connect_deadline;
        let until = Instant::now() + patience;
        let seat = Self::sit_down(config, ground, alive.as_ref()).await?;
        seat.listen();
        let coordinator = (COORDINATOR, seat.config.coordinator);
        let addresses = [coordinator].into_iter().filter(|(rank, _)| *rank != seat.config.rank).collect();
        let past = Past { claims: Vec::new(), addresses, lost: None };
        let formed = tokio::select! {
            biased;
            formed = regroup::regroup(&seat, past, Regroup::Everyone { within: patience }, until) => formed,
            text = seat.refusal() => Err(TransportError::Bootstrap { text }),
        };
        match formed {
            Ok(next) => Ok(Self::of(seat, next, alive)),
            Err(error) => {
                seat.part(&error).await;
                Err(error)
            }
        }
    }

    /// Makes what of a rank outlives its groups, unless its own identity does not fit.
    async fn sit_down(
        config: QuicConfig,
        ground: Ground,
        alive: Option<&Alive>,
    ) -> Result<Arc<Seat>, TransportError> {
        let fits = bootstrap::identity_fits(&config);
        let seat = Self::sit_down_unchecked(config, ground, alive)?;
        if let Err(error) = fits {
            bootstrap::knock(&seat).await;
            return Err(error);
        }
        Ok(seat)
    }

    fn sit_down_unchecked(
        config: QuicConfig,
        ground: Ground,
        alive: Option<&Alive>,
    ) -> Result<Arc<Seat>, TransportError> {
        let path = Path::new(&config.link, config.bind, config.world)?;
        let tls = tls::TlsConfigs::new(&config, &path)?;
        ground.has_lanes(config.link.lanes)?;
        let is_simulated = ground.is_simulated();
        let Ends { lanes: ends, granted, refused } =
            ground.ends(&path, Some(&tls.server()), alive.is_some())?;
        let beside = ends.iter().skip(1).map(|end| end.endpoint.local_addr());
        let lane_ports =
            beside.map(|address| address.map(|address| address.port())).collect::<Result<_, _>>();
        let lane_ports =
            lane_ports.map_err(|error| bootstrap::failed(format!("a lane without a port: {error}")))?;
        let door = Arc::new(Door::new(&config, &tls, lane_ports)?);
        let thread = alive.map(Alive::downgrade);
        Ok(Arc::new(Seat { config, ends, path, granted, refused, is_simulated, tls, door, thread }))
    }

    /// One rank's end of a group that has been formed. Must be called in a tokio context.
    fn start(seat: Arc<Seat>, next: Next, alive: Option<Alive>) -> Self {
        let network = told::line(&seat, &next.mesh);
        tracing::debug!(rank = %seat.config.rank, network);
        let core = lifecycle::start(seat, next);
        if let Some(alive) = alive {
            // The I/O thread runs until this rank has gone, whoever still holds its transport.
            let mut over = core.over.subscribe();
            tokio::spawn(async move {
                let _ = over.wait_for(|over| *over).await;
                tokio::time::sleep(LAST_PACKETS).await;
                drop(alive);
            });
        }
        Self { core, network }
    }

    pub(crate) fn of(seat: Arc<Seat>, next: Next, alive: Option<Alive>) -> Reformed {
        let (members, epoch) = (next.members.clone(), next.epoch);
        Reformed { transport: Arc::new(Self::start(seat, next, alive)), members, epoch }
    }
}

/// How long the I/O thread outlives a rank that has gone, for its last packets.
const LAST_PACKETS: Duration = Duration::from_millis(400);

fn bind(config: &QuicConfig) -> Result<Ground, TransportError> {
    bootstrap::check(config)?;
    let sockets = config.lane_addresses().map(|address| socket::bind(address, config.link.carrier));
    Ok(Ground::Real(sockets.collect::<Result<_, _>>()?))
}

impl fmt::Debug for QuicTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Core { me, world, job, .. } = &*self.core;
        f.debug_struct("QuicTransport").field("rank", me).field("world", world).field("job", job).finish()
    }
}

impl Transport for QuicTransport {
    fn rank(&self) -> Rank {
        self.core.me
    }

    fn world(&self) -> u32 {
        self.core.world
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

    fn agree(&self, vote: Vote, deadline: Duration) -> Posted<()> {
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

    fn reform(&self, who: Regroup, deadline: Duration) -> Posted<Reformed> {
        let (completer, posted) = Posted::pair();
        self.core.reform(who, deadline, completer);
        posted
    }

    fn recorder(&self) -> Arc<Recorder> {
        Arc::clone(&self.core.recorder)
    }

    fn outstanding(&self) -> Vec<Outstanding> {
        self.core.lock().outstanding()
    }

    fn network(&self) -> Option<String> {
        Some(self.network.clone())
    }

    fn connections(&self) -> Vec<Option<ConnectionFigures>> {
        self.core.links.iter().map(|link| link.as_ref().map(told::figures)).collect()
    }
}

impl Drop for QuicTransport {
    fn drop(&mut self) {
        self.core.dropped();
    }
}
