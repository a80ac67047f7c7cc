//! Seconds, where the standard library has a clock and where the browser has one.

/// Seconds since some moment.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn now_s() -> f64 {
    use std::sync::OnceLock;
    use std::time::Instant;

    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Seconds since some moment, to the millisecond.
#[cfg(target_arch = "wasm32")]
pub(super) fn now_s() -> f64 {
    js_sys::Date::now() / 1e3
}
