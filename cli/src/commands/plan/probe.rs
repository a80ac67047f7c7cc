//! Measures the devices and the link of ranks in this process: the speed of attention, copies and
//! messages. All measurements are runs of real plans, through the executor and the collective.

use std::collections::BTreeMap;
use std::time::Instant;

use kyklos::backend::{Control, Device, DeviceClass};
use kyklos::host::Tensors;
use kyklos::plan::{PlanSet, Step};
use kyklos::simulate::{
    AttentionRate, Cluster, Description, DeviceCount, DeviceDescription, Duplex, HostDescription,
    LinkDescription, MemoryKind,
};
use kyklos::{
    AttentionProblem, Dtype, Mask, MaskSlice, Mesh, PlacementKind, PlanError, SlicePart, Split, Strategy,
    TILE_KEYS, TokenRuns, plan_forward,
};

use crate::devices::DeviceId;
use crate::failure::{Failure, Result};
use crate::median::median;
use crate::options::TransportName;
use crate::run::resident::Resident;
use crate::run::timed;
use crate::tensors::Source;

/// The devices and the transport to measure, and the measurements.
#[derive(Debug)]
pub(crate) struct Probe {
    dtype: Dtype,
    head_dim: u32,
    /// Query heads and KV heads.
    heads: [u32; 2],
    transport: TransportName,
    /// By rank.
    devices: Vec<DeviceId>,
    backends: BTreeMap<DeviceId, Device>,
    /// Whether gradients are computed too.
    gradients: bool,
    rounds: Vec<Round>,
}

/// The measurements of one round.
#[derive(Clone, Debug)]
struct Round {
    devices: BTreeMap<DeviceId, DeviceRound>,
    link: LinkRound,
}

#[derive(Clone, Copy, Debug)]
struct DeviceRound {
    gflop_per_s: f64,
    edge_pairs: f64,
    step_us: f64,
    copy_gb_per_s: f64,
    state_gb_per_s: f64,
    key_gb_per_s: f64,
    backward_products: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct LinkRound {
    latency_us: f64,
    gb_per_s: f64,
    host_s_per_gb: f64,
}

impl Probe {
    /// Opens the devices of ranks that will attend in `dtype` with heads of `head_dim`.
    pub(crate) fn new(
        problem: &AttentionProblem,
        gradients: bool,
        devices: Vec<DeviceId>,
        transport: TransportName,
    ) -> Result<Self> {
        let mut backends = BTreeMap::new();
        for device in &devices {
            if !backends.contains_key(device) {
                backends.insert(*device, device.open()?);
            }
        }
        let heads = [problem.q_heads, problem.kv_heads];
        let (dtype, head_dim) = (problem.dtype, problem.head_dim);
        Ok(Self { dtype, head_dim, heads, transport, devices, backends, gradients, rounds: Vec::new() })
    }

    /// The device of each rank.
    pub(crate) fn backends(&self) -> Vec<&Device> {
        self.devices.iter().map(|device| &self.backends[device]).collect()
    }

    /// Measures one more round.
    pub(crate) fn look(&mut self) -> Result<()> {
        let mut devices = BTreeMap::new();
        for (id, backend) in &self.backends {
            let sharing = self.devices.iter().filter(|device| *device == id).count();
            devices.insert(*id, self.device(backend, sharing)?);
        }
        let link = self.link()?;
        self.rounds.push(Round { devices, link });
        Ok(())
    }

