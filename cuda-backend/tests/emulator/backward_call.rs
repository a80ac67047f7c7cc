//! Turns a case into the launches of a forward and a backward pass, and judges their gradients.

use kyklos::{BiasKind, BlockWork, Dtype, TokenRuns};
use kyklos_backend_suite::GradientCase;
use kyklos_cuda::{
    AttendArguments, AttendKernel, BACKWARD_TILE, BackwardArguments, BackwardKernel, BackwardList,
    BackwardSums, ClearArguments, DeviceWork, HopperBackwardArguments, RowStatsArguments, STATE_ROWS,
    StateArguments, TensorArgument, TensorMap, finalize_kernel, head_readers, logits, row_stats_kernel,
};
use kyklos_oracle::inputs::{Case, CaseBias, cases};

use crate::call::{bias_rows, dense, state_blocks};
use crate::job::{Buffer, Counts, Job, Timing, numbers};
use crate::program::Program;

/// A case with its right gradients.
pub(crate) struct BackwardCall {
    pub(crate) case: GradientCase,
    /// Whether the keys are two blocks, whose gradients are added, in pieces of one head each.
    halves: bool,
    /// Whether the kernels are those for Hopper.
    wgmma: bool,
}

/// dq, dk and dv, and the gradient of a bias where the case has one.
pub(crate) type Sums = Vec<Vec<f32>>;

impl BackwardCall {
    pub(crate) fn new(case: GradientCase, halves: bool) -> Self {
        Self { case, halves, wgmma: false }
    }

    /// The same with the kernels for Hopper.
    pub(crate) fn on_hopper(self) -> Self {
        Self { wgmma: true, ..self }
    }

    /// Compares the gradients with the oracle's. Returns the counts of the run, or what is wrong.
    pub(crate) fn judge(&self, program: &Program, timing: Timing) -> Result<Counts, String> {
        let (sums, counts) = self.run(program, timing)?;
        let mut sums: Vec<Vec<f64>> =
            sums.into_iter().map(|sum| sum.into_iter().map(f64::from).collect()).collect();
        // Sinks are no work of a kernel.
        sums.insert(3, self.case.right.d_sinks.clone());
        let errors = self.case.judge(&sums);
        for (error, limit) in errors.iter().zip(self.case.dense_limits()) {
            error.within(&limit).map_err(|fault| {
                let prepared = &self.case.prepared;
                let dtype = prepared.problem.dtype;
                format!("{} in {dtype}, {timing:?}: {fault}\n  {}", prepared.case.name, prepared.oracle)
            })?;
        }
        Ok(counts)
    }

