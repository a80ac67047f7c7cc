//! One way to run a problem: a strategy, a mesh and a placement.

use std::fmt;

use crate::mesh::Mesh;
use crate::placement::PlacementKind;
use crate::problem::AttentionProblem;
use crate::strategy_list::Strategy;

/// One way to run a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// How its ranks are arranged.
    #[serde(serialize_with = "as_text")]
    pub mesh: Mesh,
    /// The placement of queries and keys.
    pub placement: PlacementKind,
}

impl Candidate {
    /// What runs the backward pass of `problem` after this one: see [`Strategy::of_backward`]. The
    /// tokens of each rank are the same.
    ///
    /// ```
    /// use kyklos_plan::simulate::Candidate;
    /// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Strategy};
    ///
    /// let problem = AttentionProblem::new([1, 64, 8, 2, 64], Dtype::F32, Mask::causal())?;
    /// let (mesh, placement) = (Mesh::new(2, 4)?, PlacementKind::Zigzag);
    /// let candidate = |strategy| Candidate { strategy, mesh, placement };
    /// assert_eq!(candidate(Strategy::Unified).of_backward(&problem), candidate(Strategy::Unified));
    /// assert!(candidate(Strategy::Relay).of_backward(&problem).strategy.has_backward());
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    #[must_use]
    pub fn of_backward(self, problem: &AttentionProblem) -> Self {
        Self { strategy: self.strategy.of_backward(problem, self.mesh), ..self }
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
