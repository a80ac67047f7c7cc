//! Calls that helpers share: results are those of one device, whatever becomes of the helpers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::{
    Attention, BiasKind, BiasTensor, Dtype, Execution, Mask, Result, Saved, Session, Tensor, WireFormat,
    half, in_process_group,
};
use kyklos_backend_suite::DoNothing;
use kyklos_helpers::{
    Call, Cuts, DeviceSpeed, HelperEvent, HelperOptions, HelperSpeed, HelperState, LinkSpeed, Owner,
    OwnerOptions, OwnerSpeed, Shape, help,
};

/// Numbers of about normal size, the same for the same arguments.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() + next()).collect()
}

fn tensor(shape: [usize; 4], dtype: Dtype, seed: u64) -> Tensor {
    let values = numbers(shape.iter().product(), seed);
    match dtype {
        Dtype::F32 => Tensor::new(shape, values),
        Dtype::F16 => Tensor::new(shape, values.into_iter().map(half::f16::from_f32).collect()),
        Dtype::Bf16 => Tensor::new(shape, values.into_iter().map(half::bf16::from_f32).collect()),
    }
    .expect("a tensor")
}

fn bytes(tensor: &Tensor) -> Bytes {
    pollster::block_on(tensor.bytes()).expect("its bytes")
}

fn alone() -> Session {
    Session::new(in_process_group(1).remove(0), Device::cpu())
}

/// A helper on a thread of its own, and the calls that it has served.
struct Helper {
    thread: Option<JoinHandle<Result<()>>>,
    served: Arc<AtomicU64>,
}

impl Helper {
    fn join(owner: &mut Owner, name: &str, device: Device, memory_bytes: Option<u64>) -> Self {
        let mut groups = in_process_group(2);
        let (theirs, ours) = (groups.remove(1), groups.remove(0));
        let served = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&served);
        let on_event = move |event: &HelperEvent| {
            if matches!(event, HelperEvent::Served { .. }) {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        };
        let options = HelperOptions { memory_bytes, on_event: Arc::new(on_event) };
        let thread = std::thread::spawn(move || help(theirs, &device, &options));
        owner.add(name, ours).expect("a helper");
        Self { thread: Some(thread), served }
    }

    /// After the owner is gone.
    fn served(mut self) -> u64 {
        self.thread.take().expect("joined once").join().expect("its thread").expect("a good end");
        self.served.load(Ordering::Relaxed)
    }
}

fn always() -> Owner {
    let mut options = OwnerOptions::default();
    options.always = true;
    Owner::new(options)
}

struct Case {
    shape: Shape,
    call: Call,
}

impl Case {
    fn tensors(&self) -> [Tensor; 4] {
        let Shape { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype } = self.shape;
        let q = [batch, q_len, q_heads, head_dim].map(|extent| extent as usize);
        let kv = [batch, kv_len, kv_heads, head_dim].map(|extent| extent as usize);
        [tensor(q, dtype, 1), tensor(kv, dtype, 2), tensor(kv, dtype, 3), tensor(q, dtype, 4)]
    }

    fn attention(&self) -> Attention {
        let Call { mask, scale, softcap, sinks, q_offset, bias, .. } = &self.call;
        let mut attention = Attention::new().mask(mask.clone()).sinks(sinks.clone()).q_offset(*q_offset);
        if let Some(scale) = scale {
            attention = attention.scale(*scale);
        }
        if let Some(softcap) = softcap {
            attention = attention.softcap(*softcap);
        }
        if let Some((tensor, rows)) = bias {
            attention = attention.bias(*tensor, rows.clone());
        }
        attention
    }
}

