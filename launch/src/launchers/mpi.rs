//! MPI's launchers: Open MPI's names, and those of PMI (MPICH, Intel MPI, and Slurm's own for both). Only who is who:
//! they say nothing of addresses.

use super::source::{Nearness, Said, Source};
use super::variables::Variables;
use crate::failure::{Failure, Result};

pub(crate) fn open_mpi(variables: &Variables<'_>) -> Result<Source> {
    let both = variables.both(["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])?;
    source(variables, both, ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"])
}

pub(crate) fn pmi(variables: &Variables<'_>) -> Result<Source> {
    let both = variables.both(["PMI_RANK", "PMI_SIZE"])?;
    source(variables, both, ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
}

fn source(
    variables: &Variables<'_>,
    both: Option<[Said<u32>; 2]>,
    [local_rank, local_world]: [&str; 2],
) -> Result<Source> {
    let mut source = Source { nearness: Nearness::Inner, ..Source::default() };
    if let Some([rank, world]) = both {
        let number = |name| Ok::<_, Failure>(variables.number::<u32>(name)?.map(|said| said.value));
        source.local_rank = number(local_rank)?;
        source.local_world = number(local_world)?.map(|world| world.max(1));
        (source.rank, source.world) = (Some(rank), Some(world));
    }
    Ok(source)
}
