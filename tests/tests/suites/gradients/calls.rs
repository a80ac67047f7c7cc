//! Backward passes as calls of sessions: the same bytes again, poisoned memory, a network,
//! refusals.

use std::sync::Arc;

use kyklos::backend::Device;
use kyklos::backend::cpu::CpuBackend;
use kyklos::local::on_threads;
use kyklos::{
    Attention, Dtype, Error, Execution, Gradients, Mask, Mesh, Results, RunOptions, Saved, Session,
    SessionOptions, Strategy, Tensor, WireFormat,
};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, in_process_group};

/// Tokens of each of four ranks; rank 2 has none.
const TOKENS: [usize; 4] = [13, 40, 0, 21];

fn made(tensor: TensorId, shape: [usize; 4], first: usize) -> Tensor {
    let len = shape.iter().product::<usize>() as u64;
    let mut values = vec![0.0_f32; len as usize];
    fill(5, tensor, first as u64 * 1000..first as u64 * 1000 + len, &mut values);
    Tensor::new(shape, values).unwrap()
}

/// q, k, v and the gradient of the output of a rank: 6 query heads, 3 key/value heads, dim 24.
fn tensors(rank: usize) -> [Tensor; 4] {
    let tokens = TOKENS[rank];
    let of = |tensor, heads| made(tensor, [1, tokens, heads, 24], rank);
    [of(TensorId::Q, 6), of(TensorId::K, 3), of(TensorId::V, 3), of(TensorId::OutputGradient, 6)]
}

fn saved(session: &mut Session, call: &Attention, [q, k, v]: [&Tensor; 3]) -> kyklos::Result<Saved> {
    let output = session.attend(call, q, k, v)?;
    Ok(Saved { q: q.clone(), k: k.clone(), v: v.clone(), o: output.o, lse: output.lse_pair })
}

/// dq, dk and dv of all ranks, as bytes.
fn bytes(
    group: Vec<Group>,
    call: &Attention,
    session: impl Fn(Group) -> Session + Sync,
) -> Vec<[Vec<u8>; 3]> {
    on_threads(group, |transport| {
        let [q, k, v, d_o] = tensors(transport.rank().0 as usize);
        let mut session = session(transport);
        let saved = saved(&mut session, call, [&q, &k, &v]).unwrap();
        let Gradients { dq, dk, dv, .. } = session.backward(call, &saved, &d_o, None).unwrap();
        [dq, dk, dv].map(|tensor| pollster::block_on(tensor.bytes()).unwrap().to_vec())
    })
}

fn on_cpu(transport: Group) -> Session {
    Session::new(transport, Device::cpu())
}

#[test]
fn the_same_plan_gives_the_same_bytes_with_any_number_of_threads_and_over_quic() {
    for strategy in [Strategy::Ring, Strategy::TwoWay, Strategy::Gather] {
        let call = Attention::new().mask(Mask::causal()).execution(Execution::new().strategy(strategy));
        let first = bytes(in_process_group(4), &call, on_cpu);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let pool = Arc::new(pool);
            bytes(in_process_group(4), &call, move |transport| {
                Session::new(transport, Device::from(CpuBackend::with_pool(pool.clone())))
            })
        };
        assert_eq!(first, on(1), "{strategy}");
        assert_eq!(first, on(3), "{strategy}");
        assert_eq!(first, bytes(quic_loopback_group(4).unwrap(), &call, on_cpu), "{strategy}");
    }
}

/// Elements that f16 holds exactly lose nothing on an f16 wire, and sums of gradients travel in
/// f32. So the bytes are the same. Others lose digits, so the wire did convert.
#[test]
fn a_wire_of_f16_changes_nothing_but_what_f16_cannot_hold() {
    let rounded = |tensor: Tensor| {
        let values: Vec<f32> = tensor.to_vec::<f32>().unwrap();
        let values = values.into_iter().map(|value| half::f16::from_f32(value).to_f32()).collect();
        Tensor::new(tensor.shape(), values).unwrap()
    };
    let run = |call: &Attention, round: bool| {
        on_threads(in_process_group(4), |transport| {
            let given = tensors(transport.rank().0 as usize);
            let [q, k, v, d_o] = if round { given.map(rounded) } else { given };
            let mut session = on_cpu(transport);
            // The forward pass is that of the wire `same`: its output and log-sum-exp are inputs here.
            let saved = saved(&mut session, &Attention::new().mask(Mask::causal()), [&q, &k, &v]).unwrap();
            let Gradients { dq, dk, dv, .. } = session.backward(call, &saved, &d_o, None).unwrap();
            [dq, dk, dv].map(|tensor| pollster::block_on(tensor.bytes()).unwrap().to_vec())
        })
    };
    for (mesh, strategy) in [((1, 4), Strategy::Ring), ((2, 2), Strategy::Unified)] {
        let on = |wire| {
            let execution =
                Execution::new().mesh(Mesh::new(mesh.0, mesh.1).unwrap()).strategy(strategy).wire(wire);
            Attention::new().mask(Mask::causal()).execution(execution)
        };
        let (same, f16) = (on(WireFormat::Same), on(WireFormat::F16));
        assert_eq!(run(&same, true), run(&f16, true), "{strategy}");
        assert_ne!(run(&same, false), run(&f16, false), "{strategy}");
    }
}