    /// The forward pass, whose log-sum-exp the gradients need, then the gradients.
    pub(crate) fn run(&self, program: &Program, timing: Timing) -> Result<(Sums, Counts), String> {
        let prepared = &self.case.prepared;
        let problem = &prepared.problem;
        let [rows, kv_len, q_heads, kv_heads] =
            [problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads].map(|n| n as usize);
        let (batch, dim) = (problem.batch as usize, problem.head_dim as usize);
        let mut job = Job::default();
        let tensors = &prepared.tensors;
        let [q, k, v, d_o] =
            [&tensors.q, &tensors.k, &tensors.v, &self.case.d_o].map(|tensor| job.upload(tensor));
        let bias = tensors.bias.as_ref().map(|bias| job.upload(bias));
        let row_heads = batch * rows * q_heads;
        let kv_head_of: Vec<u32> = (0..problem.q_heads).map(|head| head / problem.group()).collect();
        let (scale, cap) = logits(problem.scale, problem.softcap);
        let attend = AttendArguments {
            q: dense(q, rows, q_heads, dim),
            bias: bias.map_or_else(TensorArgument::default, |bias| bias_rows(problem, bias)),
            kv_head_of: job.upload(&kv_head_of).address,
            rows: problem.q_len,
            heads: problem.q_heads,
            dim: problem.head_dim,
            bias_kind: problem.bias.map_or(0, |bias| if bias.kind == BiasKind::Mask { 1 } else { 2 }),
            scale,
            cap,
            ..AttendArguments::default()
        };
        let (whole_k, whole_v) = (dense(k, kv_len, kv_heads, dim), dense(v, kv_len, kv_heads, dim));
        let [o, lse] = self.forward(&mut job, AttendArguments { k: whole_k, v: whole_v, ..attend });

        let stats = job.poisoned(row_heads * 16);
        let arguments = RowStatsArguments {
            o: o.address,
            d_o: d_o.address,
            lse: lse.address,
            d_lse: job.upload(&self.case.d_lse).address,
            stats: stats.address,
            rows: row_heads as u64,
            dim: problem.head_dim,
            reserved: 0,
        };
        let blocks = row_heads.div_ceil(STATE_ROWS as usize);
        job.launch(row_stats_kernel(problem.dtype), [blocks, 1, 1], 0, &arguments);

        let kv_elements = batch * kv_len * kv_heads * dim;
        let of_bias = self.case.right.d_bias.len();
        let lengths =
            [row_heads * dim, kv_elements, kv_elements].into_iter().chain((of_bias > 0).then_some(of_bias));
        let sums: Vec<_> = lengths
            .map(|elements| {
                let sum = job.poisoned(elements * 4);
                let words = ClearArguments { words: sum.address, count: elements as u64 };
                job.launch("clear_words", [3, 1, 1], 0, &words);
                sum
            })
            .collect();
        let middle = if self.halves { problem.kv_len / 3 } else { 0 };
        for keys in [0..middle, middle..problem.kv_len] {
            let row = u64::from(problem.kv_heads * problem.head_dim);
            let from = u64::from(keys.start) * row;
            let bytes = problem.dtype.bytes() as u64;
            let part = |tensor: TensorArgument| TensorArgument { data: tensor.data + from * bytes, ..tensor };
            let arguments = BackwardArguments {
                attend: AttendArguments { k: part(whole_k), v: part(whole_v), ..attend },
                d_o: dense(d_o, rows, q_heads, dim),
                stats: dense(stats, rows, q_heads, 4),
                d_kv: TensorArgument { data: 0, ..whole_k },
                bias_sum: self.bias_sum(),
                d_bias: sums.get(3).map_or(0, |sum| sum.address),
                dq: sums[0].address,
                dk: sums[1].address + from * 4,
                dv: sums[2].address + from * 4,
                scale: problem.scale,
                ..BackwardArguments::default()
            };
            self.backward(&mut job, keys, &kv_head_of, arguments);
        }
        sums.into_iter().for_each(|sum| job.bring(sum));
        let (results, counts) = job.run(program, timing, prepared.case.seed)?;
        Ok((results.iter().map(|sum| numbers(sum)).collect(), counts))
    }

    /// The strides of the gradient of the bias in the order of the oracle: `[batch or 1, heads or
    /// 1, rows or 1, keys]`.
    fn bias_sum(&self) -> TensorArgument {
        let problem = &self.case.prepared.problem;
        let Some(bias) = problem.bias else { return TensorArgument::default() };
        let keys = u64::from(problem.kv_len);
        let of_head = if bias.shared_rows { keys } else { keys * u64::from(problem.q_len) };
        let unless = |shared: bool, stride| if shared { 0 } else { stride };
        TensorArgument {
            data: 0,
            batch_stride: unless(bias.batch == 1, of_head * u64::from(bias.heads)),
            row_stride: unless(bias.shared_rows, keys),
            head_stride: unless(bias.heads == 1, of_head),
        }
    }

    /// Launches the forward pass. Returns the output and the log-sum-exp.
    fn forward(&self, job: &mut Job, arguments: AttendArguments) -> [Buffer; 2] {
        let problem = &self.case.prepared.problem;
        let rows = (problem.batch * problem.q_len * problem.q_heads) as usize;
        let elements = rows * problem.head_dim as usize;
        let o = job.poisoned(elements * problem.dtype.bytes());
        let lse = job.poisoned(rows * 8);
        let state = StateArguments {
            a: job.poisoned(elements * 4).address,
            ml: job.poisoned(rows * 8).address,
            sinks: if problem.sinks.is_empty() { 0 } else { job.upload(&problem.sinks).address },
            o: o.address,
            lse: lse.address,
            batch: problem.batch,
            rows: problem.q_len,
            heads: problem.q_heads,
            dim: problem.head_dim,
            ..StateArguments::default()
        };
        let grid = [state_blocks(&state), 1, 1];
        job.launch("reset_state", grid, 0, &state);
        let kernel = AttendKernel::tiled(problem.dtype, problem.head_dim).unwrap();
        let queries = TokenRuns::contiguous(0..problem.q_len);
        for work in
            BlockWork::layers(problem, &queries, &TokenRuns::contiguous(0..problem.kv_len), kernel.tile)
        {
            let work = DeviceWork::new(&work);
            let arguments = AttendArguments {
                a: state.a,
                ml: state.ml,
                spans: job.upload(&work.spans).address,
                positions: job.upload(&work.positions).address,
                starts: job.upload(&work.starts).address,
                runs: job.upload(&work.runs).address,
                keys: problem.kv_len,
                classes: work.classes,
                q_tiles: work.q_tiles,
                ..arguments
            };
            let grid = [work.q_tiles, problem.q_heads, problem.batch].map(|n| n as usize);
            job.launch(&kernel.name, grid, kernel.shared_bytes, &arguments);
        }
        job.launch(finalize_kernel(problem.dtype), grid, 0, &state);
        [o, lse]
    }

