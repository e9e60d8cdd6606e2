#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::probe(b"RIFF\0\0\0\0WAVE", bytes));
