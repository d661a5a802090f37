#![no_main]

medusa_fuzz::target!("weights_index");
