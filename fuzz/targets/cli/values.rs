#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kyklos_cli::decoders::values(bytes));