    /// The medians of all rounds, as a cluster of one host.
    pub(crate) fn cluster(&self) -> Result<Cluster> {
        let median = |of: &dyn Fn(&Round) -> f64| median(self.rounds.iter().map(of));
        let kinds: Vec<DeviceId> = self.backends.keys().copied().collect();
        let mut device = BTreeMap::new();
        for id in &kinds {
            let of = |value: fn(&DeviceRound) -> f64| median(&|round: &Round| value(&round.devices[id]));
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and 4096")]
            let tile = (of(|round| round.edge_pairs) + 1.0).clamp(1.0, 4096.0).round() as u32;
            device.insert(
                id.to_string(),
                DeviceDescription {
                    memory_gib: None,
                    attention: vec![AttentionRate {
                        dtype: self.dtype.name().to_owned(),
                        head_dim: self.head_dim,
                        gflop_per_s: of(|round| round.gflop_per_s),
                        share_of_it: 1.0,
                        backward_products: of(|round| round.backward_products.unwrap_or(SEVEN)),
                    }],
                    tile_rows: tile,
                    tile_keys: tile,
                    attend_step_us: of(|round| round.step_us),
                    piece_ms: 100.0,
                    piece_us: 0.0,
                    copy_gb_per_s: of(|round| round.copy_gb_per_s),
                    state_gb_per_s: Some(of(|round| round.state_gb_per_s)),
                    key_gb_per_s: Some(of(|round| round.key_gb_per_s)),
                    copy_us: 0.0,
                    // The measured time of a message includes staging.
                    memory: MemoryKind::Unified,
                    staging_gb_per_s: None,
                },
            );
        }
        let on = |id: &DeviceId| kinds.iter().position(|kind| kind == id).unwrap_or(0);
        let link = LinkDescription {
            gb_per_s: median(&|round| round.link.gb_per_s),
            latency_us: median(&|round| round.link.latency_us),
            message_us: 0.0,
            duplex: Duplex::Half,
            host_s_per_gb: median(&|round| round.link.host_s_per_gb),
            device_memory: false,
        };
        Ok(Cluster::new(Description {
            name: format!("{} ranks in one process, {}, probed", self.devices.len(), self.words()),
            about: format!("Medians of {} looks by kyklos plan --explain --probe.", self.rounds.len()),
            between_hosts: None,
            rank_on_device: Some(self.devices.iter().map(on).collect()),
            share_devices: false,
            device,
            link: BTreeMap::from([(self.words().to_owned(), link)]),
            host: vec![HostDescription {
                name: "here".to_owned(),
                count: 1,
                grow: false,
                devices: kinds.iter().map(|id| DeviceCount { kind: id.to_string(), count: 1 }).collect(),
                inside: Some(self.words().to_owned()),
                nic: None,
                uplink: None,
            }],
            between: Vec::new(),
        })?)
    }

    fn words(&self) -> &'static str {
        match self.transport {
            TransportName::InProcess => "channels",
            TransportName::Quic => "quic-loopback",
        }
    }

    /// Measures a device with as many ranks as will share it: on a busy machine several ranks get
    /// more of it than one.
    fn device(&self, backend: &Device, sharing: usize) -> Result<DeviceRound> {
        let apart = |batch: u32, tokens: u32, mask: Mask| -> Result<f64> {
            let ends = (0..=ranks(sharing)).map(|rank| rank * tokens);
            let mask = Mask::documents(ends.collect())?.and(mask)?;
            let [heads, kv_heads] = self.heads;
            let shape = [batch, ranks(sharing) * tokens, heads, kv_heads, self.head_dim];
            self.at_once(backend, sharing, &self.problem(shape, mask)?)
        };
        let step_s =
            self.at_once(backend, 1, &self.problem([1, TINY, 1, 1, self.head_dim], Mask::full())?)?;
        let (mut tokens, mut full_s) = (FIRST_TOKENS, 0.0);
        while full_s < LONG_ENOUGH_S && tokens < LAST_TOKENS {
            tokens *= 2;
            full_s = apart(1, tokens, Mask::full())?;
        }
        let rows = f64::from(tokens);
        let [heads, kv_heads] = self.heads.map(f64::from);
        let key_gb_per_s = self.keys(backend, sharing)?;
        let keys_s = rows * kv_heads * self.key_bytes() as f64 / key_gb_per_s / 1e9;
        let pair_s = (full_s - step_s - keys_s).max(full_s / 2.0) / (rows * rows * heads);
        // Partial tiles at the edge of a row cost most in short rows; kernels may halve tiles.
        let batch = (EDGE_HEADS / self.heads[0]).max(1);
        let (all_s, seen_s) =
            (apart(batch, EDGE_TOKENS, Mask::full())?, apart(batch, EDGE_TOKENS, Mask::causal())?);
        let rows = f64::from(EDGE_TOKENS);
        let saved_pairs = (all_s - seen_s) / (pair_s * heads * f64::from(batch) * rows);
        Ok(DeviceRound {
            gflop_per_s: 4.0 * f64::from(self.head_dim) / pair_s / 1e9,
            edge_pairs: ((rows - 1.0) / 2.0 - saved_pairs).max(0.0),
            step_us: step_s * 1e6,
            copy_gb_per_s: self.copies(backend)?,
            state_gb_per_s: self.states(backend, sharing)?,
            key_gb_per_s,
            backward_products: self.gradients.then(|| self.products(backend, tokens)).transpose()?,
        })
    }

