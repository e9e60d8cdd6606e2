#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::probe(b"\xff\xf1\x50\x80", bytes));
