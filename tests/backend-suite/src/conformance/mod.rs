//! The requirements on every backend, as claims.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kyklos::backend::{Backend, Control, DeviceClass, Extent, Layout};
use kyklos::{Dtype, Error, Mask, Mesh, PlacementKind, Split, Strategy, TokenRuns, plan_forward};
use kyklos_oracle::inputs::{Case, cases};

use self::states::{KEYS, OnDevice, attend_with, problem, read};
use crate::{Prepared, chosen_cases, dense_set, run_alone, run_together};

mod codes;
mod conversions;
mod gradients;
mod states;
mod values;

/// A claim and its check. Checks are futures: in a browser nothing may block.
pub type Check<B> = (&'static str, for<'a> fn(&'a B, &'a str) -> Pin<Box<dyn Future<Output = ()> + 'a>>);

/// All claims, in the order of a report.
pub fn checks<B: Backend>() -> Vec<Check<B>> {
    vec![
        ("agrees with the oracle on every case in f32", |backend, who| {
            Box::pin(dense_cases(backend, who, Dtype::F32))
        }),
        ("agrees with the oracle on every case in f16", |backend, who| {
            Box::pin(dense_cases(backend, who, Dtype::F16))
        }),
        ("agrees with the oracle on every case in bf16", |backend, who| {
            Box::pin(dense_cases(backend, who, Dtype::Bf16))
        }),
        ("agrees with the oracle on logits of any size", |backend, who| {
            Box::pin(values::logits_of_any_size(backend, who))
        }),
        ("gives the mean of the values where all logits are one huge number", |backend, who| {
            Box::pin(values::rows_of_huge_logits(backend, who))
        }),
        ("takes a scale of any size", |backend, who| Box::pin(values::scales_of_any_size(backend, who))),
        ("takes denormal elements", |backend, who| Box::pin(values::denormal_elements(backend, who))),
        ("gives a log-sum-exp as two numbers", |backend, who| {
            Box::pin(states::log_sum_exp_is_two_numbers(backend, who))
        }),
        ("carries a running state over a ring", |backend, who| Box::pin(on_mesh(backend, who, 1, 3))),
        ("swaps heads for tokens with an all-to-all", |backend, who| Box::pin(on_mesh(backend, who, 2, 1))),
        ("lets no hidden value reach a row", |backend, who| Box::pin(no_leaks(backend, who))),
        ("shows a NaN in a key to the rows that see it", |backend, who| Box::pin(nan_in_key(backend, who))),
        ("shows a NaN in a bias to the row that sees it", |backend, who| Box::pin(nan_in_bias(backend, who))),
        ("gives the same bytes every time", |backend, who| Box::pin(same_bytes(backend, who))),
        ("merges two states as if it had attended to both", |backend, who| {
            Box::pin(states::merge_is_attending_to_both(backend, who))
        }),
        ("computes results with the last block as it does afterwards", |backend, who| {
            Box::pin(states::results_come_with_the_last_block(backend, who))
        }),
        ("leaves the state of rows that see nothing alone", |backend, who| {
            Box::pin(states::unseen_rows_keep_their_state(backend, who))
        }),
        ("sums in a fixed order to the same bytes on any mesh, or refuses to", |backend, who| {
            Box::pin(crate::fixed_order::same_bytes_on_any_mesh(backend, who))
        }),
        ("downloads the bytes that were uploaded", |backend, who| Box::pin(bytes_come_back(backend, who))),
        ("copies exactly the given rows", |backend, who| Box::pin(repack_is_exact(backend, who))),
        ("converts as the definition says", |backend, who| Box::pin(conversions::both_ways(backend, who))),
        ("reports numbers beyond f16", |backend, who| Box::pin(conversions::reports(backend, who))),
        ("encodes int8 as the definition says", |backend, who| Box::pin(codes::codes(backend, who))),
        ("refuses more memory than there is", |backend, who| Box::pin(absurd_memory(backend, who))),
        ("stops when it is cancelled", |backend, who| Box::pin(cancel(backend, who))),
        ("agrees with the oracle on gradients in f32, or refuses them", |backend, who| {
            Box::pin(gradients::every_case(backend, who, Dtype::F32))
        }),
        ("agrees with the oracle on gradients in f16, or refuses them", |backend, who| {
            Box::pin(gradients::every_case(backend, who, Dtype::F16))
        }),
        ("agrees with the oracle on gradients in bf16, or refuses them", |backend, who| {
            Box::pin(gradients::every_case(backend, who, Dtype::Bf16))
        }),
        ("gives the same gradients every time", |backend, who| Box::pin(gradients::same_bytes(backend, who))),
        ("adds exactly the given rows, and clears", |backend, who| {
            Box::pin(gradients::accumulate_is_exact(backend, who))
        }),
        ("stops a backward pass when it is cancelled", |backend, who| {
            Box::pin(gradients::cancel(backend, who))
        }),
    ]
}

async fn dense_cases<B: Backend>(backend: &B, who: &str, dtype: Dtype) {
    // A software driver needs a second to compile a kernel. So each 16-bit type runs every second case,
    // and the two types run different cases. They differ from f32 only in the reading of elements.
    // The kernels' own tests check this at every head dim.
    let sparse = dtype != Dtype::F32 && backend.info().class == DeviceClass::SoftwareGpu;
    let (offset, step) = if sparse { (dtype as usize % 2, 2) } else { (0, 1) };
    for case in chosen_cases(backend.info()).skip(offset).step_by(step) {
        let prepared = Prepared::new(case, dtype);
        let whole = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
        prepared.judge(&whole, who).assert_within(&prepared.limit_on(backend));
    }
}

async fn on_mesh<B: Backend>(backend: &B, who: &str, ulysses: u32, ring: u32) {
    for dtype in Dtype::ALL {
        // Every third case, a different third for each dtype. The test above checks the arithmetic on all
        // cases.
        let offset = dtype as usize;
        for case in chosen_cases(backend.info()).skip(offset).step_by(3) {
            let prepared = Prepared::new(case, dtype);
            let ulysses = ulysses.min(prepared.problem.q_heads);
            let mesh = Mesh::new(ulysses, ring).unwrap();
            let set =
                plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified)
                    .unwrap();
            let alone = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
            let alone = prepared.judge(&alone, who);
            let together = run_together(backend, &set, &prepared).await;
            let together = prepared.judge(&together, &format!("{who} {mesh}"));
            together.assert_within(&prepared.parallel_limit_on(backend, &alone));
        }
    }
}

