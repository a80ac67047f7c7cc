//! Buffers that calls leave, and that later calls use again.

use kyklos::backend::Device;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::local::on_threads;
use kyklos::{Attention, Mask, Output, Session, SessionOptions, Tensor};
use kyklos_transport::in_process_group;

pub(crate) const ALL: [(&str, fn()); 3] = [
    ("the_second_call_of_a_shape_makes_no_buffer", the_second_call_of_a_shape_makes_no_buffer),
    ("outputs_that_a_caller_holds_stay_as_they_are", outputs_that_a_caller_holds_stay_as_they_are),
    ("ranks_that_share_a_device_share_its_buffers", ranks_that_share_a_device_share_its_buffers),
];

fn made(device: &Device) -> u64 {
    device.backend::<WgpuBackend>().unwrap().buffers_made()
}

fn tensor(device: &Device, tokens: usize, heads: usize, seed: f32) -> Tensor {
    let values = (0..tokens * heads * 32).map(|index| (index as f32 * 0.31 + seed).sin()).collect();
    Tensor::new([1, tokens, heads, 32], values).unwrap().to_device(device).unwrap()
}

fn call(session: &mut Session, tokens: usize, seed: f32) -> Output {
    let device = session.device().clone();
    let (q, kv) = (tensor(&device, tokens, 4, seed), tensor(&device, tokens, 2, seed + 0.5));
    session.attend(&Attention::new().mask(Mask::causal()), &q, &kv, &kv).unwrap()
}

fn values(output: &Output) -> [Vec<f32>; 2] {
    [&output.o, &output.lse].map(|tensor| tensor.to_vec().unwrap())
}

/// Few rows take the decoding kernels, many rows the others.
fn the_second_call_of_a_shape_makes_no_buffer() {
    let device = Device::wgpu(0).unwrap();
    let alone = || Session::new(in_process_group(1).remove(0), device.clone());
    for tokens in [1, 5, 200] {
        let mut session = alone();
        let right = [0.1, 0.2].map(|seed| values(&call(&mut session, tokens, seed)));
        let before = made(&device);
        for seed in [0.1, 0.2, 0.1] {
            let right = &right[usize::from(seed > 0.15)];
            assert_eq!(&values(&call(&mut session, tokens, seed)), right, "{tokens} tokens");
        }
        assert_eq!(made(&device), before, "{tokens} tokens");
        drop(session);
        call(&mut alone(), tokens, 0.1);
        assert!(made(&device) > before, "the end of a session frees the buffers of its calls");
    }
}

fn outputs_that_a_caller_holds_stay_as_they_are() {
    let device = Device::wgpu(0).unwrap();
    let mut session = Session::new(in_process_group(1).remove(0), device.clone());
    let first = call(&mut session, 40, 0.1);
    let right = values(&first);
    // The caller's handle of the buffer outlives the tensor.
    let buffer = first.o.wgpu_buffer().unwrap();
    let lse = first.lse.clone();
    let (shape, dtype) = (first.o.shape(), first.o.dtype());
    drop(first);
    for seed in [0.2, 0.3, 0.4] {
        assert_ne!(values(&call(&mut session, 40, seed)), right);
    }
    let again = Tensor::from_wgpu(shape, dtype, &device, buffer).unwrap();
    assert_eq!([again.to_vec::<f32>().unwrap(), lse.to_vec().unwrap()], right);
}

/// Four threads submit to one queue, and take buffers that other threads have just dropped.
fn ranks_that_share_a_device_share_its_buffers() {
    let device = Device::wgpu(0).unwrap();
    let run = |rounds: usize| {
        let group = in_process_group(4);
        let sessions = Session::on_one_device(group.clone(), &device, &SessionOptions::default());
        let sessions = std::sync::Mutex::new(sessions.into_iter().map(Some).collect::<Vec<_>>());
        on_threads(group, |transport| {
            let rank = transport.rank().0 as usize;
            let mut session = sessions.lock().unwrap()[rank].take().unwrap();
            let turns: Vec<_> =
                (0..rounds).map(|turn| values(&call(&mut session, 24, (turn % 3) as f32))).collect();
            turns
        })
    };
    for (rank, turns) in run(12).into_iter().enumerate() {
        for (turn, values) in turns.iter().enumerate() {
            assert_eq!(values, &turns[turn % 3], "rank {rank}, call {turn}");
        }
    }
}
