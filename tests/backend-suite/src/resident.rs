//! Layers and caches whose tensors never leave a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use kyklos::backend::{Backend, Device, Threaded};
use kyklos::local::on_threads;
use kyklos::{
    Attention, CacheOptions, Dtype, Execution, Mask, Mesh, Session, SessionOptions, Strategy, Tensor,
};
use kyklos_oracle::oracle::{Oracle, OracleMask, OracleProblem, OracleTerm, Values};
use kyklos_transport::in_process_group;

use crate::observed::Observed;

/// Runs `layers` layers on three ranks of one process and one device, the output of a layer as the
/// input of the next one. No byte of a tensor goes through the host; staged in host memory, the
/// same layers give the same bytes, and the counter counts.
pub fn layers_stay_on_the_device<B: Backend + Threaded + 'static>(backend: B, layers: usize)
where
    B::Buffer: Threaded + 'static,
{
    let bytes = Arc::new(AtomicU64::new(0));
    let device = Device::new(Observed { backend, observer: bytes.clone() });
    let options = SessionOptions::default();
    let run = |sessions: Vec<Session>| {
        let barrier = Barrier::new(3);
        let threads = |mut session: Session| {
            let tokens = [20, 0, 13][session.rank().0 as usize];
            let values = (0..tokens * 4 * 32).map(|index| (index as f32 * 0.71).sin()).collect();
            let mut hidden = Tensor::new([1, tokens, 4, 32], values).unwrap().to_device(&device).unwrap();
            barrier.wait();
            let before = bytes.load(Ordering::Relaxed);
            for (mesh, strategy) in
                [((3, 1), Strategy::Ulysses), ((1, 3), Strategy::Ring)].into_iter().cycle().take(layers)
            {
                let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
                let execution = Execution::new().mesh(mesh).strategy(strategy);
                let call = Attention::new().mask(Mask::causal()).execution(execution);
                hidden = session.attend(&call, &hidden, &hidden, &hidden).unwrap().o;
            }
            pollster::block_on(device.wait()).unwrap();
            barrier.wait();
            let moved = bytes.load(Ordering::Relaxed) - before;
            barrier.wait();
            (moved, hidden.to_vec::<f32>().unwrap())
        };
        let transports = sessions.iter().map(|session| session.group().clone()).collect();
        let sessions = std::sync::Mutex::new(sessions.into_iter().map(Some).collect::<Vec<_>>());
        on_threads(transports, |transport| {
            let session = sessions.lock().unwrap()[transport.rank().0 as usize].take();
            threads(session.unwrap())
        })
    };
    let resident = run(Session::on_one_device(in_process_group(3), &device, &options));
    let staged = in_process_group(3).into_iter();
    let staged =
        run(staged.map(|rank| Session::with_options(rank, device.clone(), options.clone())).collect());
    for ((moved, resident), (staged_moved, staged)) in resident.iter().zip(&staged) {
        assert_eq!(*moved, 0, "bytes between host and device");
        assert!(*staged_moved > 0, "the counter counts");
        assert_eq!(resident, staged);
    }
}

