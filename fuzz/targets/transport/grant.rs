#![no_main]

#[allow(dead_code, reason = "each target uses its part")]
#[path = "../../wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| wire::grant(bytes));
