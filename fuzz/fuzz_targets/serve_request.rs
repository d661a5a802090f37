#![no_main]

medusa_fuzz::target!("serve_request");
