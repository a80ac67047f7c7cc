//! Options for tests of a new device: kernels without wgmma, kernels of a file, and how soon a
//! device that hangs counts as lost.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::{Backend, Device, Extent, Layout, ShortWork, StateMut, StateShape};
use kyklos::{Dtype, Result};
use kyklos_backend_suite::fixed_order::case;
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_cuda::{CudaBackend, CudaOptions};
use kyklos_oracle::oracle::OracleMask;
use pollster::block_on;

use crate::gradients;
use crate::scenario::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut older = Scenario::new("without wgmma Hopper gets the kernels of sm_80", "seed=81", || {
        let options = CudaOptions { wgmma: false, ..CudaOptions::default() };
        let open = || CudaBackend::with_options(0, &options).unwrap();
        let (with, without) = (CudaBackend::new(0).unwrap(), open());
        let kernel = &without.info().kernel;
        assert!(kernel.starts_with("mma.sync (wgmma is off), sm_90a"), "{kernel}");
        assert!(with.info().kernel.starts_with("wgmma and mma.sync, sm_90a"), "{}", with.info().kernel);
        assert!(without.load_kernels().unwrap() < with.load_kernels().unwrap());
        drop(with);
        is_right(&without, Dtype::Bf16);
        gradients::alone(open(), case("140 tokens", 140, OracleMask::causal(), |_| {}), Dtype::Bf16);
    });
    older.says =
        &["launched attend_bf16_64 ", "launched backward_queries_bf16_", "launched backward_keys_bf16_"];
    older.says_not = &["launched hopper_"];
    let mut same =
        Scenario::new("without wgmma an older device is the same", "seed=82,capability=80", || {
            let options = CudaOptions { wgmma: false, ..CudaOptions::default() };
            let kernels = [options, CudaOptions::default()]
                .map(|options| CudaBackend::with_options(0, &options).unwrap().info().kernel.clone());
            assert_eq!(kernels[0], kernels[1]);
        });
    same.says_not = &["launched hopper_"];
    let mut replaced = Scenario::new("a kernel in a file is launched instead of its own", "seed=83", || {
        let folder = tempfile::tempdir().unwrap();
        let backend = with_file(folder.path().join("try.cubin"), TWO).unwrap();
        let kernel = &backend.info().kernel;
        assert!(kernel.starts_with("wgmma and mma.sync, sm_90a"), "{kernel}");
        assert!(kernel.contains("; from try.cubin (BLAKE3 "), "{kernel}");
        assert!(kernel.ends_with("): attend_f32, repack"), "{kernel}");
        is_right(&backend, Dtype::F32);
    });
    replaced.says = &["launched attend_f32 of a cubin with 2 ", "launched finalize_f32 1 times"];
    let hangs = Scenario::new(
        "a device that hangs while it is measured counts as lost after ten seconds, and the error names the kernel",
        "seed=84,hang_at=2",
        hangs_while_measured,
    );
    let refuses = Scenario::new("refuses a file whose kernels the device cannot use", "seed=85", refuses);
    vec![older, same, replaced, refuses, hangs]
}

fn refuses() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("try.cubin");
    let refused = |contents: &[u8], words: &[&str]| {
        let error = with_file(path.clone(), contents).map(|_| ()).unwrap_err();
        assert!(error.is_request(), "{error:?}");
        for words in words {
            assert!(error.to_string().contains(words), "`{words}` is not in: {error}");
        }
    };
    // For an older architecture, which is a byte of the header: both sides, and the code of the driver.
    let older = [&TWO[..49], &[80], &TWO[50..]].concat();
    refused(
        &older,
        &["Fake GPU 0, of compute capability 9.0, does not load", "try.cubin", "sm_80", "(209)", "sm_90a"],
    );
    // No kernel of the device.
    let unknown = renamed(&renamed(TWO, b"attend_f32", b"attend_f23"), b"repack", b"unpack");
    refused(&unknown, &["attend_f23, unpack", "uses none of them", "wgmma and mma.sync"]);
    refused(&TWO[..TWO.len() - 1], &["try.cubin replaces no kernels: it is no cubin"]);
    fs::remove_file(&path).unwrap();
    let options = CudaOptions { replacement: Some(path.clone()), ..CudaOptions::default() };
    let error = CudaBackend::with_options(0, &options).unwrap_err();
    assert!(
        error.is_request() && error.to_string().contains("try.cubin replaces no kernels: it cannot be read"),
        "{error}"
    );
    // The device is as it was.
    is_right(&CudaBackend::new(0).unwrap(), Dtype::F32);
}

/// The second launch never ends. The first one is complete.
fn hangs_while_measured() {
    let options = CudaOptions { stuck_after: Duration::from_secs(100), ..CudaOptions::default() };
    let device = Device::from(CudaBackend::with_options(0, &options).unwrap());
    let keys = device.upload("keys", Bytes::from_static(&[9; 64])).unwrap();
    let mut copied = device.alloc("copied", 64).unwrap();
    let layout = Layout { offset: 0, batch_stride: 0, row_stride: 64, head_stride: 64 };
    let extent = Extent { batch: 1, rows: 1, heads: 1, row_bytes: 64 };
    device.repack((&keys, layout), (&mut copied, layout), extent).unwrap();
    block_on(device.wait()).unwrap();
    let shape = StateShape { batch: 1, rows: 20, heads: 2, dim: 64 };
    let [mut a, mut ml] =
        [shape.a_bytes(), shape.ml_bytes()].map(|bytes| device.alloc("a state", bytes).unwrap());
    let _short = ShortWork::on(&device);
    // Another time that ends ends none of these.
    drop(ShortWork::on(&device));
    device.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }).unwrap();
    let error = block_on(device.wait()).unwrap_err().to_string();
    assert!(error.contains("the device completed nothing for 10 s, in reset_state: it hangs"), "{error}");
}

/// An open device with the kernels of a file that has these contents.
fn with_file(path: PathBuf, contents: &[u8]) -> Result<CudaBackend> {
    fs::write(&path, contents).unwrap();
    CudaBackend::with_options(0, &CudaOptions { replacement: Some(path), ..CudaOptions::default() })
}

/// The same file with another name of a kernel.
fn renamed(cubin: &[u8], from: &[u8], into: &[u8]) -> Vec<u8> {
    let mut changed = cubin.to_vec();
    for at in 0..cubin.len() - from.len() {
        if cubin[at..].starts_with(from) {
            changed[at..at + from.len()].copy_from_slice(into);
        }
    }
    assert_ne!(changed, cubin);
    changed
}

fn is_right(backend: &CudaBackend, dtype: Dtype) {
    let prepared = Prepared::new(case("300 causal tokens", 300, OracleMask::causal(), |_| {}), dtype);
    let whole = block_on(run_alone(backend, &dense_set(&prepared.problem), &prepared));
    prepared.judge(&whole, "fake cuda").assert_within(&prepared.dense_limit());
}

/// Two kernels without a body, `attend_f32` and `repack`, by `nvcc -cubin -arch sm_90a`. The fake
/// driver takes their names.
const TWO: &[u8] = include_bytes!("../../../cuda-backend/src/images/two.cubin");
