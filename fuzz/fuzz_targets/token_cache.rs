#![no_main]

medusa_fuzz::target!("token_cache");
