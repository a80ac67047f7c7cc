//! Maps a [`Strategy`] to its facts, and answers questions from them.

use super::facts::{MeshRule, Moves, StrategyFacts};
use super::kinds;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::named::facts_of_each;
use crate::problem::AttentionProblem;
use crate::strategy_list::{Strategy, strategies};

macro_rules! strategy_facts {
    ($($list:tt)*) => {
        facts_of_each! { Strategy, StrategyFacts, kinds: $($list)* }
    };
}
strategies!(strategy_facts);

impl Strategy {
    /// The default strategy of a mesh: 1x1 dense, 1xR ring, Ux1 ulysses, else unified.
    pub fn of_mesh(mesh: Mesh) -> Self {
        let is_default = |rule: MeshRule| rule.takes(mesh);
        let found =
            Self::ALL.into_iter().find(|strategy| strategy.facts().default_on.is_some_and(is_default));
        found.unwrap_or(Self::Unified)
    }

    /// Refuses a mesh that this strategy does not run on.
    ///
    /// # Errors
    /// [`Error::Request`] that names the meshes that it runs on.
    pub fn accepts(self, mesh: Mesh) -> Result<()> {
        let rule = self.facts().meshes;
        if rule.takes(mesh) {
            return Ok(());
        }
        Err(Error::request(
            format!("strategy {self} does not run on mesh {mesh}"),
            format!("use {rule}, or strategy unified, which takes any mesh"),
        ))
    }

    /// A mesh of at most four ranks that shows this strategy.
    pub fn example_mesh(self) -> Mesh {
        let (ulysses, ring) = self.facts().example_mesh;
        Mesh::new(ulysses, ring).expect("facts name meshes that exist")
    }

    /// Whether it has a plan for gradients ([`plan_backward`](crate::plan_backward)).
    pub fn has_backward(self) -> bool {
        self.facts().backward_round.is_some()
    }

    /// The strategy of the backward pass on `mesh`, after a forward pass with this one: the same,
    /// or where it has no plan for the gradients that `problem` asks for, the default of the
    /// mesh.
    pub fn of_backward(self, problem: &AttentionProblem, mesh: Mesh) -> Self {
        match self.has_backward() && !self.splits_bias_gradient(problem) {
            true => self,
            false => Self::of_mesh(mesh),
        }
    }

    /// Whether a row of the gradient of a bias would be in parts on many ranks: the queries travel.
    pub(super) fn splits_bias_gradient(self, problem: &AttentionProblem) -> bool {
        problem.bias_gradient && problem.query_bias().is_some() && self.moves_queries()
    }

    /// The number of exchanges of a hop: streams of one direction have their own.
    pub(crate) fn exchanges_of_hop(self) -> u32 {
        let forwards = self.facts().streams.iter().filter(|stream| stream.forwards).count();
        u32::try_from(forwards).expect("a few streams").max(1)
    }

    /// Whether queries travel between shards, and keys stay.
    pub fn moves_queries(self) -> bool {
        self.facts().moves == Moves::Queries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_takes_its_example_mesh_and_the_meshes_whose_default_it_is() {
        for strategy in Strategy::ALL {
            assert!(strategy.accepts(strategy.example_mesh()).is_ok(), "{strategy}");
            assert_eq!(strategy.name().parse::<Strategy>().unwrap(), strategy);
            assert!(strategy.summary().ends_with('.'), "{strategy}");
        }
        for (ulysses, ring) in (1..5).flat_map(|u| (1..5).map(move |r| (u, r))) {
            let mesh = Mesh::new(ulysses, ring).unwrap();
            let default = Strategy::of_mesh(mesh);
            assert!(default.accepts(mesh).is_ok(), "{default} on {mesh}");
            let all = Strategy::ALL.into_iter();
            let rules = all.filter_map(|strategy| strategy.facts().default_on);
            assert_eq!(rules.filter(|rule| rule.takes(mesh)).count(), 1, "{mesh}");
        }
    }

    #[test]
    fn a_mesh_that_does_not_fit_is_refused_with_the_meshes_that_do() {
        let refusal = Strategy::Relay.accepts(Mesh::new(1, 4).unwrap()).unwrap_err().to_string();
        assert!(refusal.contains("a mesh UxR with U and R of at least 2"), "{refusal}");
        let refusal = Strategy::Ring.accepts(Mesh::new(2, 2).unwrap()).unwrap_err().to_string();
        assert!(refusal.contains("a mesh 1xR, or strategy unified"), "{refusal}");
    }
}