    /// The time of the gradients of a pair, in units of half the time of its attention.
    fn products(&self, backend: &Device, tokens: u32) -> Result<f64> {
        let [heads, kv_heads] = self.heads;
        let problem = self.problem([1, tokens, heads, kv_heads, self.head_dim], Mask::full())?;
        let mut resident = Resident::new(backend, &problem, 0)?;
        let mut gradients = resident.gradients(backend, 0)?;
        let control = Control::default();
        let mut walls_s = [Vec::new(), Vec::new()];
        for run in 0..=REPEAT {
            let started = Instant::now();
            resident.run(backend, &control)?;
            let between = Instant::now();
            resident.run_backward(backend, &mut gradients, &control)?;
            // The first runs compile kernels.
            if run > 0 {
                walls_s[0].push((between - started).as_secs_f64());
                walls_s[1].push(between.elapsed().as_secs_f64());
            }
        }
        let [forward_s, backward_s] = walls_s.map(median);
        Ok(2.0 * backward_s / forward_s)
    }

    /// Seconds that each of `sharing` ranks would take if it had the device for itself. Each rank
    /// sees only its own keys, so that no message is sent.
    fn at_once(&self, backend: &Device, sharing: usize, problem: &AttentionProblem) -> Result<f64> {
        let set = ring(sharing, problem)?;
        let wall_s = self.run(&set, &vec![backend; sharing], TransportName::InProcess)?.wall_s;
        Ok(wall_s / count(sharing))
    }

    /// Bytes of keys and values that attention reads in a second: two queries see many keys.
    fn keys(&self, backend: &Device, sharing: usize) -> Result<f64> {
        let ranks = ranks(sharing);
        let keys = u32::try_from(BULK_BYTES / self.key_bytes()).unwrap_or(1 << 16) / ranks;
        let own =
            |rank| MaskSlice::new(2 * rank..2 * rank + 2, rank * keys..(rank + 1) * keys, SlicePart::Full);
        let mask = Mask::slices((0..ranks).map(own).collect::<Result<_, PlanError>>()?);
        let problem =
            self.problem([1, ranks * keys, 1, 1, self.head_dim], mask)?.with_queries(2 * ranks, 0)?;
        let wall_s = self.at_once(backend, sharing, &problem)?;
        Ok((u64::from(keys) * self.key_bytes()) as f64 / wall_s / 1e9)
    }

    /// Bytes of a key and its value, for one head.
    fn key_bytes(&self) -> u64 {
        2 * u64::from(self.head_dim) * self.dtype.bytes() as u64
    }

    /// Bytes of running states that are read or written in a second. In a fixed order every tile of
    /// keys has its own states, which are merged; here every row sees one key of each tile.
    fn states(&self, backend: &Device, sharing: usize) -> Result<f64> {
        let (tiles, ranks) = (STATE_TILES, ranks(sharing));
        let (tokens, heads) = (tiles * TILE_KEYS, self.heads[0]);
        let own = |tile: u32| {
            let (rank, key) = (tile / tiles, tile * TILE_KEYS);
            MaskSlice::new(rank * tokens..(rank + 1) * tokens, key..key + 1, SlicePart::Full)
        };
        let mask = Mask::slices((0..ranks * tiles).map(own).collect::<Result<_, PlanError>>()?);
        let problem = self.problem([1, ranks * tokens, heads, heads, self.head_dim], mask)?;
        let wall_s = self.at_once(backend, sharing, &problem.with_fixed_order(true)?)?;
        // Attention moves the state three times, so does a merge; the end moves it twice.
        let moved = f64::from(3 * tiles + 3 * (tiles - 1) + 2);
        let state = f64::from(tokens * heads) * (f64::from(self.head_dim) * 4.0 + 8.0);
        Ok(moved * state / wall_s / 1e9)
    }

