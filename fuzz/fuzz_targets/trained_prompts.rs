#![no_main]

medusa_fuzz::target!("trained_prompts");
