use super::*;

fn of(len: u32, lists: &[&TokenRuns]) -> MetKeys {
    let mut met = MetKeys::none(len);
    assert!(lists.iter().all(|list| met.meet(list).is_none()));
    met
}

fn stride(start: u32, count: u32, stride: u32) -> TokenRuns {
    let mut keys = TokenRuns::default();
    keys.push(Run { start, count, stride });
    keys
}

#[test]
fn gaps_are_what_was_not_met() {
    // Ranges that touch and do not, out of order, and keys in strides.
    let mut runs = TokenRuns::contiguous(0..515);
    runs.extend(&stride(1000, 40, 3));
    runs.extend(&TokenRuns::contiguous(2000..2001));
    runs.extend(&TokenRuns::contiguous(1500..1700));
    let gaps = of(2100, &[&runs]).gaps();
    let there: Vec<u32> = runs.iter().collect();
    for lo in (0..2100).step_by(7) {
        for hi in (lo..2100).step_by(31) {
            let expected = (lo..hi).find(|key| !there.contains(key));
            assert_eq!(gaps.first_in(lo..hi), expected, "{lo}..{hi}");
        }
    }
    assert!(!gaps.are_none() && !of(1, &[]).gaps().are_none());
    assert!(of(7, &[&TokenRuns::contiguous(0..7)]).gaps().are_none());
}

#[test]
fn a_key_that_is_met_twice_is_found() {
    let some = TokenRuns::contiguous(10..20);
    for (again, expected) in [
        (TokenRuns::contiguous(0..10), None),
        (TokenRuns::contiguous(20..30), None),
        (TokenRuns::contiguous(5..11), Some(10)),
        (TokenRuns::contiguous(19..25), Some(19)),
        (TokenRuns::from_positions([1, 4, 7, 10, 13]), Some(10)),
        (TokenRuns::from_positions([3, 3]), Some(3)),
    ] {
        let mut met = of(30, &[&some]);
        assert_eq!(met.meet(&again), expected, "{again}");
    }
    let (more, even) = (TokenRuns::contiguous(20..25), TokenRuns::contiguous(25..30));
    for other in [&[&more][..], &[&more, &even]] {
        let mut a = of(30, &[&some]);
        assert_eq!((a.merge(of(30, other)), a.merge(of(30, other))), (None, Some(20)));
        assert_eq!(a.gaps().first_in(10..25), None);
    }
    assert!(of(30, &[&some]).are(&some) && !of(30, &[&some]).are(&more));
    assert!(!of(30, &[&some, &more]).are(&some) && !of(30, &[&some]).are(&TokenRuns::contiguous(10..25)));
    assert!(of(30, &[&some, &more]).are(&TokenRuns::contiguous(10..25)));
    assert!(!of(30, &[&some]).are(&TokenRuns::from_positions((10..20).chain([15]))));
    assert!(!of(20, &[&some]).are(&TokenRuns::contiguous(10..21)));
    assert!(
        [30, 31, 61].map(|end| of(30, &[]).exist(&TokenRuns::contiguous(9..end))) == [true, false, false]
    );
    assert_eq!(of(30, &[&some, &even]).keys(), TokenRuns::from_positions((10..20).chain(25..30)));
}

#[test]
fn places_are_an_order_of_the_keys() {
    for (len, stride) in (1..40).flat_map(|len| (1..=len + 2).map(move |stride| (len, stride))) {
        let order = Order { len, stride };
        let keys = (0..stride).flat_map(|first| (first..len).step_by(stride as usize));
        for (place, key) in (0..).zip(keys) {
            assert_eq!(order.place(key), place, "{key} of {order:?}");
            let run = order.run(place..len);
            let last = key + (len - 1 - key) / stride * stride;
            assert_eq!((run.start, run.last(), run.stride), (key, last, stride), "{order:?}");
        }
        assert_eq!(order.column(stride), len);
    }
}

/// Neighbours have few ranges together, and all have one.
#[test]
fn the_shards_of_each_placement_are_few_ranges() {
    let striped = |r: u32| stride(r, if r < 4 { 101 } else { 100 }, 10);
    let zigzag =
        |r: u32| TokenRuns::from_positions((r * 50..(r + 1) * 50).chain((19 - r) * 50..(20 - r) * 50));
    for (len, most, shard) in [(1004, 1, &striped as &dyn Fn(u32) -> TokenRuns), (1000, 2, &zigzag)] {
        let mut met = MetKeys::none(len);
        for r in (3..10).chain(0..3) {
            assert_eq!(met.meet(&shard(r)), None);
            assert!(met.ranges.len() <= 2 * most, "{:?}", met.ranges);
        }
        assert_eq!(met.ranges.len(), 1);
        assert!(met.gaps().are_none() && met.are(&TokenRuns::contiguous(0..len)));
        assert_eq!(met.meet(&TokenRuns::contiguous(777..778)), Some(777));
        // A set of all keys, in the other order.
        let all = of(len, &[&TokenRuns::contiguous(0..len)]);
        assert!(all.without(&met).keys().is_empty() && met.without(&all).keys().is_empty());
    }
    // Keys of every rank beside the shards.
    let mut met = of(1004, &[&TokenRuns::contiguous(0..500)]);
    for r in 0..10 {
        assert_eq!(met.meet(&stride(500 + r, if r < 4 { 51 } else { 50 }, 10)), None);
        assert!(met.ranges.len() <= 10 && met.order.stride == 10, "{:?}", met.ranges);
    }
    assert!(met.gaps().are_none());
}