async fn no_leaks<B: Backend>(backend: &B, who: &str) {
    for dtype in Dtype::ALL {
        for poisoned in chosen_cases(backend.info()).filter(|case| !case.poison.is_empty()) {
            let unseen: Vec<_> =
                poisoned.problem.row_ids().into_iter().filter(|id| !poisoned.sees_poison(*id)).collect();
            let clean = Case {
                poison: Vec::new(),
                ..cases().into_iter().find(|case| case.name == poisoned.name).unwrap()
            };
            let name = poisoned.name;
            let (bad, good) = (Prepared::new(poisoned, dtype), Prepared::new(clean, dtype));
            let set = dense_set(&bad.problem);
            let with = run_alone(backend, &set, &bad).await;
            let without = run_alone(backend, &set, &good).await;
            let row_bytes = bad.problem.head_dim as usize * dtype.bytes();
            for id in unseen {
                let at = bad.oracle.o_index(id) * dtype.bytes();
                assert_eq!(
                    with.o[at..at + row_bytes],
                    without.o[at..at + row_bytes],
                    "{who} {dtype} {name}: {id:?} changed by what it cannot see"
                );
            }
        }
    }
}

async fn nan_in_key<B: Backend>(backend: &B, who: &str) {
    let dtype = Dtype::F32;
    let plain = chosen_cases(backend.info())
        .filter(|case| case.poison.is_empty() && case.bias.is_none() && case.problem.kv_len > 0);
    let (softcap, without): (Vec<_>, Vec<_>) = plain.partition(|case| case.problem.softcap.is_some());
    for case in softcap.into_iter().take(1).chain(without.into_iter().step_by(5)) {
        let name = case.name;
        let good = Prepared::new(case, dtype);
        let key = good.problem.kv_len as usize / 2;
        let key_bytes = good.problem.kv_heads as usize * good.problem.head_dim as usize * dtype.bytes();
        let mut stored = good.tensors.k.to_vec();
        stored[key * key_bytes..][..dtype.bytes()].fill(0xFF);
        let set = dense_set(&good.problem);
        let without = run_alone(backend, &set, &good).await;
        let mut bad = good;
        bad.tensors.k = stored.into();
        let with = run_alone(backend, &set, &bad).await;
        for id in bad.oracle.row_ids() {
            let from = bad.oracle.o_index(id) * dtype.bytes();
            let bytes = from..from + bad.problem.head_dim as usize * dtype.bytes();
            if (id.batch, bad.oracle.kv_head(id.head)) == (0, 0) && bad.oracle.sees(0, id.row, key) {
                let place = bad.oracle.lse_index(id);
                assert!(with.lse[place].is_nan(), "{who} {name}: lse of {id:?} is {}", with.lse[place]);
                let o: Vec<f32> = bytemuck::pod_collect_to_vec(&with.o[bytes]);
                assert!(o.iter().all(|x| x.is_nan()), "{who} {name}: {id:?} is {o:?}");
            } else {
                assert!(with.o[bytes.clone()] == without.o[bytes], "{who} {name}: {id:?} changed");
            }
        }
    }
}