fn shape(batch: u32, q_len: u32, kv_len: u32, q_heads: u32, kv_heads: u32, dtype: Dtype) -> Shape {
    Shape { batch, q_len, kv_len, q_heads, kv_heads, head_dim: 32, dtype }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        cases.push(Case { shape: shape(2, 130, 130, 6, 6, dtype), call: Call::default() });
    }
    let causal = Call { mask: Mask::causal(), ..Call::default() };
    // One key/value head: shares are rows.
    cases.push(Case { shape: shape(1, 1100, 1100, 4, 1, Dtype::F32), call: causal.clone() });
    cases.push(Case {
        shape: shape(2, 700, 900, 6, 2, Dtype::F16),
        call: Call { q_offset: 200, ..causal.clone() },
    });
    let options = Call {
        mask: "causal+window:300".parse().unwrap_or_else(|_| Mask::causal()),
        scale: Some(0.3),
        softcap: Some(20.0),
        sinks: (0..8).map(|head| head as f32 - 2.0).collect(),
        ..Call::default()
    };
    cases.push(Case { shape: shape(1, 600, 600, 8, 4, Dtype::F32), call: options });
    // A row for each query and head; one row for all; words of bits.
    let additive = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 4, shared_rows: false };
    let rows: Vec<u8> = numbers(600 * 4 * 600, 9).into_iter().flat_map(f32::to_ne_bytes).collect();
    let bias = Some((additive, rows.into()));
    cases.push(Case { shape: shape(1, 600, 600, 4, 1, Dtype::F32), call: Call { bias, ..Call::default() } });
    let shared = BiasTensor { kind: BiasKind::Mask, batch: 2, heads: 1, shared_rows: true };
    let words = (0..2).flat_map(|entry| BiasTensor::pack((0..300).map(move |key| (key + entry) % 3 != 0)));
    let rows: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
    let bias = Some((shared, rows.into()));
    cases.push(Case { shape: shape(2, 300, 300, 4, 2, Dtype::F16), call: Call { bias, ..Call::default() } });
    cases
}

#[test]
fn shared_calls_are_those_of_one_device_to_the_bit() {
    let (mut owner, mut session) = (always(), alone());
    let helpers: Vec<_> =
        ["one", "two"].map(|name| Helper::join(&mut owner, name, Device::cpu(), None)).into_iter().collect();
    for case in cases() {
        let [q, k, v, _] = case.tensors();
        let attention = case.attention().execution(Execution::new().inference(true));
        let wanted = alone().attend(&attention, &q, &k, &v).unwrap().o;
        // The first call asks how fast the helpers are.
        for _ in 0..2 {
            let o = owner.attend(&mut session, &case.call, &q, &k, &v).unwrap();
            assert_eq!(o.shape(), q.shape());
            assert!(bytes(&o) == bytes(&wanted), "{:?}", case.shape);
            owner.settle(Duration::from_secs(60));
        }
    }
    let told = owner.helpers();
    assert!(
        told.iter().all(|helper| helper.state == HelperState::Ready && helper.bytes_sent > 0),
        "{told:?}"
    );
    drop(owner);
    let served: Vec<u64> = helpers.into_iter().map(Helper::served).collect();
    assert!(served.iter().sum::<u64>() >= cases().len() as u64 && !served.contains(&0), "{served:?}");
}

/// Speeds decide where a call is cut, and nothing else.
#[test]
fn a_call_has_the_same_bits_wherever_it_is_cut() {
    let call = Call { mask: Mask::causal(), ..Call::default() };
    let case = Case { shape: shape(1, 1100, 1100, 4, 1, Dtype::F32), call };
    let [q, k, v, _] = case.tensors();
    let attend = |case: &Case, [q, k, v]: [&Tensor; 3]| {
        let attention = case.attention().execution(Execution::new().inference(true));
        alone().attend(&attention, q, k, v).unwrap().o
    };
    let wanted = bytes(&attend(&case, [&q, &k, &v]));
    let row_bytes = wanted.len() / 1100;
    let device = DeviceSpeed { pairs_per_s: 1e9, step_s: 1e-6 };
    let owner = OwnerSpeed { device, alone_pairs_per_s: 1e9, copies_bytes_per_s: 1e12 };
    let mut seen = Vec::new();
    // Helpers and links of all speeds: slower and faster than the owner.
    for step in 0..400_u32 {
        let [pairs_per_s, bytes_per_s] =
            [step % 20, step / 20].map(|step| 10_f64.powf(7.0 + f64::from(step) * 0.2));
        let link = LinkSpeed { up_bytes_per_s: bytes_per_s, down_bytes_per_s: bytes_per_s, hop_s: 1e-6 };
        let device = DeviceSpeed { pairs_per_s, step_s: 1e-6 };
        let helper = HelperSpeed { device, link, memory_bytes: None, slowness: 1.0 };
        let forecast = Cuts::new(&case.call, &case.shape, 2)
            .unwrap()
            .forecast(&owner, &[helper, helper][step as usize % 2..]);
        for part in forecast.own.iter().chain(forecast.shares.iter().flat_map(|share| &share.parts)) {
            if seen.contains(part) {
                continue;
            }
            let of_part = Case { shape: part.shape(&case.shape), call: part.call(&case.call, &case.shape) };
            let q = part.of_queries(&q, &case.shape).unwrap();
            let o = bytes(&attend(&of_part, [&q, &k, &v]));
            let [start, end] = [part.rows.start, part.rows.end].map(|row| row as usize * row_bytes);
            assert!(o == wanted[start..end], "{part:?}");
            seen.push(part.clone());
        }
    }
    assert!(seen.len() > 4, "{seen:?}");
}

