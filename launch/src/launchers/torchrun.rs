//! torchrun, whose names `kyklos launch` uses too: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
//! MASTER_PORT. The address counts on its own as well, because scripts export it under other launchers.

use super::source::{HostPort, Nearness, Said, Source};
use super::variables::Variables;
use crate::failure::{Failure, Result};

pub(crate) fn source(variables: &Variables<'_>) -> Result<Source> {
    let mut source =
        Source { nearness: Nearness::Inner, coordinator: coordinator(variables)?, ..Source::default() };
    if let Some([rank, world]) = variables.both::<u32>(["RANK", "WORLD_SIZE"])? {
        let number = |name| Ok::<_, Failure>(variables.number::<u32>(name)?.map(|said| said.value));
        source.local_rank = Some(number("LOCAL_RANK")?.unwrap_or(rank.value));
        source.local_world = Some(number("LOCAL_WORLD_SIZE")?.unwrap_or(1).max(1));
        source.run = variables.text("TORCHELASTIC_RUN_ID").map(|run| {
            let restarts = variables.text("TORCHELASTIC_RESTART_COUNT").map_or("0".into(), |said| said.value);
            format!("torchelastic {} {restarts}", run.value)
        });
        (source.rank, source.world) = (Some(rank), Some(world));
    }
    Ok(source)
}

fn coordinator(variables: &Variables<'_>) -> Result<Option<Said<HostPort>>> {
    let (host, port) = match (variables.text("MASTER_ADDR"), variables.number::<u16>("MASTER_PORT")?) {
        (Some(host), Some(port)) => (host, port),
        (Some(host), None) => {
            return Err(Failure::request(
                format!("{} is set and MASTER_PORT is not", host.words),
                "set both: the host and the UDP port of rank 0",
            ));
        }
        // A port without a host names nobody.
        (None, _) => return Ok(None),
    };
    let words = format!("{} {}", host.words, port.words);
    match HostPort::new(&host.value, port.value).filter(|address| address.port != 0) {
        Some(address) => Ok(Some(Said::new(address, words))),
        None => Err(Failure::request(
            format!("{words} is not an address"),
            "name a host and a UDP port that all ranks can reach",
        )),
    }
}
