//! Running states: merges, and rows that see no key.

use std::ops::Range;

use bytes::Bytes;
use kyklos::backend::{
    Attend, Backend, Control, EMPTY_M, Layout, Operand, Results, State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, BlockWork, Dtype, Error, Mask, TokenRuns};
use kyklos_oracle::inputs::{TensorId, fill};

pub(super) const SHAPE: StateShape = StateShape { batch: 2, rows: 37, heads: 4, dim: 24 };
pub(super) const KEYS: usize = 53;
const KV_HEADS: usize = 2;

/// A state of [`SHAPE`] on a device.
pub(super) struct OnDevice<B: Backend> {
    a: B::Buffer,
    ml: B::Buffer,
}

impl<B: Backend> OnDevice<B> {
    pub(super) fn empty(backend: &B) -> Self {
        let poison = |bytes| backend.upload("state", Bytes::from(vec![0xFF; bytes])).unwrap();
        let mut state = Self { a: poison(SHAPE.a_bytes()), ml: poison(SHAPE.ml_bytes()) };
        backend.reset_state(&mut state.edit()).unwrap();
        state
    }

    fn edit(&mut self) -> StateMut<'_, B::Buffer> {
        StateMut { a: &mut self.a, ml: &mut self.ml, shape: SHAPE }
    }

    fn view(&self) -> State<'_, B::Buffer> {
        State { a: &self.a, ml: &self.ml, shape: SHAPE }
    }

    async fn floats(&mut self, backend: &B) -> (Vec<f32>, Vec<f32>) {
        (
            floats(backend, &mut self.a, SHAPE.a_bytes()).await,
            floats(backend, &mut self.ml, SHAPE.ml_bytes()).await,
        )
    }
}

pub(super) async fn read<B: Backend>(backend: &B, buffer: &mut B::Buffer, range: Range<usize>) -> Bytes {
    backend.download(buffer, range).await.unwrap()
}

pub(super) async fn floats<B: Backend>(backend: &B, buffer: &mut B::Buffer, bytes: usize) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&read(backend, buffer, 0..bytes).await)
}

pub(super) fn problem(mask: Mask) -> AttentionProblem {
    AttentionProblem::new([2, KEYS as u32, 4, KV_HEADS as u32, 24], Dtype::F32, mask)
        .and_then(|problem| problem.with_queries(SHAPE.rows as u32, 0))
        .unwrap()
}

pub(super) fn tensor(id: TensorId, elements: usize) -> Bytes {
    let mut values = vec![0f32; elements];
    fill(7, id, 0..elements as u64, &mut values);
    Bytes::copy_from_slice(bytemuck::cast_slice(&values))
}

/// Attends from all queries to the keys `keys`, into `state`.
pub(super) async fn attend<B: Backend>(
    backend: &B,
    problem: &AttentionProblem,
    keys: TokenRuns,
    state: &mut OnDevice<B>,
) -> Result<(), Error> {
    attend_with(backend, problem, keys, state, None, &Control::default()).await
}

pub(super) async fn attend_with<B: Backend>(
    backend: &B,
    problem: &AttentionProblem,
    keys: TokenRuns,
    state: &mut OnDevice<B>,
    results: Option<Results<'_, B::Buffer>>,
    control: &Control,
) -> Result<(), Error> {
    let q = backend.upload("q", tensor(TensorId::Q, 2 * SHAPE.rows * 4 * 24))?;
    let (k, v) = (
        backend.upload("k", tensor(TensorId::K, 2 * KEYS * KV_HEADS * 24))?,
        backend.upload("v", tensor(TensorId::V, 2 * KEYS * KV_HEADS * 24))?,
    );
    let work = &BlockWork::layers(
        problem,
        &TokenRuns::contiguous(0..SHAPE.rows as u32),
        &keys,
        backend.tile_shape(problem, SHAPE),
    )[0];
    // The keys are in the middle of the whole tensor: offset and strides differ from the ones of a
    // dense block.
    let first = keys.iter().next().unwrap_or(0) as usize;
    let layout = |tokens: usize, heads: usize, first: usize| Layout {
        offset: first * heads * 24,
        batch_stride: tokens * heads * 24,
        row_stride: heads * 24,
        head_stride: 24,
    };
    let args = Attend {
        dtype: Dtype::F32,
        scale: problem.scale,
        softcap: None,
        q: Operand { buffer: &q, layout: layout(SHAPE.rows, 4, 0) },
        k: Operand { buffer: &k, layout: layout(KEYS, KV_HEADS, first) },
        v: Operand { buffer: &v, layout: layout(KEYS, KV_HEADS, first) },
        kv_head_of: &[0, 0, 1, 1],
        work,
        bias: None,
        fixed_order: false,
        inference: true,
        state: state.edit(),
    };
    match results {
        None => backend.attend(args, control).await?,
        Some(results) => backend.attend_and_finalize(args, results, control).await?,
    }
    backend.wait().await
}

