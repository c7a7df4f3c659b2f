#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvrouted_gateway_fuzz::run("watch", data));
