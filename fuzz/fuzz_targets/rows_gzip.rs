#![no_main]

medusa_fuzz::target!("rows_gzip");
