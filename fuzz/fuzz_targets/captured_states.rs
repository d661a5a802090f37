#![no_main]

medusa_fuzz::target!("captured_states");
