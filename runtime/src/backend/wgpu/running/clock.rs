//! A clock in seconds, natively and in a browser.

/// Seconds since a fixed moment.
#[cfg(not(target_arch = "wasm32"))]
pub(in crate::backend::wgpu) fn now_s() -> f64 {
    use std::sync::OnceLock;
    use std::time::Instant;

    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Seconds since a fixed moment.
#[cfg(target_arch = "wasm32")]
pub(in crate::backend::wgpu) fn now_s() -> f64 {
    use wasm_bindgen::prelude::wasm_bindgen;

    #[wasm_bindgen]
    extern "C" {
        /// Milliseconds since the page was opened or the worker started; never decreases, unlike
        /// the date.
        #[wasm_bindgen(js_namespace = performance)]
        fn now() -> f64;
    }

    now() / 1e3
}
