#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::probe(b"BM\0\0\0\0\0\0\0\0\0\0\0\0\x28\0", bytes));
