//! Lost devices, missing memory, and copies while the device works.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuBuffer, WgpuOptions};
use kyklos::backend::{Backend, Control, DeviceInfo, Extent, Layout, State, StateMut};
use kyklos::{AttentionProblem, Dtype, Error, Mask, Result};
use libtest_mimic::Completion;
use pollster::block_on;

use crate::Test;
use crate::case::Case;

pub(crate) const ALL: &[(&str, Test)] = &[
    ("a_device_lost_in_the_middle_of_attend_is_an_error", a_device_lost_in_the_middle_of_attend_is_an_error),
    ("a_device_lost_ends_downloads_and_waits", a_device_lost_ends_downloads_and_waits),
    ("every_call_on_a_lost_device_names_it", every_call_on_a_lost_device_names_it),
    ("a_lost_device_is_opened_anew", a_lost_device_is_opened_anew),
    ("memory_beyond_the_limit_is_an_error_before_the_dispatch", memory_beyond_the_limit_is_an_error),
    ("a_download_is_done_before_the_attention_behind_it", a_download_is_done_before_the_attention_behind_it),
    ("downloads_share_staging_and_keep_their_bytes", downloads_share_staging_and_keep_their_bytes),
];

/// How often [`work`] attends: more often than the limit of submissions in flight.
const ROUNDS: usize = 8;

fn case() -> Case {
    Case::of(AttentionProblem::new([1, 700, 4, 4, 64], Dtype::F32, Mask::full()).unwrap())
}

fn options_of(info: &DeviceInfo) -> WgpuOptions {
    let kernel = match info.kernel.split('-').next() {
        Some("subgroup") => KernelChoice::SubgroupBroadcast,
        Some("cooperative") => KernelChoice::Cooperative,
        _ => KernelChoice::Portable,
    };
    WgpuOptions { kernel, ..WgpuOptions::default() }
}

/// The result of `test`, which runs on its own thread and on its own device like `backend`. Fails
/// if the test hangs.
fn on_its_own<T: Send + 'static>(
    backend: &WgpuBackend,
    test: impl FnOnce(WgpuBackend) -> T + Send + 'static,
) -> T {
    let options = options_of(backend.info());
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = sender.send(test(WgpuBackend::with_options(0, &options).unwrap()));
    });
    match receiver.recv_timeout(Duration::from_secs(300)) {
        Ok(got) => got,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it ended without a result"))
        }
    }
}

/// Attends [`ROUNDS`] times into the same state, with at least one piece each time.
async fn work(backend: &WgpuBackend, case: &Case, control: &Control) -> Result<()> {
    let shape = case.shape();
    let mut a = backend.alloc("a", shape.a_bytes())?;
    let mut ml = backend.alloc("ml", shape.ml_bytes())?;
    backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape })?;
    for _ in 0..ROUNDS {
        case.attend(backend, &case.kv_blocks[0], &mut a, &mut ml, control).await?;
    }
    Ok(())
}

