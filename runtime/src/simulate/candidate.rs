//! One way to run a problem: a strategy, a mesh and a placement.

use std::fmt;

use crate::{Mesh, PlacementKind, Strategy};

/// One way to run a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// The mesh.
    #[serde(serialize_with = "as_text")]
    pub mesh: Mesh,
    /// The placement of queries and keys.
    pub placement: PlacementKind,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.strategy, self.mesh, self.placement)
    }
}

fn as_text<S: serde::Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(mesh)
}
