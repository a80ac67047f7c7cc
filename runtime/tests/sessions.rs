//! Sessions on every device of this machine: what observers are told of the work, and what is
//! refused before data moves.

#![cfg(all(feature = "cpu", feature = "wgpu"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::sync::{Arc, Mutex};

use kyklos::backend::Device;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos::local::on_threads;
use kyklos::transport::{Group, Rank};
use kyklos::{
    Attention, Error, Execution, Mesh, Observer, Result, RunOptions, Saved, Session, SessionOptions, Tensor,
    in_process_group,
};

/// The shares that a rank's operations have told, by operation.
#[derive(Debug, Default)]
struct Shares(Mutex<Vec<(u64, f64)>>);

impl Shares {
    fn take(&self) -> Vec<f64> {
        let told = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(told.windows(2).all(|two| two[0].0 == two[1].0), "of one operation: {told:?}");
        told.into_iter().map(|(_, share)| share).collect()
    }
}

impl Observer for Shares {
    fn step(&self, _: Rank, _: u64, _: usize, _: usize, _: &dyn Fn() -> String) {}

    fn worked(&self, _: Rank, op: u64, share: f64) {
        self.0.lock().unwrap().push((op, share));
    }
}

/// The CPU, and every GPU with bindings of at most this many bytes.
fn devices(max_binding_bytes: u64) -> Vec<Device> {
    let options = WgpuOptions { max_binding_bytes: Some(max_binding_bytes), ..WgpuOptions::default() };
    let all = 0..WgpuBackend::enumerate().len();
    // One that is listed may not be usable.
    let gpus: Vec<Device> =
        all.filter_map(|index| WgpuBackend::with_options(index, &options).ok().map(Device::from)).collect();
    let is_required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!is_required || !gpus.is_empty(), "KYKLOS_REQUIRE_GPU=1, and there is no wgpu device");
    [Device::cpu()].into_iter().chain(gpus).collect()
}

fn tensor(shape: [usize; 4], seed: f32) -> Tensor {
    let elements = (0..shape.iter().product()).map(|at: usize| ((at % 977) as f32 * seed).sin());
    Tensor::new(shape, elements.collect::<Vec<f32>>()).unwrap()
}

fn session(group: Group, device: &Device) -> (Session, Arc<Shares>) {
    let shares = Arc::new(Shares::default());
    let run = RunOptions { observer: shares.clone(), ..RunOptions::default() };
    let options = SessionOptions { run, ..SessionOptions::default() };
    (Session::with_options(group, device.clone(), options), shares)
}

/// One step: its pieces add up to it, and its end is told too.
fn assert_pieces_are_all(told: &[f64], what: &str) {
    let rises = told.windows(2).all(|two| two[0] <= two[1]);
    let [.., last_piece, end] = told else { panic!("{what}: no piece was told: {told:?}") };
    assert!(rises && *last_piece > 0.999 && (*end - 1.0).abs() < 1e-9, "{what}: {told:?}");
}

#[test]
fn the_shares_of_the_pieces_of_a_step_add_up_to_it() {
    // Small bindings cut a call into regions, with pieces of their own.
    for device in devices(1 << 16) {
        for (mask, batch, rows, keys, heads, kv_heads, dim) in [
            ("full", 2, 300, 300, 4, 2, 32),
            ("causal", 1, 700, 700, 3, 1, 64),
            ("documents:0,90,130,301", 1, 301, 301, 2, 1, 8),
            ("full", 1, 1, 3000, 4, 1, 32),
            ("full", 2, 3, 400, 8, 8, 16),
        ] {
            let what = format!("{}, {mask} {batch} x {rows} x {keys}", device.info().name);
            let (mut session, shares) = session(in_process_group(1).remove(0), &device);
            let call = Attention::new().mask(mask.parse().unwrap());
            let q = tensor([batch, rows, heads, dim], 0.3);
            let [k, v] = [0.5, 0.7].map(|seed| tensor([batch, keys, kv_heads, dim], seed));
            let output = session.attend(&call, &q, &k, &v).unwrap();
            assert_pieces_are_all(&shares.take(), &what);
            let (d_o, saved) = (q.clone(), Saved { q, k, v, o: output.o, lse: output.lse_pair });
            session.backward(&call, &saved, &d_o, None).unwrap();
            assert_pieces_are_all(&shares.take(), &format!("{what} backward"));
        }
    }
}

