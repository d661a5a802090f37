#![no_main]

medusa_fuzz::target!("chat_template");
