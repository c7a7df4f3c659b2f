#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvrouted_fuzz::run("engine_snapshot", data));