/// Drives `future` until `pieces` pieces of its work are submitted.
async fn until_pieces<T>(future: &mut (impl Future<Output = T> + Unpin), control: &Control, pieces: u64) {
    poll_fn(|context| {
        let ended = std::pin::Pin::new(&mut *future).poll(context).is_ready();
        assert!(!ended, "the work ended after {} pieces", control.pieces_done());
        if control.pieces_done() >= pieces { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn names<T: std::fmt::Debug>(device: &str, got: Result<T>) {
    match got {
        Err(Error::Device { device: named, .. }) => assert_eq!(named, device),
        other => panic!("expected a lost {device}, got {other:?}"),
    }
}

fn a_device_lost_in_the_middle_of_attend_is_an_error(backend: &WgpuBackend) {
    on_its_own(backend, |backend| {
        let (case, control) = (case(), Control::default());
        let got = block_on(async {
            let mut work = pin!(work(&backend, &case, &control));
            until_pieces(&mut work, &control, 2).await;
            backend.destroy();
            work.await
        });
        names(&backend.info().name, got);
        assert!(control.pieces_done() < 2 * ROUNDS as u64, "{} pieces", control.pieces_done());
    });
}

fn a_device_lost_ends_downloads_and_waits(backend: &WgpuBackend) {
    on_its_own(backend, |backend| {
        let (case, control) = (case(), Control::default());
        let name = backend.info().name.clone();
        let mut buffer = backend.upload("data", Bytes::from(vec![1; 1 << 20])).unwrap();
        let mut late = None;
        block_on(async {
            let mut work = pin!(work(&backend, &case, &control));
            until_pieces(&mut work, &control, 2).await;
            let download = backend.download(&mut buffer, 0..1 << 20);
            drop(backend.download(&mut buffer, 0..1 << 20));
            late = Some(backend.download(&mut buffer, 0..1 << 20));
            let mut wait = pin!(backend.wait());
            // The wait has started.
            let began = poll_fn(|context| Poll::Ready(wait.as_mut().poll(context))).await;
            backend.destroy();
            names(&name, download.await);
            if began.is_pending() {
                names(&name, wait.await);
            }
        });
        // This download outlives its backend.
        drop((buffer, backend));
        names(&name, block_on(late.expect("it was begun")));
    });
}

fn every_call_on_a_lost_device_names_it(backend: &WgpuBackend) {
    on_its_own(backend, |backend| {
        let name = backend.info().name.clone();
        let case = case();
        let shape = case.shape();
        let buffers = || -> Result<[WgpuBuffer; 2]> {
            Ok([backend.alloc("a", shape.a_bytes())?, backend.alloc("ml", shape.ml_bytes())?])
        };
        let ([mut a, mut ml], [from_a, from_ml], [mut o, mut lse]) =
            (buffers().unwrap(), buffers().unwrap(), buffers().unwrap());
        block_on(backend.wait()).unwrap();
        backend.destroy();
        backend.destroy();
        let from = State { a: &from_a, ml: &from_ml, shape };
        // Twice: a lost device stays lost.
        for _ in 0..2 {
            names(&name, backend.alloc("more", 16));
            names(&name, backend.upload("more", Bytes::from_static(&[0; 16])));
            names(&name, backend.write(&mut a, 0, &[0; 16]));
            names(&name, block_on(backend.download(&mut a, 0..16)));
            names(&name, backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }));
            names(&name, backend.merge(&mut StateMut { a: &mut a, ml: &mut ml, shape }, &from));
            names(&name, backend.finalize(&from, &[], Dtype::F32, &mut o, &mut lse));
            let layout = Layout { offset: 0, batch_stride: 64, row_stride: 32, head_stride: 16 };
            let extent = Extent { batch: 1, rows: 2, heads: 2, row_bytes: 16 };
            names(&name, backend.repack((&from_a, layout), (&mut a, layout), extent));
            names(&name, block_on(backend.wait()));
        }
        names(&name, block_on(work(&backend, &case, &Control::default())));
    });
}

fn a_lost_device_is_opened_anew(backend: &WgpuBackend) {
    on_its_own(backend, |lost| {
        let case = Case::of(AttentionProblem::new([1, 67, 2, 1, 64], Dtype::F32, Mask::causal()).unwrap());
        case.check(&lost, "before the loss");
        lost.destroy();
        let again = WgpuBackend::with_options(0, &options_of(lost.info())).unwrap();
        case.check(&again, "on the device opened anew, the lost one still there");
        drop(lost);
        case.check(&again, "on the device opened anew");
    });
}

fn memory_beyond_the_limit_is_an_error(backend: &WgpuBackend) {
    let case = case();
    let shape = case.shape();
    let (a_bytes, ml_bytes) = (shape.a_bytes(), shape.ml_bytes());
    // q, k and v as the case spreads them out, and the state, without the buffers of attend itself.
    let limit = (4 * (24 + 700 * (4 * 72 + 16) + 40) as u64).next_multiple_of(16) * 3;
    let limit = limit + (a_bytes + ml_bytes) as u64;
    let options = WgpuOptions { max_memory_bytes: Some(limit), ..options_of(backend.info()) };
    let small = WgpuBackend::with_options(0, &options).unwrap();
    let mut a = small.alloc("a", a_bytes).unwrap();
    let mut ml = small.alloc("ml", ml_bytes).unwrap();
    let left = limit - (a_bytes + ml_bytes) as u64;
    match small.alloc("too much", limit as usize) {
        Err(Error::OutOfMemory { device, what, asked_bytes, allowed_bytes }) => {
            assert_eq!((device.as_str(), what.as_str()), (small.info().name.as_str(), "too much"));
            assert_eq!((asked_bytes, allowed_bytes), (limit, left));
        }
        other => panic!("{limit} bytes of {left}: {other:?}"),
    }
    let control = Control::default();
    small.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }).unwrap();
    let got = block_on(case.attend(&small, &case.kv_blocks[0], &mut a, &mut ml, &control));
    assert!(matches!(got, Err(Error::OutOfMemory { allowed_bytes: 0, .. })), "{got:?}");
    assert_eq!(control.pieces_done(), 0);
    // The memory of dropped buffers can be allocated again, and the device still works.
    drop((a, ml));
    let data = Bytes::from(vec![7; left as usize / 2]);
    let mut buffer = small.upload("half", data.clone()).unwrap();
    assert_eq!(block_on(small.download(&mut buffer, 0..data.len())).unwrap(), data);
    block_on(small.wait()).unwrap();
}

