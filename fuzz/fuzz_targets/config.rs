#![no_main]

medusa_fuzz::target!("config");