#[test]
fn no_gradient_reads_memory_that_no_step_wrote() {
    poison_changes_nothing(|transport, poison| {
        let run = RunOptions { poison, ..RunOptions::default() };
        Session::with_options(transport, Device::cpu(), SessionOptions { run, ..SessionOptions::default() })
    });
}

/// `session` makes sessions whose memory holds NaN at first, or not.
pub fn poison_changes_nothing(session: impl Fn(Group, bool) -> Session + Sync) {
    for (mesh, strategy) in
        [((1, 4), Strategy::Ring), ((2, 2), Strategy::Unified), ((4, 1), Strategy::Chunked)]
    {
        let execution = Execution::new().mesh(Mesh::new(mesh.0, mesh.1).unwrap()).strategy(strategy);
        let call = Attention::new().mask(Mask::window(Some(9), Some(2))).execution(execution);
        let clean = bytes(in_process_group(4), &call, |transport| session(transport, false));
        let poisoned = bytes(in_process_group(4), &call, |transport| session(transport, true));
        assert_eq!(clean, poisoned, "{strategy}");
    }
}

#[test]
fn what_has_no_backward_pass_is_refused_on_all_ranks_and_the_session_stays_usable() {
    let plain = Attention::new().mask(Mask::causal());
    let with = |execution: Execution| plain.clone().execution(execution);
    let cases = [
        (with(Execution::new().fixed_order(true)), "a backward pass in a fixed order"),
        (with(Execution::new().results(Results::All)), "a backward pass of results on other ranks"),
        (with(Execution::new().strategy(Strategy::Ring).wire(WireFormat::Int8)), "with int8 on the wire"),
    ];
    on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0 as usize;
        let [q, k, v, d_o] = tensors(rank);
        let mut session = on_cpu(transport);
        let saved = saved(&mut session, &plain, [&q, &k, &v]).unwrap();
        for (call, reason) in &cases {
            let error = session.backward(call, &saved, &d_o, None).unwrap_err();
            assert!(error.is_request() && error.to_string().contains(reason), "{error}");
        }
        // A gradient of another shape, on one rank.
        let other = if rank == 1 { &q.clone() } else { &d_o };
        let wrong = made(TensorId::Q, [1, 3, 6, 24], 0);
        let given = if rank == 1 { &wrong } else { other };
        let error = session.backward(&plain, &saved, given, None).unwrap_err();
        assert!(error.to_string().contains("of shape [1, 3, 6, 24]"), "{error}");
        session.backward(&plain, &saved, &d_o, None).unwrap();
    });
}

#[test]
fn ranks_of_which_one_attends_and_one_goes_back_get_an_error() {
    let call = Attention::new();
    on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0 as usize;
        let [q, k, v, d_o] = tensors(rank);
        let mut session = on_cpu(transport);
        let saved = saved(&mut session, &call, [&q, &k, &v]).unwrap();
        let error = match rank {
            0 => session.backward(&call, &saved, &d_o, None).unwrap_err(),
            _ => session.attend(&call, &q, &k, &v).unwrap_err(),
        };
        assert!(matches!(error, Error::Transport(_)), "{error}");
    });
}

#[test]
fn forty_layers_go_back_in_reverse_order_with_what_each_has_saved() {
    let layers = crate::amount::amount(8, 40);
    let call = |layer: usize| Attention::new().mask(Mask::causal()).label(format!("layer {layer}"));
    on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0 as usize;
        let [x, k, v, _] = tensors(rank);
        let mut session = on_cpu(transport);
        let mut outstanding: Vec<Saved> = Vec::new();
        let mut hidden = x;
        for layer in 0..layers {
            let saved = saved(&mut session, &call(layer), [&hidden, &k, &v]).unwrap();
            hidden = saved.o.clone();
            outstanding.push(saved);
        }
        let mut gradient = hidden;
        for (layer, saved) in outstanding.iter().enumerate().rev() {
            gradient = session.backward(&call(layer), saved, &gradient, None).unwrap().dq;
        }
        assert_eq!((gradient.shape()[1], gradient.dtype()), (TOKENS[rank], Dtype::F32));
        assert!(gradient.to_vec::<f32>().unwrap().iter().all(|value| value.is_finite()));
        // One plan forward, one backward.
        assert_eq!(session.plans_made(), 2);
    });
}