async fn nan_in_bias<B: Backend>(backend: &B, who: &str) {
    // A software driver needs a second to compile a kernel, and dtypes differ only in the reading of a
    // bias.
    let few = backend.info().class == DeviceClass::SoftwareGpu;
    for dtype in Dtype::ALL {
        // Where all queries share a row, all of them see it.
        let own = |case: &Case| case.bias.is_some_and(|bias| bias.additive && !bias.shared_rows);
        let biased = |case: &Case| case.poison.is_empty() && own(case);
        let most = if few && dtype != Dtype::F32 { 1 } else { usize::MAX };
        for case in chosen_cases(backend.info()).filter(biased).take(most) {
            let name = case.name;
            let good = Prepared::new(case, dtype);
            let (problem, bias) = (&good.problem, good.problem.bias.unwrap());
            let row = problem.q_len as usize / 2;
            let Some(key) = (0..problem.kv_len as usize).rev().find(|key| good.oracle.sees(0, row, *key))
            else {
                continue;
            };
            let mut stored = good.tensors.bias.clone().unwrap().to_vec();
            let at = row * bias.heads as usize * bias.row_bytes(dtype, problem.kv_len) + key * dtype.bytes();
            // All bits set are a NaN in every type.
            stored[at..at + dtype.bytes()].fill(0xFF);
            let set = dense_set(problem);
            let without = run_alone(backend, &set, &good).await;
            let mut bad = good;
            bad.tensors.bias = Some(stored.into());
            let with = run_alone(backend, &set, &bad).await;
            for id in bad.oracle.row_ids() {
                let from = bad.oracle.o_index(id) * dtype.bytes();
                let bytes = from..from + bad.problem.head_dim as usize * dtype.bytes();
                if id.row != row {
                    assert!(
                        with.o[bytes.clone()] == without.o[bytes],
                        "{who} {dtype} {name}: {id:?} changed"
                    );
                } else if (id.batch, id.head) == (0, 0) {
                    assert!(
                        with.o[bytes.clone()] != without.o[bytes],
                        "{who} {dtype} {name}: {id:?} hides it"
                    );
                    let place = id.head * bad.problem.q_len as usize + row;
                    assert!(with.lse[place].is_nan(), "{who} {dtype} {name}: lse of {id:?}");
                }
            }
        }
    }
}

async fn same_bytes<B: Backend>(backend: &B, who: &str) {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let set = dense_set(&prepared.problem);
    let first = run_alone(backend, &set, &prepared).await;
    for _ in 0..3 {
        let again = run_alone(backend, &set, &prepared).await;
        assert!(first.o == again.o && first.lse == again.lse, "{who}");
    }
}

