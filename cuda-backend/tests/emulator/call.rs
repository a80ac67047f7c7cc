//! Turns a case into launches, as a backend does, and compares their results with the oracle.

use bytemuck::Pod;
use kyklos::{AttentionProblem, BiasTensor, BlockWork, Dtype, Mask, TokenRuns};
use kyklos_cuda::{
    AttendArguments, AttendKernel, DecodeArguments, DeviceWork, HopperArguments, PartsArguments, STATE_ROWS,
    StateArguments, TensorArgument, TensorMap, finalize_kernel, head_packs, logits,
};
use kyklos_oracle::inputs::{BiasInputs, Case, Inputs};
use kyklos_oracle::oracle::{self, Element, Oracle, Row, Values};
use kyklos_oracle::tolerance::{Comparison, Context, Limit, compare, compare_rows, naive_f32_rows};

use crate::job::{Buffer, Counts, Job, Timing, numbers};
use crate::program::Program;

/// How the keys of a case are divided into blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Keys {
    /// One block.
    Whole,
    /// One block, whose kernel for Hopper writes the results instead of the state.
    Finished,
    /// Two blocks, one after the other into one state. The second has every third key.
    Split,
    /// The same two blocks, each into a state of its own. The states are merged.
    Merged,
}

/// The kernels that compute a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kernel {
    /// One block for each query tile of a head.
    Tiled,
    /// Split-KV decoding with this number of parts.
    Decode(u32),
    /// The kernels for Hopper with this number of blocks, each for several query tiles.
    Hopper(usize),
    /// The same with larger tiles of keys.
    Wide(usize),
}

/// A case in one storage type, and its expected result.
pub(crate) struct Call {
    case: Case,
    dtype: Dtype,
    problem: AttentionProblem,
    tensors: [Vec<u8>; 3],
    bias: Option<Vec<u8>>,
    expected: Vec<Row>,
    naive: Comparison,
}

impl Call {
    pub(crate) fn new<E: Element + Pod>(case: Case, dtype: Dtype) -> Self {
        let inputs = case.inputs::<E>();
        let problem = problem_of(&case, dtype);
        let mut case = case;
        // The oracle computes with the numbers that the product gets: f32 scale, softcap and sinks.
        case.problem.scale = f64::from(problem.scale);
        case.problem.softcap = problem.softcap.map(f64::from);
        case.problem.sinks = problem.sinks.iter().copied().map(f64::from).collect();
        let (q, k, v) = (E::values(&inputs.q), E::values(&inputs.k), E::values(&inputs.v));
        let mut truth = Oracle::new(&case.problem, q, k, v).unwrap();
        if let Some(bias) = inputs.oracle_bias(&case) {
            truth = truth.with_bias(bias).unwrap();
        }
        // The result of a row that sees a NaN is not specified.
        let rows: Vec<_> = case.problem.row_ids().into_iter().filter(|id| !case.sees_poison(*id)).collect();
        let (expected, naive) = (truth.rows(&rows), naive_f32_rows(&truth, &rows));
        let naive = compare_rows(&case.problem, E::DTYPE, &naive, &expected, &Context::default());
        let tensors = [&inputs.q, &inputs.k, &inputs.v].map(|values| bytemuck::cast_slice(values).to_vec());
        let bias = stored_bias(&case, &inputs);
        Self { case, dtype, problem, tensors, bias, expected, naive }
    }

    /// Compares the case with the oracle. Returns the counts of the run, or what is wrong.
    pub(crate) fn judge(
        &self,
        program: &Program,
        with: Kernel,
        keys: Keys,
        timing: Timing,
    ) -> Result<Counts, String> {
        let problem = &self.case.problem;
        let mut job = Job::default();
        let [q, k, v] = [0, 1, 2].map(|i| job.upload(&self.tensors[i]));
        let bias = self.bias.as_ref().map(|bias| job.upload(bias));
        let kv_len = u32::try_from(problem.kv_len).unwrap();
        let blocks: Vec<Vec<u32>> = match keys {
            Keys::Whole | Keys::Finished => vec![(0..kv_len).collect()],
            _ => {
                let (third, rest) = (0..kv_len).partition(|key| key % 3 == 1);
                vec![rest, third]
            }
        };
        let rows = problem.batch * problem.q_len * problem.q_heads;
        let o = job.poisoned(rows * problem.head_dim * self.dtype.bytes());
        let lse = job.poisoned(rows * 8);
        let sinks = if self.problem.sinks.is_empty() { 0 } else { job.upload(&self.problem.sinks).address };
        let mut states: Vec<StateArguments> = Vec::new();
        let mut finished = false;
        for block in blocks {
            if states.is_empty() || keys == Keys::Merged {
                let state = self.state(&mut job);
                let finished = StateArguments { o: o.address, lse: lse.address, sinks, ..state };
                states.push(if keys == Keys::Finished { finished } else { state });
                // A state of one block stays fresh: the first kernel writes it.
                if !matches!(keys, Keys::Whole | Keys::Finished) {
                    reset(&mut job, &states[states.len() - 1]);
                }
            }
            let (k, v) = (self.block_of(&mut job, k, 1, &block), self.block_of(&mut job, v, 2, &block));
            finished = self.attend(&mut job, with, states[states.len() - 1], q, [k, v], bias, &block);
        }
        let into = states[0];
        let grid = [state_blocks(&into), 1, 1];
        for from in &states[1..] {
            job.launch("merge_states", grid, 0, &StateArguments { from_a: from.a, from_ml: from.ml, ..into });
        }
        if !finished {
            let end = StateArguments { o: o.address, lse: lse.address, sinks, ..into };
            job.launch(finalize_kernel(self.dtype), grid, 0, &end);
        }
        job.bring(o);
        job.bring(lse);
        let (results, counts) = job.run(program, timing, self.case.seed)?;
        self.compare(&results[0], &numbers(&results[1]), &format!("{with:?}, keys {keys:?}, {timing:?}"))?;
        Ok(counts)
    }

