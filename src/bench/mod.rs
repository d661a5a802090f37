//! Measures decoding under load: how long requests take while others are in flight, in this process or at a server.

pub mod clients;
pub mod error;
pub mod facts;
pub mod in_process;
pub mod stream;
pub mod timeline;
