//! `medusa distill`: generates training data from the backbone, in this process or on a server.

use super::CommonFlags;

mod args;
mod local;
pub mod server;
mod server_flags;

pub use args::DistillArgs;

/// Answers the prompts of this machine's share.
///
/// # Errors
/// An error in the prompts, the backbone, the heads, the server or the folder; [`Interrupted`](super::Interrupted) after Ctrl-C.
pub fn run(args: &DistillArgs, common: &CommonFlags) -> anyhow::Result<()> {
    if args.server.endpoint.is_some() { server::run(args, common) } else { local::run(args, common) }
}
