#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dflop_fuzz::probe(b"\x1a\x45\xdf\xa3", bytes));