    /// A state whose memory is not initialised.
    fn state(&self, job: &mut Job) -> StateArguments {
        let (problem, small) = (&self.case.problem, |n: usize| u32::try_from(n).unwrap());
        let rows = problem.batch * problem.q_len * problem.q_heads;
        StateArguments {
            a: job.poisoned(rows * problem.head_dim * 4).address,
            ml: job.poisoned(rows * 8).address,
            batch: small(problem.batch),
            rows: small(problem.q_len),
            heads: small(problem.q_heads),
            dim: small(problem.head_dim),
            ..StateArguments::default()
        }
    }

    /// Uploads the rows `keys` of tensor `index`: the whole tensor if they are all of it, else a
    /// buffer in which each row is followed by as many bytes of NaN, which no kernel may read.
    fn block_of(&self, job: &mut Job, whole: Buffer, index: usize, keys: &[u32]) -> TensorArgument {
        let [batch, tokens, heads, dim] = self.case.problem.kv_shape();
        if keys.len() == tokens {
            return dense(whole, tokens, heads, dim);
        }
        let bytes = heads * dim * self.dtype.bytes();
        let rows = (0..batch).flat_map(|b| keys.iter().map(move |key| b * tokens + *key as usize));
        let mut apart = Vec::new();
        for row in rows {
            apart.extend_from_slice(&self.tensors[index][row * bytes..][..bytes]);
            apart.resize(apart.len() + bytes, 0xFF);
        }
        let packed = dense(job.upload(&apart), keys.len(), heads, dim);
        TensorArgument { batch_stride: 2 * packed.batch_stride, row_stride: 2 * packed.row_stride, ..packed }
    }

