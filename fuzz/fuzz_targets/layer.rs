#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandboxer_fuzzing::layer(data));
