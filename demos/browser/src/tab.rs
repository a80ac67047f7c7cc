//! This tab as the device of a rank on another machine.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use js_sys::{Function, Promise, Uint8Array};
use kyklos::backend::Backend;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos_tab::{Inbox, Limits, VERSION, execute};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::{JsError, wasm_bindgen};
use wasm_bindgen_futures::future_to_promise;

/// The version of the protocol that this page speaks.
#[wasm_bindgen(js_name = protocolVersion)]
pub fn protocol_version() -> u32 {
    VERSION
}

/// The GPU of this tab, lent to a host.
#[wasm_bindgen]
pub struct TabDevice {
    name: String,
    inbox: Inbox,
    work: RefCell<Option<LocalBoxFuture<'static, Result<String, String>>>>,
}

#[wasm_bindgen]
impl TabDevice {
    /// Opens the GPU. `token` is from the link, `memory` are the bytes that the host may use. `send` gets bytes for the stream to
    /// the host, in order, from now on.
    ///
    /// # Errors
    /// When there is no adapter, or it cannot be opened.
    pub async fn open(token: String, memory: f64, send: Function) -> Result<Self, JsError> {
        let backend = WgpuBackend::request(&WgpuOptions::default()).await?;
        let name = backend.info().name.clone();
        // Whole numbers below 2^53 are exact.
        let limits = Limits {
            buffer_bytes: backend.largest_buffer_bytes(),
            total_bytes: memory as u64,
            state_bytes: backend.most_state_bytes(),
        };
        let send = move |bytes: Bytes| {
            // The stream has ended where this fails, and the page knows.
            let _ = send.call1(&JsValue::NULL, &Uint8Array::from(&bytes[..]));
        };
        let (inbox, work) = execute(backend, limits, &token, Rc::new(send));
        Ok(Self { name, inbox, work: RefCell::new(Some(work)) })
    }

    /// Name of the GPU.
    #[wasm_bindgen(getter)]
    pub fn name(&self) -> String {
        self.name.clone()
    }

    /// Works until there is no more to do; the promise gives the reason of the host, or fails with what failed here. Once.
    pub fn run(&self) -> Promise {
        let work = self.work.take();
        future_to_promise(async move {
            match work {
                Some(work) => match work.await {
                    Ok(reason) => Ok(reason.into()),
                    Err(failure) => Err(JsError::new(&failure).into()),
                },
                None => Err(JsError::new("the device works already").into()),
            }
        })
    }

    /// Takes bytes from the stream. The promise ends when there is room for more.
    pub fn push(&self, chunk: Vec<u8>) -> Promise {
        let inbox = self.inbox.clone();
        future_to_promise(async move {
            inbox.push(&chunk).await;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// The stream has ended.
    pub fn close(&self) {
        self.inbox.close();
    }
}
