#![no_main]

medusa_fuzz::target!("tokenizer_config");
