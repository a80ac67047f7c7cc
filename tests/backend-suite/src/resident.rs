//! Layers whose tensors never leave a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use kyklos::backend::{Backend, Device, Threaded};
use kyklos::local::on_threads;
use kyklos::{Attention, Execution, Mask, Mesh, Session, SessionOptions, Strategy, Tensor};
use kyklos_transport::in_process_group;

use crate::counting::Counting;

/// Runs `layers` layers on three ranks of one process and one device, the output of a layer as the input of the next one. No
/// byte of a tensor goes through the host; staged in host memory, the same layers give the same bytes, and the counter counts.
pub fn layers_stay_on_the_device<B: Backend + Threaded + 'static>(backend: B, layers: usize)
where
    B::Buffer: Threaded + 'static,
{
    let bytes = Arc::new(AtomicU64::new(0));
    let device = Device::new(Counting { backend, bytes: bytes.clone() });
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
        let transports = sessions.iter().map(|session| session.transport().clone()).collect();
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
