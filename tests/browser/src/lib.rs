//! What the wgpu backend must do in a browser, as claims that a page runs one at a time. They share a device, whose
//! kernels a software adapter compiles for seconds each; a claim that fails ends the page, and some end the device.

#![cfg(target_arch = "wasm32")]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

mod control;
mod decode;
mod loss;
mod memory;
mod speed;

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;

use kyklos::backend::Backend;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

/// A claim and its check, which ends with what is worth telling.
type Claim = (&'static str, Check);
type Check = for<'a> fn(&'a WgpuBackend) -> Pin<Box<dyn Future<Output = String> + 'a>>;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console)]
    fn error(text: &str);
}

/// Panics are told to the page: the trap that follows says nothing.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| error(&panic.to_string())));
}

/// The claims, in the order of their numbers.
#[wasm_bindgen]
pub fn claims() -> Vec<String> {
    let shared =
        kyklos_backend_suite::conformance::checks::<WgpuBackend>().into_iter().map(|(claim, _)| claim);
    shared.chain(own().into_iter().map(|(claim, _)| claim)).map(str::to_owned).collect()
}

/// Checks a claim; traps where it does not hold. Of the shared cases those of one head dim are run,
/// because a software adapter compiles each kernel for seconds, or `all`.
///
/// # Errors
/// When there is no device.
#[wasm_bindgen]
pub async fn check(claim: usize, all: bool) -> Result<String, JsValue> {
    kyklos_backend_suite::only_head_dim(if all { None } else { Some(32) });
    let backend = device().await.map_err(|error| JsValue::from(error.to_string()))?;
    let shared = kyklos_backend_suite::conformance::checks::<WgpuBackend>();
    if let Some((_, check)) = shared.get(claim) {
        check(&backend, &backend.info().name).await;
        backend.wait().await.unwrap();
        return Ok(String::new());
    }
    let (_, check) = own()[claim - shared.len()];
    Ok(check(&backend).await)
}

/// The claims that only a browser makes, or that only wgpu has.
fn own() -> Vec<Claim> {
    [decode::CLAIMS, control::CLAIMS, memory::CLAIMS, loss::CLAIMS, speed::CLAIMS].concat()
}

/// The page's device.
async fn device() -> kyklos::Result<Rc<WgpuBackend>> {
    thread_local!(static DEVICE: RefCell<Option<Rc<WgpuBackend>>> = const { RefCell::new(None) });
    if let Some(device) = DEVICE.with_borrow(Clone::clone) {
        return Ok(device);
    }
    let device = Rc::new(open(WgpuOptions::default()).await?);
    DEVICE.set(Some(device.clone()));
    Ok(device)
}

async fn open(options: WgpuOptions) -> kyklos::Result<WgpuBackend> {
    WgpuBackend::request(&WgpuOptions { kernel: KernelChoice::Portable, ..options }).await
}