    /// Bytes that packing and unpacking write in a second, on two ranks at once.
    fn copies(&self, backend: &Device) -> Result<f64> {
        let problem = self.problem([64, 64, 8, 8, self.head_dim], Mask::full())?;
        let mesh = Mesh::new(2, 1)?;
        let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ulysses)?;
        let timed = self.run(&set, &[backend, backend], TransportName::InProcess)?;
        let plan = &set.plans[0];
        let copied: u64 = plan
            .steps
            .iter()
            .map(|step| match step {
                Step::Repack { from, .. } => plan.slice_bytes(&problem, from),
                _ => 0,
            })
            .sum();
        let copy_ns = timed.reports.iter().map(|report| report.copy_ns).sum::<u64>() / 2;
        #[expect(clippy::cast_precision_loss, reason = "megabytes and milliseconds")]
        Ok(copied as f64 / copy_ns.max(1) as f64)
    }

    /// The latency by a ring of many small hops, and the bandwidth by a ring of one large hop.
    fn link(&self) -> Result<LinkRound> {
        let backend = self.backends[&self.devices[0]].info().class;
        let others = self.devices.len().clamp(2, 4);
        let backends: Vec<&Device> = self.backends().into_iter().cycle().take(others).collect();
        let small = self.problem([1, TINY, 1, 1, self.head_dim], Mask::full())?;
        let pinged = self.run(&ring(others, &small)?, &backends, self.transport)?;
        let hops = count(others - 1);
        #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
        let hop_ns = median(pinged.reports.iter().map(|report| report.wait_ns as f64)) / hops;

        let row_bytes = self.key_bytes();
        let keys = u32::try_from(BULK_BYTES / row_bytes).unwrap_or(1 << 16);
        // Both queries see one key of each half: all keys are sent, with almost no attention.
        let key = |at: u32| MaskSlice::new(0..2, at..at + 1, SlicePart::Full);
        let few = Mask::slices(vec![key(0)?, key(keys / 2)?]);
        let bulk = self.problem([1, keys, 1, 1, self.head_dim], few)?.with_queries(2, 0)?;
        let (set, tensors) = (ring(2, &bulk)?, tensors(&bulk)?);
        let before_s = processor_s();
        let moved = timed::run(&set, &backends[..2], self.transport, &tensors, REPEAT)?;
        let used_s = before_s.zip(processor_s()).map(|(before, after)| after - before);
        let gb = (u64::from(keys) * row_bytes) as f64 / 1e9;
        // The warm-up run sends too, and this process handles both ends of each byte.
        let runs = RUNS;
        let cores = std::thread::available_parallelism().map_or(1.0, |cores| count(cores.get()));
        let carries = self.transport == TransportName::Quic && backend >= DeviceClass::Cpu;
        Ok(LinkRound {
            latency_us: hop_ns / 2e3,
            gb_per_s: gb / (moved.wall_s - hop_ns / 1e9).max(moved.wall_s / 10.0),
            host_s_per_gb: match used_s {
                Some(used_s) if carries => (used_s / (runs * gb * 2.0 * cores)).max(0.0),
                _ => 0.0,
            },
        })
    }

    fn problem(&self, shape: [u32; 5], mask: Mask) -> Result<AttentionProblem> {
        Ok(AttentionProblem::new(shape, self.dtype, mask)?)
    }

    fn run(&self, set: &PlanSet, backends: &[&Device], transport: TransportName) -> Result<timed::Timed> {
        timed::run(set, backends, transport, &tensors(&set.problem)?, REPEAT)
    }
}

fn tensors(problem: &AttentionProblem) -> Result<Tensors> {
    let (q, kv) = (TokenRuns::contiguous(0..problem.q_len), TokenRuns::contiguous(0..problem.kv_len));
    Source::Random { seed: 0 }.all(problem, &q, &kv)
}

/// A ring of ranks, or one rank.
fn ring(sharing: usize, problem: &AttentionProblem) -> Result<PlanSet> {
    let mesh = Mesh::new(1, ranks(sharing))?;
    Ok(plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::of_mesh(mesh))?)
}

fn ranks(sharing: usize) -> u32 {
    u32::try_from(sharing).unwrap_or(MOST_RANKS)
}

#[expect(clippy::cast_precision_loss, reason = "ranks and cores")]
fn count(n: usize) -> f64 {
    n as f64
}

/// Processor seconds of this process so far; Linux only, in hundredths.
fn processor_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / 100.0)
}

/// Refuses a request that a probe cannot measure.
pub(crate) fn fits(ranks: u32) -> Result<()> {
    if ranks > MOST_RANKS {
        return Err(Failure::request(
            format!("a probe of {ranks} ranks in this process"),
            format!("use at most {MOST_RANKS}, or describe devices and links with --hardware"),
        ));
    }
    Ok(())
}

const TINY: u32 = 16;
const FIRST_TOKENS: u32 = 256;
const LAST_TOKENS: u32 = 4096;
const EDGE_TOKENS: u32 = 256;
/// Heads of all batch entries.
const EDGE_HEADS: u32 = 32;
const STATE_TILES: u32 = 4;
const LONG_ENOUGH_S: f64 = 0.03;
const BULK_BYTES: u64 = 64 << 20;
/// Timed runs of each measurement, and with the warm-up run before them.
const REPEAT: u64 = 3;
const RUNS: f64 = 4.0;
/// Products of two kernels, where no gradients are measured.
const SEVEN: f64 = 7.0;
const MOST_RANKS: u32 = 64;