/// Sums of a gradient may have another order with other heads beside it: nothing else may differ.
fn check_gradient(gradient: &Tensor, wanted: &Tensor) {
    use kyklos_oracle::oracle::Values;
    use kyklos_oracle::tolerance::{GradientComparison, GradientLimit};

    let floats = |tensor: &Tensor| -> Vec<f32> {
        match tensor.dtype() {
            Dtype::F32 => tensor.to_vec::<f32>().expect("its numbers"),
            Dtype::F16 => {
                tensor.to_vec::<half::f16>().expect("its numbers").into_iter().map(f32::from).collect()
            }
            Dtype::Bf16 => {
                tensor.to_vec::<half::bf16>().expect("its numbers").into_iter().map(f32::from).collect()
            }
        }
    };
    let dtype = match wanted.dtype() {
        Dtype::F32 => kyklos_oracle::oracle::Dtype::F32,
        Dtype::F16 => kyklos_oracle::oracle::Dtype::F16,
        Dtype::Bf16 => kyklos_oracle::oracle::Dtype::Bf16,
    };
    let (gradient, wanted) = (floats(gradient), floats(wanted));
    let expected: Vec<f64> = wanted.iter().copied().map(f64::from).collect();
    let slack = vec![0.0; expected.len()];
    let compared =
        |of: &[f32]| GradientComparison::new("a gradient", Values::F32(of), &expected, 0.0, &slack);
    compared(&gradient).within(&GradientLimit::parallel(dtype, &compared(&wanted))).expect("its numbers");
}

#[test]
fn gradients_are_those_of_one_device() {
    let (mut owner, mut session) = (always(), alone());
    let helper = Helper::join(&mut owner, "one", Device::cpu(), None);
    let mut count = 0;
    for case in cases().into_iter().filter(|case| case.call.sinks.is_empty()) {
        let [q, k, v, d_o] = case.tensors();
        let mut one = alone();
        let output = one.attend(&case.attention(), &q, &k, &v).unwrap();
        let saved = Saved { q: q.clone(), k: k.clone(), v: v.clone(), o: output.o, lse: output.lse_pair };
        let wanted = one.backward(&case.attention(), &saved, &d_o, None).unwrap();
        for _ in 0..2 {
            let gradients = owner.backward(&mut session, &case.call, [&q, &k, &v], &d_o).unwrap();
            for (gradient, wanted) in gradients.iter().zip([&wanted.dq, &wanted.dk, &wanted.dv]) {
                check_gradient(gradient, wanted);
            }
            owner.settle(Duration::from_secs(60));
        }
        count += u64::from(case.shape.kv_heads > 1);
    }
    drop(owner);
    assert!(helper.served() >= count);
}

#[test]
fn rounded_messages_change_a_result_by_their_rounding() {
    let (mut owner, mut session) = (always(), alone());
    let helper = Helper::join(&mut owner, "one", Device::cpu(), None);
    let case = Case { shape: shape(1, 300, 300, 4, 4, Dtype::F32), call: Call::default() };
    let [q, k, v, _] = case.tensors();
    let wanted = owner.attend(&mut session, &case.call, &q, &k, &v).unwrap().to_vec::<f32>().unwrap();
    owner.settle(Duration::from_secs(60));
    for wire in [WireFormat::F16, WireFormat::Int8] {
        let o = owner.attend(&mut session, &Call { wire, ..case.call.clone() }, &q, &k, &v).unwrap();
        let o = o.to_vec::<f32>().unwrap();
        let squares = |pairs: &mut dyn Iterator<Item = f64>| pairs.map(|x| x * x).sum::<f64>().sqrt();
        let error = squares(&mut o.iter().zip(&wanted).map(|(a, b)| f64::from(a - b)));
        let size = squares(&mut wanted.iter().map(|x| f64::from(*x)));
        // Queries and outputs are rounded beside keys and values: √2 times the noise that is expected, with
        // as much again for numbers that are not normal.
        let expected = wire.expected_error(32, 1.0 / 32.0_f32.sqrt());
        assert!(error / size < 4.0 * expected && error > 0.0, "{wire}: {} of {expected}", error / size);
    }
    // What f16 cannot hold is refused, and nothing has been sent.
    let large = Tensor::new([1, 300, 4, 32], vec![1e6_f32; 300 * 4 * 32]).unwrap();
    let call = Call { wire: WireFormat::F16, ..Call::default() };
    assert!(owner.attend(&mut session, &call, &large, &k, &v).unwrap_err().is_request());
    drop(owner);
    assert!(helper.served() > 0);
}

