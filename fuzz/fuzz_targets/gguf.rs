#![no_main]

medusa_fuzz::target!("gguf");
