#![no_main]

medusa_fuzz::target!("data_folder");
