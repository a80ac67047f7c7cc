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

impl Candidate {
    /// What runs the backward pass of this one: the same, or where its strategy has no backward pass the default strategy of
    /// its mesh. The tokens of each rank are the same.
    ///
    /// ```
    /// use kyklos::simulate::Candidate;
    /// use kyklos::{Mesh, PlacementKind, Strategy};
    ///
    /// let (mesh, placement) = (Mesh::new(2, 4)?, PlacementKind::Zigzag);
    /// let candidate = |strategy| Candidate { strategy, mesh, placement };
    /// assert_eq!(candidate(Strategy::Unified).of_backward(), candidate(Strategy::Unified));
    /// assert!(candidate(Strategy::PassQ).of_backward().strategy.has_backward());
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    #[must_use]
    pub fn of_backward(self) -> Self {
        match self.strategy.has_backward() {
            true => self,
            false => Self { strategy: Strategy::of_mesh(self.mesh), ..self },
        }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.strategy, self.mesh, self.placement)
    }
}

fn as_text<S: serde::Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(mesh)
}
