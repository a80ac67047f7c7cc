//! What a launcher says in the environment, and the group of processes it makes.

use std::env;
use std::io::Read;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;

use kyklos_transport::quic::{Identity, JobId, QuicConfig, QuicTransport};
use kyklos_transport::{Rank, Transport, in_process_group};

use crate::failure::{Failure, Result};
use crate::interrupt;

/// This process is one rank of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launched {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Place of this rank among those of its host.
    pub(crate) local_rank: u32,
    pub(crate) local_world: u32,
    /// Started by `kyklos launch`, not by somebody else's launcher.
    pub(crate) by_kyklos: bool,
}

/// The environment's variables, looked up by name.
pub(crate) struct Environment<F>(F);

impl Environment<fn(&str) -> Option<String>> {
    pub(crate) fn of_this_process() -> Self {
        Self(|name| env::var(name).ok())
    }
}

impl<F: Fn(&str) -> Option<String>> Environment<F> {
    /// Whether `kyklos launch` made it.
    pub(crate) fn by_kyklos(&self) -> bool {
        (self.0)(LAUNCH).is_some()
    }

    /// What it says of rank and world, whether or not that makes sense; `None` where it says nothing.
    pub(crate) fn rank_and_world(&self) -> Option<String> {
        let said: Vec<String> = ["RANK", "WORLD_SIZE"]
            .iter()
            .filter_map(|name| (self.0)(name).map(|value| format!("{name}={value}")))
            .collect();
        (!said.is_empty()).then(|| said.join(" "))
    }

    /// Which rank a launcher has made of this process; `None` where there is no launcher.
    pub(crate) fn launched(&self) -> Result<Option<Launched>> {
        let number = |name: &str| -> Result<Option<u32>> {
            (self.0)(name)
                .map(|text| {
                    text.parse().map_err(|_| {
                        Failure::request(
                            format!("{name}={text} in the environment is not a number"),
                            "let the launcher set it, or unset it",
                        )
                    })
                })
                .transpose()
        };
        let (rank, world) = match (number("RANK")?, number("WORLD_SIZE")?) {
            (None, None) => return Ok(None),
            (Some(rank), Some(world)) => (rank, world),
            (rank, _) => {
                let (set, unset) =
                    if rank.is_some() { ("RANK", "WORLD_SIZE") } else { ("WORLD_SIZE", "RANK") };
                return Err(Failure::request(
                    format!("{set} is set in the environment and {unset} is not"),
                    "set both, as torchrun and kyklos launch do, or none",
                ));
            }
        };
        if rank >= world {
            return Err(Failure::request(
                format!("RANK={rank} with WORLD_SIZE={world} in the environment"),
                "ranks go from 0 to the world's size less one",
            ));
        }
        Ok(Some(Launched {
            rank,
            world,
            local_rank: number("LOCAL_RANK")?.unwrap_or(rank),
            local_world: number("LOCAL_WORLD_SIZE")?.unwrap_or(1).max(1),
            by_kyklos: self.by_kyklos(),
        }))
    }
}

impl Launched {
    /// Joins the group.
    pub(crate) fn connect(&self) -> Result<Arc<dyn Transport>> {
        if self.world == 1 {
            return in_process_group(1).pop().ok_or_else(|| Failure::run("a group of one rank has no rank"));
        }
        let needed = |name: &str, what: &str| {
            env::var(name).map_err(|_| {
                Failure::request(
                    format!("{name} is not set in the environment"),
                    format!("it says {what}; kyklos launch sets it"),
                )
            })
        };
        let address = needed("MASTER_ADDR", "the host of rank 0")?;
        let port = needed("MASTER_PORT", "the UDP port of rank 0")?;
        let identity = needed(IDENTITY, "which file proves this rank to the others")?;
        let identity = Identity::read_file(&PathBuf::from(identity))?;
        let (named, job) = identity.rank_and_job()?;
        if named != Rank(self.rank) {
            return Err(Failure::request(
                format!("the identity in {IDENTITY} is that of rank {named}, this is rank {}", self.rank),
                "give every rank its own file",
            ));
        }
        if let Ok(name) = env::var(JOB_ID)
            && name.parse::<JobId>().unwrap_or_else(|_| JobId::from_name(&name)) != job
        {
            return Err(Failure::request(
                format!("the identity in {IDENTITY} is of job {job}, {JOB_ID} is {name}"),
                "use the files that were issued for this job",
            ));
        }
        let config = QuicConfig::new(Rank(self.rank), self.world, job, resolve(&address, &port)?, identity);
        Ok(QuicTransport::connect(config)?)
    }

    /// A process of `kyklos launch` ends when its launcher does, whatever happened to it: the launcher holds the
    /// other end of standard input.
    pub(crate) fn end_with_launcher(&self) {
        if self.by_kyklos {
            std::thread::spawn(|| {
                let mut ignored = [0; 64];
                while std::io::stdin().read(&mut ignored).is_ok_and(|read| read > 0) {}
                interrupt::end(1);
            });
        }
    }
}

fn resolve(address: &str, port: &str) -> Result<SocketAddr> {
    let wrong = |why: String| {
        Failure::request(
            format!("rank 0 cannot be found at MASTER_ADDR={address} MASTER_PORT={port}: {why}"),
            "name a host and a UDP port that all ranks can reach",
        )
    };
    let port: u16 = port.parse().map_err(|_| wrong("the port is not a number up to 65535".to_owned()))?;
    (address, port)
        .to_socket_addrs()
        .map_err(|error| wrong(error.to_string()))?
        .next()
        .ok_or_else(|| wrong("the name has no address".to_owned()))
}

/// Set by `kyklos launch` for its processes.
pub(crate) const LAUNCH: &str = "KYKLOS_LAUNCH";
/// Name of the job.
pub(crate) const JOB_ID: &str = "KYKLOS_JOB_ID";
/// Path of the file with which a rank proves itself.
pub(crate) const IDENTITY: &str = "KYKLOS_IDENTITY";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Launched>> {
        Environment(|name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
        .launched()
    }

    #[test]
    fn torchruns_names_are_read_and_contradictions_refused() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("LOCAL_RANK", "3")]).unwrap(), None);
        let launched =
            read(&[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")])
                .unwrap()
                .unwrap();
        assert_eq!((launched.rank, launched.world, launched.local_rank, launched.local_world), (5, 8, 1, 4));
        assert!(!launched.by_kyklos);
        for wrong in [
            &[("RANK", "5")][..],
            &[("WORLD_SIZE", "5")],
            &[("RANK", "5"), ("WORLD_SIZE", "5")],
            &[("RANK", "x"), ("WORLD_SIZE", "5")],
            &[("RANK", "-1"), ("WORLD_SIZE", "5")],
        ] {
            assert_eq!(read(wrong).unwrap_err().exit, 2, "{wrong:?}");
        }
    }
}
