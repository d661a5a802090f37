#![no_main]

medusa_fuzz::target!("distill_folder");