/// Appends a prompt of two batch entries to a cache of three ranks of one process and one device,
/// each rank with tokens of its own; then tokens that all ranks pass, one by one. No byte of a
/// tensor goes through the host, all ranks get the same bytes, and the rows are those of one call
/// over all tokens.
pub fn caches_stay_on_the_device<B: Backend + Threaded + 'static>(backend: B)
where
    B::Buffer: Threaded + 'static,
{
    let bytes = Arc::new(AtomicU64::new(0));
    let device = Device::new(Observed { backend, observer: bytes.clone() });
    let values = |tokens: std::ops::Range<usize>, heads: usize, factor: f32| -> Vec<f32> {
        let row = |batch: usize| tokens.clone().map(move |token| (batch, token));
        let values = (0..2).flat_map(row).flat_map(|(batch, token)| {
            (0..heads * 32).map(move |index| (((batch * 97 + token) * 131 + index) as f32 * factor).sin())
        });
        values.collect()
    };
    let rows = |tokens: std::ops::Range<usize>, heads: usize, factor: f32| {
        let tensor = Tensor::new([2, tokens.len(), heads, 32], values(tokens, heads, factor)).unwrap();
        tensor.to_device(&device).unwrap()
    };
    let sequence = |tokens: std::ops::Range<usize>| {
        [rows(tokens.clone(), 4, 0.71), rows(tokens.clone(), 2, 0.37), rows(tokens, 2, 0.53)]
    };
    let mask = Mask::window(Some(20), Some(0));
    let sessions = Session::on_one_device(in_process_group(3), &device, &SessionOptions::default());
    let transports = sessions.iter().map(|session| session.group().clone()).collect();
    let sessions = std::sync::Mutex::new(sessions.into_iter().map(Some).collect::<Vec<_>>());
    let barrier = Barrier::new(3);
    let outputs = on_threads(transports, |transport| {
        let mut session = sessions.lock().unwrap()[transport.rank().0 as usize].take().unwrap();
        let own = [0..6, 6..6, 6..15][session.rank().0 as usize].clone();
        let (prompt, decoded) = (sequence(own), (15..40).map(|token| sequence(token..token + 1)));
        let decoded: Vec<_> = decoded.collect();
        barrier.wait();
        let before = bytes.load(Ordering::Relaxed);
        let options = CacheOptions::new([2, 2, 32], Dtype::F32).block(4).window(24).rollback(2);
        let mut cache = session.kv_cache(options).unwrap();
        let call = Attention::new().mask(mask.clone());
        let [q, k, v] = &prompt;
        let mut outputs = vec![session.attend_cached(&call, &mut cache, q, k, v).unwrap()];
        let call = call.execution(Execution::new().same_queries());
        for [q, k, v] in &decoded {
            // A rejected token first.
            session.attend_cached(&call, &mut cache, q, v, k).unwrap();
            cache.truncate(cache.len() - 1).unwrap();
            outputs.push(session.attend_cached(&call, &mut cache, q, k, v).unwrap());
        }
        pollster::block_on(device.wait()).unwrap();
        barrier.wait();
        assert_eq!(bytes.load(Ordering::Relaxed), before, "bytes between host and device");
        barrier.wait();
        outputs.into_iter().map(|output| output.o.to_vec::<f32>().unwrap()).collect::<Vec<_>>()
    });
    let problem = OracleProblem {
        batch: 2,
        q_len: 40,
        kv_len: 40,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 32,
        scale: f64::from(1.0 / 32f32.sqrt()),
        softcap: None,
        mask: OracleMask::full().and(OracleTerm::Window { left: 20, right: 0 }),
        q_offset: 0,
        sinks: vec![],
    };
    let [q, k, v] = [(4, 0.71), (2, 0.37), (2, 0.53)].map(|(heads, factor)| values(0..40, heads, factor));
    let oracle = Oracle::new(&problem, Values::F32(&q), Values::F32(&k), Values::F32(&v)).unwrap();
    let whole: Vec<f32> = (0..2)
        .flat_map(|batch| (0..40).flat_map(move |token| (0..4).map(move |head| (batch, token, head))))
        .flat_map(|(batch, token, head)| oracle.row(batch, token, head).0)
        .map(|value| value as f32)
        .collect();
    let row = 4 * 32;
    for (rank, outputs) in outputs.iter().enumerate() {
        let tokens = [0..6, 6..6, 6..15].into_iter().nth(rank).into_iter();
        let calls = tokens.chain((15..40).map(|token| token..token + 1)).zip(outputs);
        for (tokens, output) in calls {
            let expected = (0..2).flat_map(|batch| {
                whole[(batch * 40 + tokens.start) * row..(batch * 40 + tokens.end) * row].iter()
            });
            assert_eq!(output.len(), 2 * tokens.len() * row);
            let far = output.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Values of size 1 or less, sums of at most 21 of them in f32.
            assert!(far < 4e-6, "rank {rank}, tokens {tokens:?}: {far}");
        }
    }
    assert!(
        outputs[1][1..] == outputs[0][1..] && outputs[2][1..] == outputs[0][1..],
        "the same bytes on all ranks"
    );
}