pub(super) fn close(a: &[f32], b: &[f32], what: &str) {
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{what} {index}: {a} and {b}");
    }
}

const ROWS: usize = SHAPE.batch * SHAPE.rows * SHAPE.heads;

/// Output and lse of a state: equal for equivalent states with different m.
async fn finalized<B: Backend>(backend: &B, state: &OnDevice<B>) -> (Vec<f32>, Vec<f32>) {
    finalized_with(backend, state, &[]).await
}

async fn finalized_with<B: Backend>(backend: &B, state: &OnDevice<B>, sinks: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut o, mut lse) = poisoned_results(backend);
    backend.finalize(&state.view(), sinks, Dtype::F32, &mut o, &mut lse).unwrap();
    (floats(backend, &mut o, ROWS * SHAPE.dim * 4).await, rounded(backend, &mut lse).await)
}

/// The log-sum-exps without their rests.
async fn rounded<B: Backend>(backend: &B, lse: &mut B::Buffer) -> Vec<f32> {
    floats(backend, lse, SHAPE.lse_bytes()).await.into_iter().step_by(2).collect()
}

fn poisoned_results<B: Backend>(backend: &B) -> (B::Buffer, B::Buffer) {
    let poison = |bytes: usize| backend.upload("output", Bytes::from(vec![0xFF; bytes])).unwrap();
    (poison(ROWS * SHAPE.dim * 4), poison(SHAPE.lse_bytes()))
}

/// Of a state with one block, and of one with two. The first rows see no key of the last block.
pub(super) async fn results_come_with_the_last_block<B: Backend>(backend: &B, who: &str) {
    let problem = problem(Mask::causal());
    let blocks = [TokenRuns::contiguous(0..20), TokenRuns::contiguous(20..KEYS as u32)];
    let mut different = std::collections::HashSet::new();
    for (sinks, before) in [(&[][..], 0), (&[0.5, -1.0, 3.0, 0.0], 0), (&[], 1), (&[0.5, -1.0, 3.0, 0.0], 1)]
    {
        let mut state = OnDevice::empty(backend);
        for keys in &blocks[..before] {
            attend(backend, &problem, keys.clone(), &mut state).await.unwrap();
        }
        let (mut o, mut lse) = poisoned_results(backend);
        let results = Results { sinks, o: &mut o, lse: &mut lse };
        let (last, control) = (blocks[before].clone(), Control::default());
        attend_with(backend, &problem, last, &mut state, Some(results), &control).await.unwrap();
        let o = floats(backend, &mut o, ROWS * SHAPE.dim * 4).await;
        let lse = rounded(backend, &mut lse).await;

        let mut whole = OnDevice::empty(backend);
        for keys in &blocks[..=before] {
            attend(backend, &problem, keys.clone(), &mut whole).await.unwrap();
        }
        let (expected_o, expected_lse) = finalized_with(backend, &whole, sinks).await;
        close(&o, &expected_o, &format!("{who} o, {before} blocks before"));
        close(&lse, &expected_lse, &format!("{who} lse, {before} blocks before"));
        different.insert(lse.iter().map(|lse| lse.to_bits()).collect::<Vec<_>>());
    }
    assert_eq!(different.len(), 4, "{who}: keys or sinks change nothing");
}

pub(super) async fn merge_is_attending_to_both<B: Backend>(backend: &B, who: &str) {
    let problem = problem(Mask::causal());
    let blocks = [TokenRuns::contiguous(0..20), TokenRuns::contiguous(20..KEYS as u32)];
    let mut both = OnDevice::empty(backend);
    let mut parts = Vec::new();
    for keys in blocks {
        attend(backend, &problem, keys.clone(), &mut both).await.unwrap();
        let mut part = OnDevice::empty(backend);
        attend(backend, &problem, keys, &mut part).await.unwrap();
        parts.push(part);
    }
    let (mut last, mut first) = (parts.pop().unwrap(), parts.pop().unwrap());
    let (_, lse_of_first) = finalized(backend, &first).await;
    backend.merge(&mut first.edit(), &last.view()).unwrap();
    let (o, lse) = finalized(backend, &first).await;
    let (expected_o, expected_lse) = finalized(backend, &both).await;
    close(&o, &expected_o, &format!("{who} o"));
    close(&lse, &expected_lse, &format!("{who} lse"));
    assert!(lse != lse_of_first, "{who}: a merge that changes nothing");

    // An empty state changes nothing, on either side.
    let mut empty = OnDevice::empty(backend);
    backend.merge(&mut empty.edit(), &last.view()).unwrap();
    assert_eq!(empty.floats(backend).await, last.floats(backend).await, "{who}: into an empty state");
    let before = last.floats(backend).await;
    backend.merge(&mut last.edit(), &OnDevice::empty(backend).view()).unwrap();
    assert_eq!(last.floats(backend).await, before, "{who}: from an empty state");

    // The sign of a zero in a state depends on the merge. It must not affect the output.
    let zeros = vec![-0.0_f32; SHAPE.a_bytes() / 4];
    backend.write(&mut last.a, 0, bytemuck::cast_slice(&zeros)).unwrap();
    let (o, _) = finalized(backend, &last).await;
    assert!(o.iter().all(|x| x.to_bits() == 0), "{who}: a zero with a sign");
}