    /// Launches the kernels for a block of keys.
    fn backward(
        &self,
        job: &mut Job,
        keys: std::ops::Range<u32>,
        kv_head_of: &[u32],
        arguments: BackwardArguments,
    ) {
        let problem = &self.case.prepared.problem;
        let queries = TokenRuns::contiguous(0..problem.q_len);
        let readers = head_readers(kv_head_of);
        let readers_at = job.upload(&readers).address;
        let small = |n: usize| u32::try_from(n).unwrap();
        for work in BlockWork::layers(problem, &queries, &TokenRuns::contiguous(keys), BACKWARD_TILE) {
            if work.is_empty() {
                continue;
            }
            let spans: Vec<_> = work.classes.iter().flat_map(|class| class.rows.to_vec()).collect();
            let of_bias = BackwardKernel::of_bias(problem.dtype, problem.head_dim).unwrap();
            let of_bias = (arguments.d_bias != 0).then_some(of_bias);
            let kernels = BackwardKernel::both(problem.dtype, problem.head_dim).unwrap().map(|kernel| {
                let hopper = || BackwardKernel::hopper(kernel.makes, problem.dtype, problem.head_dim);
                if self.wgmma { hopper().expect("a 16-bit type and a small head") } else { kernel }
            });
            for kernel in kernels.into_iter().chain(of_bias) {
                let list = BackwardList::new(&work, &kernel);
                let arguments = BackwardArguments {
                    attend: AttendArguments {
                        spans: job.upload(&spans).address,
                        positions: job.upload(&work.kv_positions).address,
                        starts: job.upload(&list.starts).address,
                        runs: job.upload(&list.runs).address,
                        keys: small(work.kv_positions.len()),
                        classes: small(work.classes.len()),
                        q_tiles: list.tiles,
                        ..arguments.attend
                    },
                    readers: readers_at,
                    ..arguments
                };
                let of_keys = kernel.makes == BackwardSums::Keys;
                let heads = if of_keys { small(readers.len()) - 1 } else { problem.q_heads };
                let blocks = (list.tiles * kernel.tile_blocks()) as usize;
                // Heads and batch entries that share elements have launches of their own.
                let strides = [arguments.bias_sum.batch_stride, arguments.bias_sum.head_stride];
                let shares = kernel.makes == BackwardSums::Bias && strides.contains(&0);
                if !self.halves && !shares {
                    let grid = [blocks, heads as usize, problem.batch as usize];
                    self.launch(job, &kernel, grid, arguments);
                    continue;
                }
                for first_batch in 0..problem.batch {
                    for first_head in 0..heads {
                        let attend = AttendArguments { first_batch, first_head, ..arguments.attend };
                        let piece = BackwardArguments { attend, ..arguments };
                        self.launch(job, &kernel, [blocks, 1, 1], piece);
                    }
                }
            }
        }
    }

    fn launch(&self, job: &mut Job, kernel: &BackwardKernel, grid: [usize; 3], backward: BackwardArguments) {
        if !kernel.wgmma {
            return job.launch(&kernel.name, grid, kernel.shared_bytes, &backward);
        }
        let problem = &self.case.prepared.problem;
        let AttendArguments { q, k, v, keys, .. } = backward.attend;
        let map = |tensor: &TensorArgument, rows, heads| {
            TensorMap::new(tensor, problem.dtype, [problem.batch, rows, heads, problem.head_dim], 64)
        };
        let arguments = HopperBackwardArguments {
            q: map(&q, problem.q_len, problem.q_heads),
            k: map(&k, keys, problem.kv_heads),
            v: map(&v, keys, problem.kv_heads),
            d_o: map(&backward.d_o, problem.q_len, problem.q_heads),
            backward,
            reserved: [0; 12],
        };
        job.launch(&kernel.name, grid, kernel.shared_bytes, &arguments);
    }
}

/// A case in which one element of d_o of a row, of batch entry 0 and head 0, is NaN: `(row,
/// element)`.
pub(crate) struct NanCall {
    clean: BackwardCall,
    poisoned: BackwardCall,
    row: usize,
    element: usize,
}

impl NanCall {
    pub(crate) fn new(case: &Case, dtype: Dtype, [row, element]: [usize; 2]) -> Self {
        let [clean, mut poisoned] = [(), ()].map(|()| GradientCase::new(case.clone(), dtype));
        let at = (row * case.problem.q_heads * case.problem.head_dim + element) * dtype.bytes();
        let mut d_o = poisoned.d_o.to_vec();
        d_o[at..at + dtype.bytes()].fill(0xFF);
        poisoned.d_o = d_o.into();
        let [clean, poisoned] = [clean, poisoned].map(|case| BackwardCall::new(case, false));
        Self { clean, poisoned, row, element }
    }

