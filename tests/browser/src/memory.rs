//! Memory and limits, where the browser answers late and frees what nobody refers to when it likes.

use bytes::Bytes;
use kyklos::backend::Backend;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos::{Dtype, Error};
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_oracle::inputs::cases;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::{Claim, open};

pub(crate) const CLAIMS: &[Claim] = &[
    ("names the device", |backend| Box::pin(name(backend))),
    ("refuses a buffer beyond the device's largest", |backend| Box::pin(beyond_the_largest(backend))),
    ("refuses more memory than it was allowed", |_| Box::pin(beyond_the_allowed())),
    ("tells at the next wait what the browser refuses late", |backend| Box::pin(refused_late(backend))),
    ("uploads where the browser cannot map new memory", |backend| Box::pin(unmappable(backend))),
    ("frees memory when a buffer is dropped", |backend| Box::pin(dropped_is_freed(backend))),
];

#[wasm_bindgen]
extern "C" {
    /// Bytes of the buffers and textures that the page has created and not destroyed.
    #[wasm_bindgen(js_name = liveBytes)]
    fn live_bytes() -> f64;
    /// Has the browser refuse to map new buffers, as it does where it has no memory for it.
    #[wasm_bindgen(js_name = refuseMapping)]
    fn refuse_mapping(refuse: bool);
    /// Bytes of the largest buffer that the device of the page allows.
    #[wasm_bindgen(js_name = largestBuffer)]
    fn largest_buffer() -> f64;
}

async fn name(backend: &WgpuBackend) -> String {
    let info = backend.info();
    assert!(!info.name.trim().is_empty(), "{info:?}");
    format!("{} ({}), {}", info.name, info.driver, info.kernel)
}

async fn beyond_the_largest(backend: &WgpuBackend) -> String {
    let largest = largest_buffer() as usize;
    match backend.alloc("too large", largest + 16) {
        Err(Error::OutOfMemory { asked_bytes, allowed_bytes, .. }) => {
            assert_eq!((asked_bytes, allowed_bytes), (largest as u64 + 16, largest as u64));
        }
        other => panic!("{other:?}"),
    }
    works(backend).await;
    format!("{} MiB", largest >> 20)
}

async fn beyond_the_allowed() -> String {
    let options = WgpuOptions { max_memory_bytes: Some(1 << 20), ..WgpuOptions::default() };
    let backend = open(options).await.unwrap();
    let held = backend.alloc("half", 1 << 19).unwrap();
    match backend.alloc("too much", 1 << 20) {
        Err(Error::OutOfMemory { allowed_bytes, .. }) => assert_eq!(allowed_bytes, 1 << 19),
        other => panic!("{other:?}"),
    }
    drop(held);
    works(&backend).await;
    String::new()
}

async fn refused_late(backend: &WgpuBackend) -> String {
    let mut buffer = backend.alloc("small", 64).unwrap();
    // The browser alone knows that this is outside.
    backend.write(&mut buffer, 64, &[0; 64]).unwrap();
    let told = match backend.wait().await {
        Err(Error::Device { device, native, .. }) => {
            assert_eq!(device, backend.info().name);
            native
        }
        other => panic!("{other:?}"),
    };
    // Once, and the device is none the worse for it.
    works(backend).await;
    told.lines().next().unwrap_or_default().to_owned()
}

async fn unmappable(backend: &WgpuBackend) -> String {
    refuse_mapping(true);
    works(backend).await;
    for size in [1, 3, 6, 16, 101] {
        let data = Bytes::from((1..=size).collect::<Vec<u8>>());
        let mut buffer = backend.upload("odd", data.clone()).unwrap();
        assert_eq!(backend.download(&mut buffer, 0..data.len()).await.unwrap(), data);
    }
    refuse_mapping(false);
    String::new()
}

async fn dropped_is_freed(backend: &WgpuBackend) -> String {
    let case = cases().into_iter().find(|case| case.name == "one row short of a tile").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let set = dense_set(&prepared.problem);
    works(backend).await;
    run_alone(backend, &set, &prepared).await;
    let before = live_bytes();
    for _ in 0..20 {
        works(backend).await;
        run_alone(backend, &set, &prepared).await;
    }
    let after = live_bytes();
    assert!(after <= before, "{before} bytes before, {after} after: dropped buffers are kept");
    format!("{after} bytes stay for staging")
}

/// A quarter of a mebibyte goes there and back.
async fn works(backend: &WgpuBackend) {
    let data = Bytes::from((0..1_u32 << 16).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    let mut buffer = backend.upload("data", data.clone()).unwrap();
    assert_eq!(backend.download(&mut buffer, 0..1 << 18).await.unwrap(), data);
    backend.wait().await.unwrap();
}
