//! One way to run a problem: a strategy, a mesh and a placement.

use std::fmt;

use crate::{Mesh, PlacementKind, Strategy};

/// One way to share a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Candidate {
    /// By which strategy.
    pub strategy: Strategy,
    /// On which mesh.
    #[serde(serialize_with = "as_text")]
    pub mesh: Mesh,
    /// With which placement.
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