#[test]
fn the_shares_of_a_ring_rise_from_step_to_step_to_the_whole() {
    let told = on_threads(in_process_group(3), |group| {
        let (mut session, shares) = session(group, &Device::cpu());
        let [q, k, v] = [0.3, 0.5, 0.7].map(|seed| tensor([1, 64, 2, 16], seed));
        session.attend(&Attention::new(), &q, &k, &v)?;
        Ok::<_, Error>(shares.take())
    });
    for told in told {
        let told = told.unwrap();
        assert!(told.windows(2).all(|two| two[0] <= two[1]), "{told:?}");
        assert!((told.last().unwrap() - 1.0).abs() < 1e-9, "{told:?}");
        // Each step of three is a third.
        for third in [1.0 / 3.0, 2.0 / 3.0] {
            assert!(told.iter().any(|share| (share - third).abs() < 1e-9), "{told:?}");
        }
    }
}

const HEADS: usize = 8;
/// The bytes of m and l of this many rows are those of a binding.
const ROWS: usize = 1024;
const BINDING: u64 = (ROWS * HEADS * 8) as u64;

fn attend(session: &mut Session, rows: usize) -> Result<Vec<f32>> {
    let q = tensor([1, rows, HEADS, 16], 0.3);
    let [k, v] = [0.5, 0.7].map(|seed| tensor([1, rows, 1, 16], seed));
    session.attend(&Attention::new().mask("window:3,0".parse().unwrap()), &q, &k, &v)?.o.to_vec::<f32>()
}

#[test]
fn a_state_as_large_as_a_binding_is_computed_and_a_larger_one_refused_before_data_moves() {
    let [cpu, gpus @ ..] = &devices(BINDING)[..] else { panic!("there is a CPU") };
    for gpu in gpus {
        let [mut on_gpu, mut on_cpu] =
            [gpu, cpu].map(|device| session(in_process_group(1).remove(0), device).0);
        let error = attend(&mut on_gpu, ROWS + 1).unwrap_err();
        let text = error.to_string();
        assert!(error.is_request() && text.contains("1025 query rows × 8 heads on rank 0"), "{text}");
        assert!(text.contains("65600 bytes") && text.contains("at most 65536 at once"), "{text}");
        assert!(text.contains("use more ranks, fewer heads"), "{text}");
        // The session stays usable, and the largest call that fits gives what the CPU gives.
        let (got, wanted) = (attend(&mut on_gpu, ROWS).unwrap(), attend(&mut on_cpu, ROWS).unwrap());
        let worst = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == ROWS * HEADS * 16 && worst < 1e-5, "{worst}");
    }
}

#[test]
fn a_rank_whose_device_is_too_small_refuses_the_call_of_all_ranks() {
    let [cpu, gpus @ ..] = &devices(BINDING)[..] else { panic!("there is a CPU") };
    for gpu in gpus {
        let ended = on_threads(in_process_group(2), |group| {
            let is_small = group.rank() == Rank(1);
            let (mut session, _) = session(group, if is_small { gpu } else { cpu });
            let error = attend(&mut session, ROWS + 1).unwrap_err();
            attend(&mut session, ROWS)?;
            Ok::<_, Error>(error)
        });
        // All know it from the vote, and say the same.
        for error in ended {
            let error = error.unwrap();
            let text = error.to_string();
            assert!(error.is_request() && text.contains("on rank 1: their sums take 65600 bytes"), "{text}");
        }
    }
}

/// A state may have more rows or heads than the rank's own queries, and fewer.
#[test]
fn states_are_judged_by_the_plan_and_not_by_the_queries_of_a_rank() {
    let ulysses = Execution::new().mesh(Mesh::new(2, 1).unwrap());
    let call = Attention::new().mask("window:3,0".parse().unwrap()).execution(ulysses);
    // Of three heads one rank has two, of all rows.
    for (heads, rows, is_refused) in
        [(3, [2049, 2048], true), (3, [2048, 2048], false), (2, [4097, 10], false)]
    {
        let [cpu, gpus @ ..] = &devices(BINDING)[..] else { panic!("there is a CPU") };
        for gpu in gpus {
            let ended = on_threads(in_process_group(2), |group| {
                let (rank, rows) = (group.rank(), rows[group.rank().0 as usize]);
                let (mut session, _) = session(group, if rank == Rank(0) { gpu } else { cpu });
                let [q, k, v] = [0.3, 0.5, 0.7].map(|seed| tensor([1, rows, heads, 16], seed));
                session.attend(&call, &q, &k, &v).map(drop)
            });
            for ended in ended {
                assert_eq!(ended.is_err(), is_refused, "{heads} {rows:?} {ended:?}");
                assert!(ended.err().is_none_or(|error| error.is_request()));
            }
        }
    }
}
