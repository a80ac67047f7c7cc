//! The record of a cache, held to plain lists.

use super::*;

fn runs(tokens: impl IntoIterator<Item = u32>) -> TokenRuns {
    TokenRuns::from_positions(tokens)
}

fn list(tokens: &TokenRuns) -> Vec<u32> {
    tokens.iter().collect()
}

#[test]
fn tokens_that_all_ranks_pass_go_in_blocks_to_the_rank_with_the_fewest_for_its_share() {
    let mut held = Holdings::new([(100, 1.0), (100, 2.0), (3, 1.0)]);
    let mut owners = Vec::new();
    for _ in 0..16 {
        let own = held.share_out(1, 2).unwrap();
        owners.push(own.iter().position(|tokens| !tokens.is_empty()).unwrap());
        held.append(&own);
    }
    // Rank 2 is full after three tokens, in the middle of a block.
    assert_eq!(owners, [0, 0, 1, 1, 2, 2, 1, 1, 0, 0, 1, 1, 2, 1, 1, 0]);
    let own = held.share_out(5, 2).unwrap();
    assert_eq!(own.iter().map(TokenRuns::len).sum::<usize>(), 5);
    let mut full = Holdings::new([(2, 1.0), (3, 1.0)]);
    assert_eq!(full.clone().share_out(6, 4), None);
    let own = full.share_out(5, 4).unwrap();
    assert_eq!(own.iter().map(list).collect::<Vec<_>>(), [vec![0, 1], vec![2, 3, 4]]);
}

#[test]
fn dropped_rows_are_used_again_and_get_numbers_that_no_query_sees() {
    let mut held = Holdings::new([(8, 1.0), (8, 1.0)]);
    held.append(&[runs([0, 1, 4, 5]), runs([2, 3])]);
    assert_eq!((held.len(), held.used(Rank(0)), held.used(Rank(1))), (6, 4, 2));
    held.drop_before(3);
    assert_eq!(held.live(), 3..6);
    // Rank 0 has nothing in its first two rows, rank 1 in its first one.
    let (keys, total) = held.keys();
    assert_eq!((keys.iter().map(list).collect::<Vec<_>>(), total), (vec![vec![3, 4, 1, 2], vec![5, 0]], 6));
    assert_eq!(held.next_rows(Rank(0), 3), [0..2, 4..5]);
    held.append(&[runs([0, 1, 2]), runs([])]);
    assert_eq!(list(&held.tokens(Rank(0))), [6, 7, 4, 5, 8]);
    held.truncate(7);
    assert_eq!((list(&held.tokens(Rank(0))), held.used(Rank(0))), (vec![6, 4, 5], 4));
    held.truncate(4);
    assert_eq!((held.live(), held.used(Rank(0)), list(&held.tokens(Rank(1)))), (3..4, 0, vec![3]));
}

#[test]
fn tokens_of_lost_ranks_are_missing_until_they_are_restored() {
    let mut held = Holdings::new([(8, 1.0), (8, 1.0), (8, 1.0)]);
    held.append(&[runs([0, 1]), runs([2, 3, 5]), runs([4, 6])]);
    let mut left = held.of_ranks(&[Rank(0), Rank(2)]);
    assert_eq!(list(left.missing()), [2, 3, 5]);
    assert_ne!(left.digest(), held.digest());
    let own = left.share_out(3, 1).unwrap();
    left.restore(&own);
    assert!(left.missing().is_empty());
    let mut all: Vec<u32> = left.ranks().flat_map(|rank| list(&left.tokens(rank))).collect();
    all.sort_unstable();
    assert_eq!(all, (0..7).collect::<Vec<_>>());
}

#[test]
fn a_record_agrees_with_a_plain_list_of_rows_after_any_steps() {
    let mut state = 1u64;
    let mut below = |bound: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((state >> 33) % u64::from(bound)).unwrap()
    };
    for _ in 0..200 {
        let mut held = Holdings::new([(60, 1.0), (60, 1.0)]);
        let mut plain: [Vec<Option<u32>>; 2] = Default::default();
        for _ in 0..30 {
            match below(4) {
                0 => held.truncate(held.live().end.saturating_sub(below(4)).max(held.live().start)),
                1 => held.drop_before(held.live().start + below(5)),
                _ => {
                    let count = below(6);
                    let owners: Vec<u32> = (0..count).map(|_| below(2)).collect();
                    let own =
                        [0, 1].map(|rank| runs((0..count).filter(|token| owners[*token as usize] == rank)));
                    for (rank, (rows, tokens)) in (0..).map(Rank).zip(plain.iter_mut().zip(&own)) {
                        let places: Vec<u32> =
                            held.next_rows(rank, tokens.len() as u32).into_iter().flatten().collect();
                        for (row, token) in places.into_iter().zip(tokens.iter()) {
                            rows.resize(rows.len().max(row as usize + 1), None);
                            assert_eq!(rows[row as usize], None, "a row that holds a token is overwritten");
                            rows[row as usize] = Some(held.len() + token);
                        }
                    }
                    held.append(&own);
                }
            }
            for rows in &mut plain {
                rows.iter_mut().for_each(|row| *row = row.filter(|token| held.live().contains(token)));
                rows.truncate(rows.iter().rposition(Option::is_some).map_or(0, |last| last + 1));
            }
            for (rank, rows) in (0..).map(Rank).zip(&plain) {
                assert_eq!(list(&held.tokens(rank)), rows.iter().flatten().copied().collect::<Vec<_>>());
                assert_eq!(held.used(rank) as usize, rows.len());
            }
            let (keys, total) = held.keys();
            let mut all: Vec<u32> = keys.iter().flat_map(TokenRuns::iter).collect();
            all.sort_unstable();
            assert_eq!(all, (0..total).collect::<Vec<_>>());
        }
    }
}