async fn bytes_come_back<B: Backend>(backend: &B, who: &str) {
    for size in [0usize, 4, 16, 100, 4096, 1 << 20] {
        let data = Bytes::from((0..size).map(|i| (i * 7 % 251) as u8).collect::<Vec<_>>());
        let mut buffer = backend.upload("data", data.clone()).unwrap();
        assert_eq!(read(backend, &mut buffer, 0..size).await, data, "{who}: {size} bytes");
        // Downloaded bytes do not change when the buffer changes afterwards.
        let kept = read(backend, &mut buffer, 0..size).await;
        if size >= 16 {
            assert_eq!(
                read(backend, &mut buffer, 4..12).await,
                data[4..12],
                "{who}: the middle of {size} bytes"
            );
            backend.write(&mut buffer, 8, &[0xAB; 4]).unwrap();
            let mut expected = data.to_vec();
            expected[8..12].fill(0xAB);
            assert_eq!(
                read(backend, &mut buffer, 0..size).await,
                expected,
                "{who}: a write into {size} bytes"
            );
            assert_eq!(kept, data, "{who}: a download of {size} bytes");
        }
        let mut fresh = backend.alloc("fresh", size).unwrap();
        backend.write(&mut fresh, 0, &data).unwrap();
        assert_eq!(read(backend, &mut fresh, 0..size).await, data, "{who}: written {size} bytes");
    }
}

async fn repack_is_exact<B: Backend>(backend: &B, who: &str) {
    // A 2 x 5 x 3 window of rows of 24 bytes, from one layout to another; everything else stays poison.
    let extent = Extent { batch: 2, rows: 5, heads: 3, row_bytes: 24 };
    let from = Layout { offset: 48, batch_stride: 1200, row_stride: 120, head_stride: 24 };
    let into = Layout { offset: 24, batch_stride: 1440, row_stride: 240, head_stride: 48 };
    let source: Vec<u8> = (0..2400usize).map(|i| (i % 251) as u8).collect();
    let mut expected = vec![0xEE; 2880];
    for batch in 0..2 {
        for row in 0..5 {
            for head in 0..3 {
                let at = |layout: Layout| {
                    layout.offset
                        + batch * layout.batch_stride
                        + row * layout.row_stride
                        + head * layout.head_stride
                };
                expected[at(into)..at(into) + 24].copy_from_slice(&source[at(from)..at(from) + 24]);
            }
        }
    }
    let source = backend.upload("source", Bytes::from(source)).unwrap();
    let mut target = backend.upload("target", Bytes::from(vec![0xEE; 2880])).unwrap();
    backend.repack((&source, from), (&mut target, into), extent).unwrap();
    let copied = read(backend, &mut target, 0..2880).await;
    assert!(copied == expected, "{who}");
}

async fn absurd_memory<B: Backend>(backend: &B, who: &str) {
    // A smaller size on machines with 32-bit addresses.
    for bytes in [usize::try_from(1_u64 << 46).unwrap_or(3 << 30), usize::MAX & !3] {
        match backend.alloc("absurd", bytes) {
            Err(Error::OutOfMemory { asked_bytes, .. }) => assert_eq!(asked_bytes, bytes as u64, "{who}"),
            Err(other) => panic!("{who}: {other}"),
            Ok(_) => panic!("{who}: {bytes} bytes were given"),
        }
    }
    // The backend still works afterwards.
    bytes_come_back(backend, who).await;
}

async fn cancel<B: Backend>(backend: &B, who: &str) {
    let control = Control::new(Arc::new(AtomicBool::new(true)));
    let mut state = OnDevice::empty(backend);
    let keys = TokenRuns::contiguous(0..KEYS as u32);
    let result = attend_with(backend, &problem(Mask::full()), keys, &mut state, None, &control).await;
    assert_eq!(result, Err(Error::Cancelled), "{who}");
    assert!(control.pieces_done() > 0, "{who}");
}
