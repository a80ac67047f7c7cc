//! Devices that go away: everything that waits must end, with an error that names the device.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use bytes::Bytes;
use futures_util::future::join_all;
use kyklos::backend::Backend;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos::host::shard;
use kyklos::{Dtype, Error, Mesh, PlacementKind, Result, Split, Strategy, plan_forward};
use kyklos_backend_suite::{DEADLINE, Prepared, dense_set, proved, run_alone, run_rank};
use kyklos_oracle::inputs::cases;
use kyklos_transport::in_process_group;

use crate::{Claim, open};

pub(crate) const CLAIMS: &[Claim] = &[
    ("ends downloads and waits when the device is lost", |backend| Box::pin(ends_waits(backend))),
    ("ends every rank when one rank's device is lost", |backend| Box::pin(ends_ranks(backend))),
    ("works on a device that was opened after a loss", |backend| Box::pin(opened_anew(backend))),
];

fn names<T: std::fmt::Debug>(device: &str, got: Result<T>) {
    match got {
        Err(Error::Device { device: named, .. }) => assert_eq!(named, device),
        other => panic!("expected a lost {device}, got {other:?}"),
    }
}

async fn ends_waits(backend: &WgpuBackend) -> String {
    let name = backend.info().name.clone();
    let mut buffer = backend.upload("data", Bytes::from(vec![1; 1 << 20])).unwrap();
    let download = backend.download(&mut buffer, 0..1 << 20);
    let mut wait = pin!(backend.wait());
    let began = poll_fn(|context| Poll::Ready(wait.as_mut().poll(context))).await;
    assert!(began.is_pending());
    backend.destroy();
    names(&name, download.await);
    names(&name, wait.await);
    for _ in 0..2 {
        names(&name, backend.alloc("more", 16));
        names(&name, backend.write(&mut buffer, 0, &[0; 16]));
        names(&name, backend.download(&mut buffer, 0..16).await);
        names(&name, backend.wait().await);
    }
    String::new()
}

fn prepared() -> Prepared {
    let case = cases().into_iter().find(|case| case.name == "one row beyond two tiles").unwrap();
    Prepared::new(case, Dtype::F32)
}

async fn ends_ranks(backend: &WgpuBackend) -> String {
    let prepared = prepared();
    let mesh = Mesh::new(1, 2).unwrap();
    let set =
        plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring).unwrap();
    let lost = open(WgpuOptions::default()).await.unwrap();
    let (lost, plans) = (&lost, &proved(&set));
    let ranks = in_process_group(2).into_iter().map(async |transport| {
        let first = transport.rank().0 == 0;
        let part = shard(&set, transport.rank(), &prepared.tensors).unwrap();
        let device = if first { backend } else { lost };
        let mut running = Box::pin(run_rank(device, transport.clone(), plans, part));
        if !first {
            // When it has agreed to run, and sent its first block.
            for _ in 0..3 {
                let now = poll_fn(|context| Poll::Ready(running.as_mut().poll(context))).await;
                assert!(now.is_pending());
                kyklos::backend::yield_now().await;
            }
            lost.destroy();
        }
        let output = running.await;
        let _ = transport.close(DEADLINE).await;
        output.map(|_| ())
    });
    let outputs: Vec<Result<()>> = join_all(ranks).await;
    let [first, second] = &outputs[..] else { panic!("two ranks") };
    names(&lost.info().name, second.clone());
    let error = first.clone().unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
    backend.wait().await.unwrap();
    error
}

async fn opened_anew(backend: &WgpuBackend) -> String {
    let prepared = prepared();
    let set = dense_set(&prepared.problem);
    backend.destroy();
    let again = open(WgpuOptions::default()).await.unwrap();
    let whole = run_alone(&again, &set, &prepared).await;
    prepared.judge(&whole, &again.info().name).assert_within(&prepared.dense_limit());
    names(&backend.info().name, backend.wait().await);
    String::new()
}