    /// Returns whether the results were written: `state` has their addresses.
    #[expect(clippy::too_many_arguments, reason = "what a call to a backend has")]
    fn attend(
        &self,
        job: &mut Job,
        with: Kernel,
        state: StateArguments,
        q: Buffer,
        [k, v]: [TensorArgument; 2],
        bias: Option<Buffer>,
        keys: &[u32],
    ) -> bool {
        let problem = &self.case.problem;
        let kv_head_of: Vec<u32> =
            (0..problem.q_heads).map(|head| u32::try_from(problem.kv_head(head)).unwrap()).collect();
        let packs = head_packs(&kv_head_of);
        let kernel = match with {
            Kernel::Tiled => AttendKernel::tiled(self.dtype, state.dim),
            Kernel::Decode(_) => {
                let most = packs.iter().map(|pack| pack.count).max().unwrap();
                AttendKernel::decode(self.dtype, state.dim, most)
            }
            Kernel::Hopper(_) => AttendKernel::hopper(self.dtype, state.dim),
            Kernel::Wide(_) => AttendKernel::hopper_wide(self.dtype, state.dim),
        };
        let kernel = kernel.expect("heads of at most 256");
        let q_tokens = TokenRuns::contiguous(0..state.rows);
        let kv_tokens = TokenRuns::from_positions(keys.iter().copied());
        let kv_head_of = job.upload(&kv_head_of).address;
        let (scale, cap) = logits(self.problem.scale, self.problem.softcap);
        let whole = keys.len() == problem.kv_len;
        let layers = BlockWork::layers(&self.problem, &q_tokens, &kv_tokens, kernel.tile);
        let layers: Vec<_> = layers.into_iter().filter(|work| !work.is_empty()).collect();
        if whole && layers.is_empty() {
            reset(job, &state);
        }
        let finishes = state.o != 0 && layers.len() == 1;
        for (n, work) in layers.iter().enumerate() {
            let work = DeviceWork::new(work);
            let fresh = u32::from(whole && n == 0);
            let arguments = AttendArguments {
                q: dense(q, problem.q_len, problem.q_heads, problem.head_dim),
                k,
                v,
                bias: bias.map_or_else(TensorArgument::default, |bias| bias_rows(&self.problem, bias)),
                a: state.a,
                ml: state.ml,
                spans: job.upload(&work.spans).address,
                positions: job.upload(&work.positions).address,
                starts: job.upload(&work.starts).address,
                runs: job.upload(&work.runs).address,
                kv_head_of,
                rows: state.rows,
                keys: u32::try_from(keys.len()).unwrap(),
                heads: state.heads,
                dim: state.dim,
                classes: work.classes,
                q_tiles: work.q_tiles,
                bias_kind: self.case.bias.map_or(0, |bias| if bias.additive { 2 } else { 1 }),
                scale,
                cap,
                fresh,
                ..AttendArguments::default()
            };
            let tiles = work.q_tiles as usize;
            match with {
                Kernel::Tiled if whole => {
                    let grid = [tiles, problem.q_heads, problem.batch];
                    job.launch(&kernel.name, grid, kernel.shared_bytes, &arguments);
                }
                // In pieces: one launch for the tiles of each head.
                Kernel::Tiled => {
                    for first_batch in 0..state.batch {
                        for first_head in 0..state.heads {
                            let piece = AttendArguments { first_batch, first_head, ..arguments };
                            job.launch(&kernel.name, [tiles, 1, 1], kernel.shared_bytes, &piece);
                        }
                    }
                }
                Kernel::Decode(parts) => {
                    let rows = problem.batch * problem.q_len * problem.q_heads * parts as usize;
                    let from_a = job.poisoned(rows * problem.head_dim * 4).address;
                    let from_ml = job.poisoned(rows * 8).address;
                    let tile_rows = kernel.tile.q_rows.min(state.rows);
                    let most = packs.iter().map(|pack| pack.count).max().unwrap();
                    let tile_blocks = AttendKernel::tile_blocks(self.dtype, tile_rows * most, parts);
                    let arguments = DecodeArguments {
                        attend: AttendArguments { a: from_a, ml: from_ml, ..arguments },
                        packs: job.upload(&packs).address,
                        parts,
                        batch: state.batch,
                        tile_rows,
                        tile_blocks,
                    };
                    let grid = [tiles * tile_blocks as usize, packs.len(), problem.batch];
                    job.launch(&kernel.name, grid, kernel.shared_bytes, &arguments);
                    let state = StateArguments { from_a, from_ml, ..state };
                    let merge = PartsArguments { state, parts, fresh };
                    job.launch("merge_parts", [state_blocks(&state), 1, 1], 0, &merge);
                }
                Kernel::Hopper(blocks) | Kernel::Wide(blocks) => {
                    let order = work.longest_first(state.batch, fresh == 1);
                    let [batch, _, kv_heads, _] = problem.kv_shape().map(|n| u32::try_from(n).unwrap());
                    let map = |tensor, rows, heads, tile_rows| {
                        TensorMap::new(tensor, self.dtype, [batch, rows, heads, state.dim], tile_rows)
                    };
                    let items = u32::try_from(order.len()).unwrap() * state.heads;
                    let arguments = HopperArguments {
                        q: map(&arguments.q, state.rows, state.heads, kernel.tile.q_rows),
                        k: map(&k, arguments.keys, kv_heads, kernel.tile.kv_cols),
                        v: map(&v, arguments.keys, kv_heads, kernel.tile.kv_cols),
                        attend: AttendArguments { bias_kind: 0, ..arguments },
                        order: job.upload(&order).address,
                        first_item: 0,
                        end_item: items,
                        o: if finishes { state.o } else { 0 },
                        lse: state.lse,
                        sinks: state.sinks,
                        reserved: [0; 13],
                    };
                    // In pieces: one launch for the first item, one for the others.
                    let cut = if whole { 0 } else { 1 };
                    for (first_item, end_item) in [(0, cut), (cut, items)] {
                        let piece = HopperArguments { first_item, end_item, ..arguments };
                        let blocks = blocks.min((end_item - first_item) as usize);
                        job.launch(&kernel.name, [blocks, 1, 1], kernel.shared_bytes, &piece);
                    }
                }
            }
        }
        finishes
    }

