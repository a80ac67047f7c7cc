//! Random problems and rings.

use kyklos::plan::World;
use kyklos::{Dtype, Mesh, PlacementKind, Split, Strategy, WireFormat, plan_placed, plan_world};
use kyklos_backend_suite::problem_of;
use kyklos_oracle::inputs::{Case, CasePairs};
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleSlice, OracleTerm};
use kyklos_transport::Rank;

use crate::open_placement::any_placement;
use crate::plan_properties::Random;

/// Strategies that send keys from rank to rank.
const ROUNDS: [Strategy; 7] = [
    Strategy::Ring,
    Strategy::Unified,
    Strategy::Bidirectional,
    Strategy::Pipelined,
    Strategy::TwoWay,
    Strategy::Line,
    Strategy::Gather,
];

/// Random numbers from a seed (splitmix64), so that a failure shrinks to a seed.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    /// Lost ranks, at least one, and survivors, at least one.
    pub fn losses(&mut self, ranks: u32) -> (Vec<Rank>, Vec<Rank>) {
        let count = 1 + usize::from(ranks > 2 && self.below(3) == 0);
        let mut left: Vec<Rank> = (0..ranks).map(Rank).collect();
        let lost = (0..count).map(|_| left.remove(self.below(left.len()))).collect();
        (lost, left)
    }
}

/// A problem of up to `longest` tokens.
pub fn case(chance: &mut Chance, longest: usize) -> Case {
    let (kv_heads, group) = (1 + chance.below(3), 1 + chance.below(3));
    let (batch, kv_len) = (1 + chance.below(2), 1 + chance.below(longest));
    let q_len = if chance.below(3) == 0 { 1 + chance.below(longest) } else { kv_len };
    let dim = chance.of(&[8, 16, 24]);
    let problem = OracleProblem {
        batch,
        q_len,
        kv_len,
        q_heads: kv_heads * group,
        kv_heads,
        head_dim: dim,
        scale: 1.0 / (dim as f64).sqrt(),
        softcap: None,
        mask: mask(chance, batch, kv_len),
        q_offset: chance.below(9) as u64,
        sinks: if chance.below(3) == 0 { vec![0.5; kv_heads * group] } else { vec![] },
    };
    let pairs = (chance.below(4) == 0).then(|| CasePairs {
        bias: chance.below(2) == 0,
        batch: chance.of(&[1, batch]),
        heads: chance.of(&[1, kv_heads * group]),
        shared_rows: chance.below(2) == 0,
        stand_in: false,
    });
    Case { name: "drawn", seed: chance.below(1 << 20) as u64, problem, poison: Vec::new(), pairs }
}

/// One mask for all batch entries, or one for each.
fn mask(chance: &mut Chance, batch: usize, seq: usize) -> OracleMask {
    if chance.below(3) > 0 {
        return one_mask(chance, seq);
    }
    OracleMask::full().and(OracleTerm::Entries((0..batch).map(|_| one_mask(chance, seq)).collect()))
}

fn one_mask(chance: &mut Chance, seq: usize) -> OracleMask {
    let mut at = |end: usize| chance.below(end + 1) as u64;
    let seq_end = seq as u64;
    let terms = match at(6) {
        0 => vec![],
        1 | 2 => vec![OracleTerm::Causal],
        3 => vec![OracleTerm::Window { left: at(seq) as i64, right: at(seq) as i64 - 1 }],
        4 => vec![OracleTerm::Causal, OracleTerm::Documents(vec![0, at(seq), seq_end])],
        5 => vec![OracleTerm::Valid(vec![at(seq)])],
        _ => {
            let (a, b) = (at(seq), at(seq));
            let slice = |q, k, causal| OracleSlice { q, k, causal, inverse: false };
            vec![OracleTerm::Slices(vec![
                slice(0..200, 0..a.min(b) / 2, false),
                slice(0..200, a.max(b)..seq_end, true),
            ])]
        }
    };
    terms.into_iter().fold(OracleMask::full(), OracleMask::and)
}

/// A ring of two to six ranks for a case. Some ranks may have no tokens.
pub fn world(chance: &mut Chance, case: &Case, dtype: Dtype, with_wire: bool) -> World {
    let ranks = 2 + chance.below(5) as u32;
    let strategy = chance.of(&ROUNDS);
    let kind = chance.of(&PlacementKind::ALL);
    let wire = if chance.below(2) == 0 && with_wire { WireFormat::Int8 } else { WireFormat::Same };
    let split = match chance.below(2) {
        0 => Split::Even,
        _ => Split::Weights((0..ranks).map(|rank| f64::from(rank == 0) + chance.below(4) as f64).collect()),
    };
    let end = case.problem.kv_len as u32;
    let replicated = match chance.below(5) {
        0 => {
            let (a, b) = (chance.below(end as usize + 1) as u32, chance.below(end as usize + 1) as u32);
            a.min(b)..a.max(b)
        }
        _ => 0..0,
    };
    let problem = problem_of(case, dtype).with_wire(wire).unwrap().with_replicated(replicated).unwrap();
    let mesh = Mesh::new(1, ranks).unwrap();
    let world = plan_world(&problem, mesh, kind, &split, strategy).unwrap();
    if !case.seed.is_multiple_of(3) {
        return world;
    }
    // The same ring over token lists that no dealer made.
    let mut random = Random(case.seed);
    let q = any_placement(mesh, problem.q_len, 0..0, &mut random);
    let kv = any_placement(mesh, problem.kv_len, problem.replicated.clone(), &mut random);
    plan_placed(&problem, mesh, q, kv, strategy).unwrap()
}