    /// The same with the kernels for Hopper.
    pub(crate) fn on_hopper(self) -> Self {
        Self { clean: self.clean.on_hopper(), poisoned: self.poisoned.on_hopper(), ..self }
    }

    /// The NaN is in dq of its row, in dk of the keys that the row sees, and in its element of
    /// their dv; all else has the bytes that it has without.
    pub(crate) fn judge(&self, program: &Program, timing: Timing) -> Result<(), String> {
        let oracle = &self.clean.case.prepared.oracle;
        let (poisoned, _) = self.poisoned.run(program, timing)?;
        let (clean, _) = self.clean.run(program, timing)?;
        let ([dq, dk, dv], [clean_dq, clean_dk, clean_dv]) = (&poisoned[..], &clean[..]) else {
            panic!("a case with a bias")
        };
        let dim = oracle.head_dim;
        let judge = |what: &str, found: &[f32], clean: &[f32], reached: &dyn Fn(usize) -> bool| {
            let wrong = |n: &usize| match reached(*n) {
                true => !found[*n].is_nan(),
                false => found[*n].to_bits() != clean[*n].to_bits(),
            };
            let fault =
                |n: usize| format!("{what}, {timing:?}: {} at {n}, without NaN {}", found[n], clean[n]);
            (0..found.len()).find(wrong).map_or(Ok(()), |n| Err(fault(n)))
        };
        let row_of = |n: usize| n / dim / oracle.q_heads;
        judge("dq", dq, clean_dq, &|n| row_of(n) == self.row && (n / dim).is_multiple_of(oracle.q_heads))?;
        let sees = |n: usize| {
            let token = n / dim / oracle.kv_heads;
            token < oracle.kv_len
                && (n / dim).is_multiple_of(oracle.kv_heads)
                && oracle.sees(0, self.row, token)
        };
        judge("dk", dk, clean_dk, &sees)?;
        judge("dv", dv, clean_dv, &|n| n % dim == self.element && sees(n))
    }
}

/// Biases with one for all or one for each, of two batch entries, four heads and all rows.
pub(crate) fn every_bias() -> impl Iterator<Item = CaseBias> {
    (0..8).map(|bits| CaseBias {
        additive: true,
        batch: if bits & 1 == 0 { 1 } else { 2 },
        heads: if bits & 2 == 0 { 1 } else { 4 },
        shared_rows: bits & 4 == 0,
        stand_in: false,
    })
}

pub(crate) fn plain() -> Case {
    cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap()
}

/// A plain case with a change, in which all logits are −∞, in tiles whose pairs are all visible,
/// and all of d_o is NaN.
pub(crate) fn without_finite_logits(dtype: Dtype, change: impl FnOnce(Case) -> Case) -> BackwardCall {
    let mut case = change(plain());
    (case.problem.q_len, case.problem.kv_len) = (64, 128);
    let mut case = GradientCase::new(case, dtype);
    let (bytes, row) = (dtype.bytes(), case.prepared.problem.head_dim as usize * dtype.bytes());
    let [minus_one, infinity]: [&[u8]; 2] = match dtype {
        Dtype::F32 => [&[0, 0, 0x80, 0xBF], &[0, 0, 0x80, 0x7F]],
        Dtype::F16 => [&[0, 0xBC], &[0, 0x7C]],
        Dtype::Bf16 => [&[0x80, 0xBF], &[0x80, 0x7F]],
    };
    let tensors = &mut case.prepared.tensors;
    for (tensor, first) in [(&mut tensors.q, minus_one), (&mut tensors.k, infinity)] {
        let mut stored = tensor.to_vec();
        stored.chunks_mut(row).for_each(|row| row[..bytes].copy_from_slice(first));
        *tensor = stored.into();
    }
    case.d_o = vec![0xFF; case.d_o.len()].into();
    BackwardCall::new(case, false)
}

/// All gradients of a call are exactly 0.
pub(crate) fn gives_nothing(call: &BackwardCall, program: &Program, timing: Timing) -> Result<(), String> {
    let (sums, _) = call.run(program, timing)?;
    for (name, sum) in ["dq", "dk", "dv", "dbias"].into_iter().zip(sums) {
        if let Some(x) = sum.iter().find(|x| **x != 0.0) {
            return Err(format!("{name}, {timing:?}: {x}"));
        }
    }
    Ok(())
}
