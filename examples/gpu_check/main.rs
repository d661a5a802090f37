//! Checks that need a GPU: the kernels against their oracles, the CUDA loop against libtorch's, and step times, on
//! random weights. `scripts/gpu_check` runs it and records its output, one JSON object per line.
//! ```text
//! cargo build --release --locked --example gpu_check
//! target/release/examples/gpu_check gpu-check steps
//! ```
//!
//! Any other command line runs as `medusa`, so that a machine with a GPU needs only this one program.

use std::ffi::OsStr;

use clap::{Parser, ValueEnum};
use medusa::cli::{self, CommonFlags};
use medusa::decode::step::Drafting;
use medusa::nvidia::device;
use medusa::torch::guard;

mod fused;
mod hydra;
mod kernels;
mod layers;
mod loops;
mod operators;
mod overlap;
mod profile;
mod random;
mod steps;

use random::{CHECKED, heads, hydra_heads};

/// The first argument that selects a check.
const VERB: &str = "gpu-check";

/// Compare the GPU's own loop with its oracle and with libtorch's, and time its steps, on random weights.
#[derive(Debug, Parser)]
#[command(bin_name = "gpu_check gpu-check", after_help = "Example:\n  gpu_check gpu-check steps")]
struct GpuCheckCommand {
    /// What to check.
    #[arg(value_enum)]
    part: GpuCheck,
    #[command(flatten)]
    common: CommonFlags,
}

/// Checks that need a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GpuCheck {
    /// Every kernel of a step, compared with its oracle on the same GPU.
    Kernels,
    /// The same with small shapes, for slow tools such as sanitizers.
    Brief,
    /// Hydra heads, from the smallest tree on: kernels beside their oracle, greedy texts, times of steps.
    Hydra,
    /// Texts of kernels that overlap and of kernels that do not, which must be equal.
    Overlap,
    /// What only a GPU runs: attention of batches and packed rows, products in float32, draws, pinned copies, the allocator's figures.
    Operators,
    /// The kernels of training beside libtorch's calls: distances and times.
    Fused,
    /// Training of backbones whose layers lie on a GPU and on the CPU, or on several GPUs, beside one device.
    Layers,
    /// Greedy texts of the GPU's loop and of libtorch's, which may differ only at near ties.
    Loops,
    /// Times of steps of Llama 2 7B's shape, and of a copy.
    Steps,
    /// 20,000 steps; memory must hardly grow.
    Endurance,
    /// A few plain steps of Llama 2 7B's shape, for a profiler that waits for cuProfilerStart.
    ProfilePlain,
    /// The same with a tree of 64 nodes.
    ProfileTree,
}

fn main() {
    let mut arguments = std::env::args_os();
    let program = arguments.next();
    if arguments.next().as_deref() != Some(OsStr::new(VERB)) {
        cli::end(cli::in_process::medusa());
    }
    let GpuCheckCommand { part, common } = GpuCheckCommand::parse_from(program.into_iter().chain(arguments));
    cli::end(cli::finish(&common, || run(part, &common)))
}

/// Runs one part.
///
/// # Errors
/// A machine that cannot run the check, or an error of the device.
fn run(part: GpuCheck, common: &CommonFlags) -> anyhow::Result<()> {
    device::check()?;
    let on = common.device.resolve()?;
    guard("the check", || {
        tch::no_grad(|| match part {
            GpuCheck::Kernels => kernels::beside_oracle(on, &CHECKED, heads, &kernels::STEPS),
            GpuCheck::Brief => {
                kernels::beside_oracle(on, &CHECKED[..1], hydra_heads, &kernels::STEPS[..2])?;
                kernels::beside_oracle(on, &CHECKED, heads, &kernels::STEPS[..3])
            }
            GpuCheck::Hydra => hydra::check(on),
            GpuCheck::Loops => loops::texts(on),
            GpuCheck::Overlap => overlap::check(on),
            GpuCheck::Operators => operators::check(on),
            GpuCheck::Fused => fused::beside_libtorch(on, fused::SIZES),
            GpuCheck::Layers => layers::on_several_devices(on),
            GpuCheck::Steps => steps::time(on),
            GpuCheck::Endurance => steps::endure(on),
            GpuCheck::ProfilePlain => profile::steps(on, Drafting::Off),
            GpuCheck::ProfileTree => profile::steps(on, Drafting::On),
        })
    })?
}