/// Runs in a process with a memory limit, see `main`.
pub(crate) fn memory_that_the_driver_has_not_is_an_error(backend: &WgpuBackend) -> Completion {
    let asked = 1 << 30;
    let mut held = Vec::new();
    let error = loop {
        match backend.alloc("a gibibyte", asked) {
            Ok(buffer) => held.push(buffer),
            Err(error) => break error,
        }
        if held.len() == 16 {
            return Completion::ignored_with("the driver gives 16 GiB to a process that may have 6");
        }
    };
    let Error::OutOfMemory { device, asked_bytes, allowed_bytes, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((device, asked_bytes), (backend.info().name.clone(), asked as u64));
    assert!(0 < allowed_bytes && allowed_bytes < asked as u64, "{allowed_bytes}");
    // The allowed number of bytes can really be allocated, and the device still works.
    let less = backend.alloc("what is allowed", allowed_bytes as usize).unwrap();
    drop((held, less));
    let mut buffer = backend.upload("data", Bytes::from_static(b"sixteen bytes, !")).unwrap();
    assert_eq!(&block_on(backend.download(&mut buffer, 0..16)).unwrap()[..], b"sixteen bytes, !");
    block_on(backend.wait()).unwrap();
    Completion::Completed
}

fn a_download_is_done_before_the_attention_behind_it(backend: &WgpuBackend) {
    let (case, control) = (case(), Control::default());
    let data: Bytes = (0..1 << 20).map(|i: u32| i.to_le_bytes()[1]).collect();
    let mut buffer = backend.upload("a block", data.clone()).unwrap();
    let mut download = pin!(backend.download(&mut buffer, 0..data.len()));
    // The device still uses and changes the buffer that is being copied.
    backend.write(&mut buffer, 0, &[0xff; 64]).unwrap();
    let mut arrived = None;
    block_on(async {
        let mut work = pin!(work(backend, &case, &control));
        poll_fn(|context| {
            let worked = work.as_mut().poll(context);
            if arrived.is_none()
                && let Poll::Ready(got) = download.as_mut().poll(context)
            {
                arrived = Some((got.unwrap(), worked.is_ready()));
            }
            worked
        })
        .await
        .unwrap();
    });
    let (bytes, ended) = arrived.expect("the attention ended before the download");
    assert!(!ended, "the download ended with the last piece");
    assert_eq!(bytes, data);
    block_on(backend.wait()).unwrap();
}

fn downloads_share_staging_and_keep_their_bytes(backend: &WgpuBackend) {
    let sizes = [64, 4096, 5000, 5100, 70_000, 70_004];
    let data: Vec<Bytes> = sizes.iter().zip(1..).map(|(size, fill)| vec![fill; *size].into()).collect();
    let mut buffers: Vec<_> = data.iter().map(|data| backend.upload("data", data.clone()).unwrap()).collect();
    let mut kept = Vec::new();
    for round in 0..20 {
        let mut downloads = Vec::new();
        for (buffer, size) in buffers.iter_mut().zip(sizes) {
            // This download has started. It is dropped before its end, and it is never polled.
            drop(backend.download(buffer, 0..size));
            downloads.push(backend.download(buffer, 0..size));
            if round % 3 == 0 {
                let mut given_up = backend.download(buffer, 4..size);
                let _ = futures_util::FutureExt::now_or_never(&mut given_up);
            }
        }
        let got: Vec<_> = downloads.into_iter().map(|download| block_on(download).unwrap()).collect();
        assert_eq!(got, data, "round {round}");
        kept.push(got);
    }
    // Later copies overwrite no bytes that were returned earlier.
    assert!(kept.iter().all(|got| *got == data));
}
