//! The owners that dealers give to queries and to keys: the same owner for both of a token of joint
//! attention, unless the split says otherwise, and counts for each side.

use crate::plan_properties::Random;
use kyklos::plan::check;
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, Placement, PlacementKind, Split, Strategy, TokenRuns, deal_tokens,
    plan_forward, plan_placed,
};

#[test]
fn tokens_of_joint_attention_have_one_owner_for_query_and_key() {
    let owner = |placement: &Placement, token: u32| {
        let has = |tokens: &TokenRuns| tokens.iter().any(|other| other == token);
        placement.ranks().iter().position(has)
    };
    let mut chance = Random(5);
    for seq in [1, 7, 100, 103] {
        for mask in ["full", "causal", "causal+documents:0,SEQ"] {
            let mask: Mask = mask.replace("SEQ", &seq.to_string()).parse().unwrap();
            for (ulysses, ring) in [(1, 1), (1, 4), (2, 2), (3, 1)] {
                let mesh = Mesh::new(ulysses, ring).unwrap();
                let a = chance.below(seq + 1);
                for replicated in [0..seq / 5, a..seq, a / 2..a, 0..seq] {
                    let problem = AttentionProblem::new([1, seq, 4, 4, 8], Dtype::F32, mask.clone()).unwrap();
                    let problem = problem.with_replicated(replicated).unwrap();
                    let weights: Vec<f64> =
                        (0..mesh.size()).map(|rank| f64::from(rank % 3 + u32::from(rank == 0))).collect();
                    let mut counts: Vec<u32> = (0..mesh.size()).map(|_| 0).collect();
                    (0..seq).for_each(|_| counts[chance.below(mesh.size()) as usize] += 1);
                    let splits = [
                        Split::Even,
                        Split::Weights(weights.clone()),
                        Split::Work(weights),
                        Split::Tokens(counts.clone()),
                    ];
                    for (kind, split) in PlacementKind::ALL
                        .into_iter()
                        .flat_map(|kind| splits.iter().map(move |split| (kind, split)))
                    {
                        let who = format!(
                            "{seq} {} {kind} {split:?} {mesh} {:?}",
                            problem.mask, problem.replicated
                        );
                        let (q, kv) = deal_tokens(&problem, mesh, kind, split).unwrap();
                        let set = plan_placed(&problem, mesh, q.clone(), kv.clone(), Strategy::Unified);
                        check(&set.unwrap()).unwrap_or_else(|error| panic!("{who}: {error}"));
                        for token in (0..seq).filter(|token| !problem.replicated.contains(token)) {
                            assert_eq!(owner(&q, token), owner(&kv, token), "token {token}, {who}");
                        }
                        let sizes: Vec<u32> = q.ranks().iter().map(|tokens| tokens.len() as u32).collect();
                        match split {
                            Split::Even => {
                                assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1)
                            }
                            Split::Tokens(counts) => assert_eq!(sizes, *counts, "{who}"),
                            _ => {}
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn work_stays_level_where_the_queries_of_replicated_tokens_are_dealt_apart() {
    for mask in ["full", "causal", "causal+documents:0,900,1000,3000"] {
        let problem = AttentionProblem::new([1, 3000, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
        let problem = problem.with_replicated(500..1400).unwrap();
        let mesh = Mesh::new(1, 3).unwrap();
        for kind in PlacementKind::ALL {
            let (q, _) = deal_tokens(&problem, mesh, kind, &Split::Work(vec![2.0, 1.0, 1.0])).unwrap();
            let keys = |token: u32| problem.mask.visible(0, token, 3000).keys() as f64;
            let work: Vec<f64> = q.ranks().iter().map(|tokens| tokens.iter().map(keys).sum()).collect();
            let all: f64 = work.iter().sum();
            let shares = [work[0] / all / 0.5, work[1] / all / 0.25, work[2] / all / 0.25];
            assert!(shares.iter().all(|share| (0.98..1.02).contains(share)), "{mask} {kind}: {shares:?}");
        }
    }
}

#[test]
fn queries_and_keys_have_the_counts_of_their_own_sides() {
    let mesh = Mesh::new(1, 3).unwrap();
    let separate = |queries: Vec<u32>, keys: Vec<u32>| Split::Separate {
        queries: Box::new(Split::Tokens(queries)),
        keys: Box::new(Split::Tokens(keys)),
    };
    let sizes = |placement: &Placement| placement.ranks().iter().map(TokenRuns::len).collect::<Vec<_>>();
    let joint = AttentionProblem::new([1, 30, 2, 2, 8], Dtype::F32, Mask::causal()).unwrap();
    let cross = joint.clone().with_queries(4, 26).unwrap();
    let prompt = joint.clone().with_replicated(5..15).unwrap();
    for (problem, queries, keys) in [
        (&cross, vec![0, 1, 3], vec![20, 0, 10]),
        (&joint, vec![0, 1, 29], vec![20, 0, 10]),
        (&joint, vec![9, 1, 20], vec![9, 1, 20]),
        // More queries than keys on each rank: the same owner for both. Fewer: other owners.
        (&prompt, vec![9, 1, 20], vec![9, 0, 11]),
        (&prompt, vec![30, 0, 0], vec![0, 9, 11]),
    ] {
        for kind in PlacementKind::ALL {
            let split = separate(queries.clone(), keys.clone());
            let set = plan_forward(problem, mesh, kind, &split, Strategy::Ring).unwrap();
            check(&set).unwrap();
            assert_eq!(sizes(&set.q_placement), queries.iter().map(|n| *n as usize).collect::<Vec<_>>());
            assert_eq!(sizes(&set.kv_placement), keys.iter().map(|n| *n as usize).collect::<Vec<_>>());
        }
    }
    for (queries, keys, says) in [
        (vec![1, 1, 1], vec![20, 0, 10], "the query counts add up to 3, there are 4 queries"),
        (vec![1, 1, 2], vec![20, 0, 11], "the key counts add up to 31, there are 30 keys to deal"),
        (vec![2, 2], vec![20, 0, 10], "2 query counts for 3 ranks"),
        (vec![2, 2, 0], vec![30], "1 key counts for 3 ranks"),
    ] {
        let split = separate(queries, keys);
        let error =
            plan_forward(&cross, mesh, PlacementKind::Contiguous, &split, Strategy::Ring).unwrap_err();
        assert!(error.is_request() && error.to_string().starts_with(says), "{error}");
    }
}
