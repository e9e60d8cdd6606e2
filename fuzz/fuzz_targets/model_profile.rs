#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::check("model_profile", bytes));