    fn compare(&self, o: &[u8], lse: &[[f32; 2]], how: &str) -> Result<(), String> {
        let problem = &self.case.problem;
        // The kernel's lse is [batch, rows, heads], the oracle's [batch, heads, rows].
        let mut ordered = vec![0.0; lse.len()];
        for (id, [lse, rest]) in problem.row_ids().into_iter().zip(lse) {
            ordered[problem.lse_index(id)] = lse + rest;
        }
        let context = Context {
            case: self.case.name.to_owned(),
            seed: self.case.seed,
            backend: format!("emulated CUDA, {}, {how}", self.dtype),
            rerun: "cargo test --release -p kyklos-cuda --test emulator".to_owned(),
        };
        let held_to = |values: Values<'_>, dtype| {
            let comparison = compare(problem, values, Values::F32(&ordered), &self.expected, &context);
            comparison.within(&Limit::dense(dtype, &self.naive)).map_err(|failure| failure.to_string())
        };
        match self.dtype {
            Dtype::F32 => held_to(Values::F32(&numbers(o)), oracle::Dtype::F32),
            Dtype::F16 => held_to(Values::F16(&numbers(o)), oracle::Dtype::F16),
            Dtype::Bf16 => held_to(Values::Bf16(&numbers(o)), oracle::Dtype::Bf16),
        }
    }
}

/// The product's description of a case.
fn problem_of(case: &Case, dtype: Dtype) -> AttentionProblem {
    let oracle = &case.problem;
    let small = |n: usize| u32::try_from(n).unwrap();
    let shape = [oracle.batch, oracle.kv_len, oracle.q_heads, oracle.kv_heads, oracle.head_dim].map(small);
    // The oracle and the product share the text form of masks.
    let mask: Mask = oracle.mask.to_string().parse().unwrap();
    let bias = case.bias.map(|bias| BiasTensor {
        kind: if bias.additive { kyklos::BiasKind::Additive } else { kyklos::BiasKind::Mask },
        batch: small(bias.batch),
        heads: small(bias.heads),
        shared_rows: bias.shared_rows,
    });
    AttentionProblem::new(shape, dtype, mask)
        .and_then(|problem| {
            problem.with_queries(small(oracle.q_len), u32::try_from(oracle.q_offset).unwrap())
        })
        .and_then(|problem| problem.with_logits(oracle.scale as f32, oracle.softcap.map(|cap| cap as f32)))
        .and_then(|problem| problem.with_bias(bias))
        .and_then(|problem| problem.with_sinks(oracle.sinks.iter().map(|sink| *sink as f32).collect()))
        .unwrap()
}

/// A bias `[batch, heads, q_len, kv_len]` as the product has it, `[batch, q_len, heads, row]`.
fn stored_bias<E: Element + Pod>(case: &Case, inputs: &Inputs<E>) -> Option<Vec<u8>> {
    let (bias, problem) = (case.bias?, &case.problem);
    let queries = if bias.shared_rows { 1 } else { problem.q_len };
    let mut stored = Vec::new();
    for batch in 0..bias.batch {
        for row in 0..queries {
            for head in 0..bias.heads {
                let from = ((batch * bias.heads + head) * queries + row) * problem.kv_len;
                let row = from..from + problem.kv_len;
                match inputs.bias.as_ref()? {
                    BiasInputs::Visible(all) => {
                        let words = BiasTensor::pack(all[row].iter().copied());
                        stored.extend_from_slice(bytemuck::cast_slice(&words));
                    }
                    BiasInputs::Bias(all) => {
                        stored.extend_from_slice(bytemuck::cast_slice(&all[row]));
                        stored.resize(stored.len().next_multiple_of(4), 0xFF);
                    }
                }
            }
        }
    }
    Some(stored)
}

/// The rows of a mask or bias tensor.
pub(crate) fn bias_rows(problem: &AttentionProblem, buffer: Buffer) -> TensorArgument {
    let tensor = problem.bias.unwrap();
    let row = tensor.row_elements(problem.dtype, problem.kv_len);
    let queries = if tensor.shared_rows { 1 } else { problem.q_len as usize };
    let whole = dense(buffer, queries, tensor.heads as usize, row);
    TensorArgument {
        batch_stride: if tensor.batch == 1 { 0 } else { whole.batch_stride },
        row_stride: if tensor.shared_rows { 0 } else { whole.row_stride },
        head_stride: if tensor.heads == 1 { 0 } else { whole.head_stride },
        ..whole
    }
}

pub(crate) fn dense(buffer: Buffer, rows: usize, heads: usize, dim: usize) -> TensorArgument {
    TensorArgument {
        data: buffer.address,
        batch_stride: (rows * heads * dim) as u64,
        row_stride: (heads * dim) as u64,
        head_stride: dim as u64,
    }
}

fn reset(job: &mut Job, state: &StateArguments) {
    job.launch("reset_state", [state_blocks(state), 1, 1], 0, state);
}

pub(crate) fn state_blocks(state: &StateArguments) -> usize {
    (state.batch * state.rows * state.heads).div_ceil(STATE_ROWS) as usize
}
