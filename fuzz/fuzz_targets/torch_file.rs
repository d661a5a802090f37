#![no_main]

medusa_fuzz::target!("torch_file");
