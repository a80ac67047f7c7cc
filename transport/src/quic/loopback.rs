//! A group in one process, over real sockets.

use std::net::{Ipv4Addr, SocketAddr};

use super::transport::{QuicTransport, bind};
use crate::error::TransportError;
use crate::quic::forming::config::QuicConfig;
use crate::quic::network::io_thread::IoThread;
use crate::quic::network::path::LinkSettings;
use crate::quic::trust::authority::ClusterAuthority;
use crate::quic::trust::job::JobId;
use crate::rank::Rank;
use crate::transport::Group;

/// Makes a group of `size` ranks in this process over real sockets on loopback, with one I/O thread
/// for all and without shared memory.
///
/// # Errors
///
/// [`TransportError::Bootstrap`] if sockets or keys cannot be made.
pub fn quic_loopback_group(size: u32) -> Result<Vec<Group>, TransportError> {
    quic_loopback_group_over(size, LinkSettings { shared_memory: false, ..LinkSettings::default() })
}

/// The same as if the loopback interface were a link of these settings.
///
/// # Errors
///
/// [`TransportError::Bootstrap`] if sockets or keys cannot be made, or the settings are refused.
pub fn quic_loopback_group_over(size: u32, link: LinkSettings) -> Result<Vec<Group>, TransportError> {
    let job = JobId::random()?;
    let authority = ClusterAuthority::new(job)?;
    let mut coordinator = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut ranks = Vec::new();
    for rank in (0..size).map(Rank) {
        let config =
            QuicConfig { link, ..QuicConfig::new(rank, size, job, coordinator, authority.issue(rank)?) };
        let source = bind(&config)?;
        if rank == Rank::COORDINATOR {
            coordinator = source.local_addr()?;
        }
        ranks.push((QuicConfig { coordinator, ..config }, source));
    }
    let thread = IoThread::start()?;
    let alive = thread.alive();
    thread.run(async move {
        let forming: Vec<_> = ranks
            .into_iter()
            .map(|(config, source)| {
                let alive = alive.clone();
                tokio::spawn(async { QuicTransport::form_on(config, source, Some(alive)).await })
            })
            .collect();
        let mut group: Vec<Group> = Vec::new();
        for rank in forming {
            let formed = rank.await.map_err(|error| TransportError::bootstrap(error.to_string()))?;
            group.push(formed?.into());
        }
        Ok(group)
    })?
}
