//! From paths and names to a loaded model that decodes: the command line, and programs that use this library, open their models here.
//!
//! [`SessionOptions`] says everything in one place; the parts that it calls are for callers who look at the plan or at the setup before
//! the weights are read. Nothing here prints: notices and progress go to a [`Reporter`](reporter::Reporter).

pub mod batch_size;
pub mod decoder;
pub mod drafter;
pub mod engine;
pub mod error;
pub mod loading;
pub mod opened;
pub mod options;
pub mod reporter;
pub mod setup;

pub use decoder::Decoder;
pub use error::{SessionError, UsageError};
pub use options::SessionOptions;
pub use reporter::Silent;
