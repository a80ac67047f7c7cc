//! MPI: the variables of Open MPI, and those of PMI (MPICH, Intel MPI, and Slurm for both). They
//! hold ranks and counts, and no addresses.

use super::Launcher;
use crate::error::Result;
use crate::source::{Precedence, Source};
use crate::variables::Variables;

pub(super) const OPEN_MPI: Launcher = Launcher {
    name: "Open MPI",
    variables: &["OMPI_"],
    rank_variables: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    precedence: Precedence::Launcher,
    read: |variables| {
        let global = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
        read(variables, global, ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"])
    },
};

pub(super) const PMI: Launcher = Launcher {
    name: "PMI",
    variables: &["PMI_", "PMIX_", "MPI_"],
    rank_variables: &["PMI_RANK", "PMI_SIZE"],
    precedence: Precedence::Launcher,
    read: |variables| read(variables, ["PMI_RANK", "PMI_SIZE"], ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
};

/// `global` and `local` name the variables of a rank and of the number of ranks.
fn read(variables: &Variables<'_>, global: [&str; 2], local: [&str; 2]) -> Result<Source> {
    let Some([rank, size]) = variables.pair(global)? else {
        return Ok(Source::default());
    };
    Ok(Source {
        local_rank: variables.count(local[0])?,
        local_size: variables.count(local[1])?.map(|size| size.max(1)),
        rank: Some(rank),
        size: Some(size),
        ..Source::default()
    })
}

#[cfg(test)]
mod tests {
    use crate::test_support::{assign, brief};

    #[test]
    fn both_kinds_of_mpi_give_rank_and_world_and_no_address() {
        for variables in [
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
        ] {
            let with_address = format!("{variables} KYKLOS_COORDINATOR=h:1");
            assert_eq!(brief(assign("", &with_address).unwrap()), "3/4 1/2 h:1", "{variables}");
            assert!(
                assign("", variables).unwrap_err().to_string().contains("where rank 0 is"),
                "{variables}"
            );
        }
    }

    #[test]
    fn a_rank_without_a_world_is_refused_by_the_missing_variable() {
        for (variables, missing) in
            [("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_SIZE is not"), ("PMI_SIZE=5", "PMI_RANK is not")]
        {
            let error = assign("", variables).expect_err(variables);
            assert!(error.is_request() && error.to_string().contains(missing), "{error}");
        }
    }
}