pub(super) async fn unseen_rows_keep_their_state<B: Backend>(backend: &B, who: &str) {
    // Keys from 20 on: rows below 20 see none of them.
    let problem = problem(Mask::causal());
    let mut state = OnDevice::empty(backend);
    attend(backend, &problem, TokenRuns::contiguous(0..20), &mut state).await.unwrap();
    let (a, ml) = state.floats(backend).await;
    attend(backend, &problem, TokenRuns::contiguous(20..KEYS as u32), &mut state).await.unwrap();
    let (later_a, later_ml) = state.floats(backend).await;
    for batch in 0..SHAPE.batch {
        for row in 0..SHAPE.rows {
            for head in 0..SHAPE.heads {
                let at = ((batch * SHAPE.rows + row) * SHAPE.heads + head) * SHAPE.dim;
                let kept = a[at..at + SHAPE.dim] == later_a[at..at + SHAPE.dim];
                assert_eq!(kept, row < 20, "{who}: row {row} head {head}");
                let at = ((batch * SHAPE.heads + head) * SHAPE.rows + row) * 2;
                assert_eq!(ml[at..at + 2] == later_ml[at..at + 2], row < 20, "{who}: row {row} head {head}");
            }
        }
    }
    let (a, ml) = OnDevice::empty(backend).floats(backend).await;
    assert!(
        a.iter().all(|x| *x == 0.0) && ml.chunks(2).all(|ml| ml == [EMPTY_M, 0.0]),
        "{who}: an empty state"
    );
    let (o, lse) = finalized(backend, &OnDevice::empty(backend)).await;
    assert!(
        o.iter().all(|x| *x == 0.0) && lse.iter().all(|x| *x == f32::NEG_INFINITY),
        "{who}: an empty output"
    );
}

/// The two numbers of a log-sum-exp are m + ln l for states of any size, with and without sinks.
pub(super) async fn log_sum_exp_is_two_numbers<B: Backend>(backend: &B, who: &str) {
    const LARGEST: [f32; 8] = [0.0, -3.0, 88.0, 5e3, -1e7, 2e8, -1e20, 1e38];
    let ml: Vec<f32> =
        (0..ROWS).flat_map(|row| [LARGEST[row % 8], 1.0 + (row * row % 5000) as f32]).collect();
    let upload = |values: &[f32]| {
        backend.upload("state", Bytes::copy_from_slice(bytemuck::cast_slice(values))).unwrap()
    };
    let state = OnDevice::<B> { a: upload(&vec![1.0; ROWS * SHAPE.dim]), ml: upload(&ml) };
    for sinks in [&[][..], &[0.5, -1e20, 3e8, 0.0]] {
        let (mut o, mut lse) = poisoned_results(backend);
        backend.finalize(&state.view(), sinks, Dtype::F32, &mut o, &mut lse).unwrap();
        let pairs = floats(backend, &mut lse, SHAPE.lse_bytes()).await;
        for (index, pair) in pairs.as_chunks::<2>().0.iter().enumerate() {
            let [first, rest] = pair.map(f64::from);
            let (head, row) = (index % SHAPE.heads, index / SHAPE.heads % SHAPE.rows);
            let at = (index / SHAPE.heads / SHAPE.rows * SHAPE.heads + head) * SHAPE.rows + row;
            let [m, l] = [ml[2 * at], ml[2 * at + 1]].map(f64::from);
            let sink = sinks.get(head).map_or(f64::NEG_INFINITY, |sink| f64::from(*sink));
            let most = m.max(sink);
            let ln = (l * (m - most).exp() + (sink - most).exp()).ln();
            // ln l is f32, and so is its difference to a first number of its own size.
            let limit = 4.0 * f64::from(f32::EPSILON) * (1.0 + ln);
            assert!((first - most + rest - ln).abs() <= limit, "{who}: {pair:?} for {most:e} + {ln}");
            assert!(
                rest.abs() <= 1e-7 * first.abs().max(1.0),
                "{who}: {first:e} is not rounded, the rest is {rest:e}"
            );
        }
    }
}
