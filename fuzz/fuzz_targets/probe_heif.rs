#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::probe(b"\0\0\0\x10ftypavif", bytes));