#[test]
fn a_helper_whose_results_are_wrong_is_found_and_not_asked_again() {
    let (mut owner, mut session) = (always(), alone());
    let device = Device::new(DoNothing::open().unwrap());
    let liar = Helper::join(&mut owner, "liar", device, None);
    let case = Case { shape: shape(1, 200, 200, 4, 4, Dtype::F32), call: Call::default() };
    let [q, k, v, _] = case.tensors();
    let wanted =
        alone().attend(&case.attention().execution(Execution::new().inference(true)), &q, &k, &v).unwrap().o;
    for _ in 0..3 {
        let o = owner.attend(&mut session, &case.call, &q, &k, &v).unwrap();
        assert!(bytes(&o) == bytes(&wanted));
        owner.settle(Duration::from_secs(60));
    }
    let told = owner.helpers();
    assert_eq!(told[0].state, HelperState::Lied, "{told:?}");
    assert!(told[0].why.contains("computed again"), "{told:?}");
    assert_eq!(liar.served(), 1);
}

#[test]
fn a_helper_without_memory_refuses_and_the_owner_computes() {
    let (mut owner, mut session) = (always(), alone());
    let small = Helper::join(&mut owner, "small", Device::cpu(), Some(1000));
    let case = Case { shape: shape(1, 200, 200, 4, 4, Dtype::F32), call: Call::default() };
    let [q, k, v, _] = case.tensors();
    for _ in 0..3 {
        owner.attend(&mut session, &case.call, &q, &k, &v).unwrap();
        owner.settle(Duration::from_secs(60));
    }
    drop(owner);
    assert_eq!(small.served(), 0);
}

#[test]
fn helpers_may_go_between_calls_and_come_again() {
    let (mut owner, mut session) = (always(), alone());
    let case = Case { shape: shape(1, 300, 300, 8, 8, Dtype::F32), call: Call::default() };
    let [q, k, v, _] = case.tensors();
    let wanted =
        alone().attend(&case.attention().execution(Execution::new().inference(true)), &q, &k, &v).unwrap().o;
    for round in 0..3 {
        let mut groups = in_process_group(2);
        let (theirs, ours) = (groups.remove(1), groups.remove(0));
        let kill = theirs.clone();
        let thread = std::thread::spawn(move || help(theirs, &Device::cpu(), &HelperOptions::default()));
        owner.add("guest", ours).unwrap();
        for call in 0..4 {
            if call == 3 {
                kill.abort(kyklos::transport::Abort {
                    culprit: kyklos::Rank(1),
                    cause: kyklos::transport::AbortCause::Failed("pulled the plug".into()),
                    progress: kyklos::transport::Progress::default(),
                });
            }
            let o = owner.attend(&mut session, &case.call, &q, &k, &v).unwrap();
            assert!(bytes(&o) == bytes(&wanted), "round {round}, call {call}");
            owner.settle(Duration::from_secs(60));
        }
        assert_eq!(owner.helpers()[0].state, HelperState::Lost);
        assert!(thread.join().unwrap().is_err());
    }
}

#[test]
fn wrong_calls_are_refused_as_by_a_session() {
    let (mut owner, mut session) = (always(), alone());
    let helper = Helper::join(&mut owner, "one", Device::cpu(), None);
    let case = Case { shape: shape(1, 200, 200, 4, 4, Dtype::F32), call: Call::default() };
    let [q, k, v, _] = case.tensors();
    let short = tensor([1, 199, 4, 32], Dtype::F32, 5);
    assert!(owner.attend(&mut session, &case.call, &q, &k, &short).unwrap_err().is_request());
    let other = tensor([1, 200, 4, 32], Dtype::F16, 5);
    assert!(owner.attend(&mut session, &case.call, &q, &other, &v).unwrap_err().is_request());
    let three = tensor([1, 200, 3, 32], Dtype::F32, 5);
    assert!(owner.attend(&mut session, &case.call, &q, &three, &three).unwrap_err().is_request());
    let sinks = Call { sinks: vec![0.0; 3], ..Call::default() };
    assert!(owner.attend(&mut session, &sinks, &q, &k, &v).unwrap_err().is_request());
    assert!(owner.attend(&mut session, &case.call, &q, &k, &v).is_ok());
    drop(owner);
    helper.served();
}