/// Sets that are made of runs of all strides are those of a list of bits.
#[test]
fn sets_of_any_runs_are_those_of_their_keys() {
    let mut state = 5u32;
    let mut below = |bound: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % bound
    };
    let (mut twice, mut strides, mut bits) = (0, 0, 0);
    for round in 0..4000 {
        let len = 20 + below(120);
        let mut sets = [0, 1].map(|_| (MetKeys::none(len), vec![false; len as usize]));
        for (met, model) in &mut sets {
            for _ in 0..below(4) {
                let mut list = TokenRuns::default();
                for _ in 0..1 + below(3) {
                    let (start, of) = (below(len), [1, 2, 3, 4, 6, 9][below(6) as usize]);
                    let count = 1 + below((len - start).div_ceil(of).min(9));
                    list.push(Run { start, count, stride: of });
                }
                let mut again = Vec::new();
                for key in list.iter() {
                    if std::mem::replace(&mut model[key as usize], true) {
                        again.push(key);
                    }
                }
                match met.meet(&list) {
                    Some(key) => assert!(again.contains(&key), "{round}: {key}, {again:?}"),
                    None => assert!(again.is_empty(), "{round}"),
                }
            }
            strides += u32::from(met.order.stride > 1);
            bits += u32::from(!met.bits.is_empty());
            assert!(met.bits.is_empty() || met.ranges.is_empty());
            assert!(met.ranges.len() as u64 <= met.order.most());
        }
        let keys = |model: &[bool]| TokenRuns::from_positions((0..len).filter(|key| model[*key as usize]));
        for (met, model) in &sets {
            assert!(met.ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", met.ranges);
            assert!(met.keys() == keys(model) && met.are(&keys(model)), "{round}");
            for key in 0..len {
                let (gap, mut other) = (met.gaps().first_in(key..len), model.clone());
                assert_eq!(gap, (key..len).find(|key| !model[*key as usize]), "{round}");
                other[key as usize] ^= true;
                assert!(!met.are(&keys(&other)), "{round}: {key}");
            }
        }
        let [(mut a, of_a), (b, of_b)] = sets;
        let both = |op: fn(bool, bool) -> bool| -> Vec<bool> {
            of_a.iter().zip(&of_b).map(|(a, b)| op(*a, *b)).collect()
        };
        let (left, common) = (both(|a, b| a & !b), both(|a, b| a & b));
        assert_eq!(a.without(&b).keys(), keys(&left), "{round}");
        match a.merge(b) {
            Some(key) => assert!(common[key as usize], "{round}: {key}"),
            None => assert!(!common.contains(&true), "{round}"),
        }
        assert_eq!(a.keys(), keys(&both(|a, b| a | b)), "{round}");
        twice += u32::from(common.contains(&true));
    }
    assert!((1000..3000).contains(&twice) && strides > 1000 && bits > 1000, "{twice} {strides} {bits}");
}

/// Stripes of several strides, as of ranks with shares of many sizes.
#[test]
fn sets_of_many_ranges_are_bits() {
    // Rank r has a key of each round of its first 20 * (r + 1) rounds.
    let ranks = 10;
    let mut shards = vec![TokenRuns::default(); ranks as usize];
    let mut next = 0;
    for phase in 0..ranks {
        for r in phase..ranks {
            let first = next + r - phase;
            shards[r as usize].push(Run { start: first, count: 20, stride: ranks - phase });
        }
        next += 20 * (ranks - phase);
    }
    let met = of(next, &shards.iter().collect::<Vec<_>>());
    assert!(!met.bits.is_empty() && met.gaps().are_none() && met.are(&TokenRuns::contiguous(0..next)));
    let mut all_but_one = of(next, &shards[1..].iter().collect::<Vec<_>>());
    assert_eq!(all_but_one.gaps().first_in(0..next), Some(0));
    assert_eq!(
        (met.without(&all_but_one).keys(), all_but_one.without(&met).keys().len()),
        (shards[0].clone(), 0)
    );
    assert_eq!((all_but_one.meet(&shards[9]), all_but_one.meet(&shards[0])), (Some(9), None));
    assert_eq!(all_but_one.merge(met), Some(0));
}
