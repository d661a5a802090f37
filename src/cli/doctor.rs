//! `medusa doctor`: libtorch, devices, memory and threads of this machine, and missing parts.

use std::fmt::{Display, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{CommonFlags, print_json, print_text, products};
use crate::cpu::team::Team;
use crate::latency::busy_cores::{busy_cores, cores, disturb};
use crate::latency::processors::{cpu_name, gpu_names};
use crate::latency::products::ProductSpeeds;
use crate::nvidia::device;
use crate::session::error::UsageError;
use crate::torch::device_name;
use crate::torch::{self, Accelerator, LIBTORCH_VERSION, accelerator, cuda_runtime, memory};

/// Check the installation: libtorch, devices, memory, threads, and how to get what is missing.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  medusa doctor --json")]
pub struct DoctorArgs {
    /// Time the CPU kernels' products with weights of each format, beside reading the memory (about 30 s).
    #[arg(long)]
    products: bool,
}

#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    libtorch: Libtorch,
    device: String,
    cuda: Cuda,
    engine: EngineState,
    cpu: Cpu,
    memory: Option<MachineMemory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    products: Option<ProductSpeeds>,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Libtorch {
    built_for: &'static str,
    found: Option<String>,
    folder: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Cuda {
    state: String,
    devices: usize,
    names: Vec<String>,
    /// Of each GPU; `None` where the runtime does not say.
    memory: Vec<Option<MachineMemory>>,
    runtime: Option<String>,
    driver: Option<String>,
}

/// Whether decoding can use the CUDA kernels.
#[derive(Debug, Serialize)]
struct EngineState {
    cuda: bool,
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct Cpu {
    name: Option<String>,
    cores: usize,
    threads: i32,
    /// Cores that other programs use, of those that this process may use.
    busy_cores: Option<f64>,
    /// Whether decoding can use the CPU kernels.
    own_kernels: bool,
    onednn: bool,
    mkl: bool,
    instructions: Vec<&'static str>,
}

impl Cpu {
    /// What makes the threads wait for each other.
    fn warnings(&self) -> Vec<String> {
        let Self { cores, threads, .. } = *self;
        let mut warnings = Vec::new();
        if usize::try_from(threads).is_ok_and(|threads| threads > cores) {
            warnings.push(format!("more threads than cores: use --threads {cores}, or set OMP_NUM_THREADS"));
        }
        let slows = |busy: &f64| disturb(*busy, usize::try_from(threads).unwrap_or(0), cores);
        if let Some(busy) = self.busy_cores.filter(slows) {
            warnings.push(format!("other programs use {busy:.1} cores: this makes training and decoding slower"));
        }
        warnings
    }
}

#[derive(Debug, Serialize)]
struct MachineMemory {
    total_bytes: u64,
    available_bytes: u64,
}

impl MachineMemory {
    fn text(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        format!("{:.1} GiB available of {:.1} GiB", gib(self.available_bytes), gib(self.total_bytes))
    }
}

/// Prints the report; an unusable `--device` is part of it, not an error.
///
/// # Errors
/// If stdout cannot be written.
pub fn run(args: &DoctorArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let products = args.products.then(|| measured_products(common)).transpose()?;
    let report = DoctorReport { products, ..look(common) };
    if common.json { print_json(&report) } else { print_text(text(&report)?.trim_end()) }
}

/// A [`UsageError`] where the CPU lacks the kernels.
fn measured_products(common: &CommonFlags) -> Result<ProductSpeeds, UsageError> {
    let progress = |weights: &str| common.say(format_args!("timing {weights}"));
    let measured = ProductSpeeds::measure(Team::shared(), progress);
    measured.ok_or_else(|| UsageError("--products times the CPU kernels, which need AVX2 with FMA and F16C".into()))
}

fn look(common: &CommonFlags) -> DoctorReport {
    let cuda = cuda();
    let libtorch = libtorch();
    let missing = missing(&cuda, &libtorch);
    let reason = device::check().err().map(|why| without_advice(&why));
    DoctorReport {
        version: env!("CARGO_PKG_VERSION"),
        libtorch,
        device: common.device.resolve().map_or_else(|unusable| without_advice(&unusable), device_name),
        cuda,
        engine: EngineState { cuda: reason.is_none(), reason },
        cpu: cpu(),
        memory: memory::machine().map(|(total_bytes, available_bytes)| MachineMemory { total_bytes, available_bytes }),
        products: None,
        missing,
    }
}

/// An error without its advice to run `medusa doctor`: this is it, and `missing` says what to do.
fn without_advice(error: &impl Display) -> String {
    let text = error.to_string();
    text.split_once("; run `medusa doctor`").map_or(text.as_str(), |(fact, _)| fact).to_owned()
}

fn libtorch() -> Libtorch {
    let folder = accelerator::libtorch_folder();
    let found = folder.as_deref().and_then(Path::parent).and_then(version_of);
    Libtorch { built_for: LIBTORCH_VERSION, found, folder }
}

/// The version written by `scripts/setup`, or that of a torch installed by pip.
pub(super) fn version_of(torch: &Path) -> Option<String> {
    if let Ok(text) = std::fs::read_to_string(torch.join("build-version")) {
        return Some(text.trim().to_owned());
    }
    let python = std::fs::read_to_string(torch.join("version.py")).ok()?;
    let line = python.lines().find(|line| line.starts_with("__version__"))?;
    Some(line.split('\'').nth(1)?.to_owned())
}

fn cuda() -> Cuda {
    let open = accelerator::open();
    let (devices, runtime) = match open {
        Accelerator::Cuda { devices } => (*devices, runtime_version()),
        _ => (0, None),
    };
    Cuda {
        state: open.to_string(),
        devices,
        names: gpu_names(),
        memory: gpu_memory(devices),
        runtime,
        driver: driver_version(),
    }
}

fn gpu_memory(devices: usize) -> Vec<Option<MachineMemory>> {
    let memory = |(total_bytes, available_bytes)| MachineMemory { total_bytes, available_bytes };
    (0..devices).map(|index| cuda_runtime::memory(index).ok().map(memory)).collect()
}

/// Converts libtorch's 1000 × major + 10 × minor.
fn runtime_version() -> Option<String> {
    let version = torch::guard("asking for the CUDA runtime's version", tch::utils::version_cudart).ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(ToOwned::to_owned)
}

fn cpu() -> Cpu {
    Cpu {
        name: cpu_name(),
        cores: cores(),
        threads: tch::get_num_threads(),
        busy_cores: busy_cores(Duration::from_millis(300)),
        own_kernels: crate::cpu::available(),
        onednn: tch::utils::has_mkldnn(),
        mkl: tch::utils::has_mkl(),
        instructions: instructions(),
    }
}

/// Instruction sets that determine libtorch's speed: vectors, and products in bfloat16 and int8.
#[cfg(target_arch = "x86_64")]
fn instructions() -> Vec<&'static str> {
    let seen = [
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
        ("avx512_bf16", std::is_x86_feature_detected!("avx512bf16")),
        ("avx512_vnni", std::is_x86_feature_detected!("avx512vnni")),
        ("amx_bf16", crate::cpu::tiles::available()),
    ];
    seen.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> Vec<&'static str> {
    Vec::new()
}

fn missing(cuda: &Cuda, libtorch: &Libtorch) -> Vec<String> {
    let mut missing = Vec::new();
    if let Some(found) = libtorch.found.as_deref().filter(|found| !found.starts_with(LIBTORCH_VERSION)) {
        missing.push(format!("libtorch {LIBTORCH_VERSION}: {found} is loaded; run scripts/setup, or unset LIBTORCH"));
    }
    if cuda.devices > 0 {
        return missing;
    }
    if !crate::cpu::available() {
        missing.push(
            "AVX2 with FMA and F16C (nearly all x86-64 CPUs since 2013): decoding on the CPU uses libtorch's operations".into(),
        );
    }
    missing.push(match (&cuda.driver, accelerator::open()) {
        (None, _) => "an NVIDIA driver (no /proc/driver/nvidia): without it, everything runs on the CPU".into(),
        (Some(_), Accelerator::CpuOnly(why)) => format!(
            "libtorch's CUDA half ({why}): pip install torch=={LIBTORCH_VERSION} in an environment, and point \
             .libtorch at its site-packages folder"
        ),
        (Some(driver), _) => format!("a device that answers: the driver ({driver}) is there; see nvidia-smi"),
    });
    missing
}

fn text(report: &DoctorReport) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let folder = report.libtorch.folder.as_deref().map_or("unknown folder".into(), |f| f.display().to_string());
    let found = report.libtorch.found.as_deref().unwrap_or("of unknown version");
    writeln!(out, "medusa       {}", report.version)?;
    writeln!(out, "libtorch     {found} in {folder} (built for {})", report.libtorch.built_for)?;
    writeln!(out, "device       {}", report.device)?;
    writeln!(out, "accelerator  {}", report.cuda.state)?;
    for name in &report.cuda.names {
        writeln!(out, "gpu          {name}")?;
    }
    for (index, memory) in report.cuda.memory.iter().enumerate() {
        let memory = memory.as_ref().map_or_else(|| "memory unknown".into(), MachineMemory::text);
        writeln!(out, "{:<12} {memory}", format!("cuda:{index}"))?;
    }
    if let Some(driver) = &report.cuda.driver {
        let runtime = report.cuda.runtime.as_deref().unwrap_or("unknown");
        writeln!(out, "cuda         driver {driver}, runtime {runtime}")?;
    }
    let cpu = &report.cpu;
    writeln!(out, "cpu          {} ({})", cpu.name.as_deref().unwrap_or("unknown"), cpu.instructions.join(" "))?;
    writeln!(out, "threads      {} of {} cores", cpu.threads, cpu.cores)?;
    for warning in cpu.warnings() {
        writeln!(out, "             {warning}")?;
    }
    writeln!(out, "libraries    oneDNN {}, MKL {}", yes_no(cpu.onednn), yes_no(cpu.mkl))?;
    writeln!(out, "decoding     own kernels {}", yes_no(cpu.own_kernels))?;
    match &report.engine.reason {
        None => writeln!(out, "engine       cuda: GPUs decode with kernels of their own")?,
        Some(why) => writeln!(out, "engine       {} ({why})", if cpu.own_kernels { "cpu" } else { "tch" })?,
    }
    if let Some(memory) = &report.memory {
        writeln!(out, "memory       {}", memory.text())?;
    }
    for missing in &report.missing {
        writeln!(out, "missing      {missing}")?;
    }
    if let Some(products) = &report.products {
        products::write(&mut out, products)?;
    }
    Ok(out)
}

fn yes_no(there: bool) -> &'static str {
    if there { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_without_a_core_and_other_programs_are_reported() {
        let warnings = |cores, threads, busy_cores| {
            let (name, instructions) = (None, Vec::new());
            Cpu { name, cores, threads, busy_cores, own_kernels: true, onednn: true, mkl: true, instructions }
                .warnings()
        };
        assert_eq!(warnings(2, 2, Some(0.1)), Vec::<String>::new());
        assert_eq!(warnings(2, 8, None), ["more threads than cores: use --threads 2, or set OMP_NUM_THREADS"]);
        assert!(warnings(2, 2, Some(1.94))[0].starts_with("other programs use 1.9 cores"));
        assert_eq!(warnings(64, 32, Some(30.0)), Vec::<String>::new(), "every thread has a core");
        assert_eq!(warnings(64, 32, Some(40.0)).len(), 1);
    }

    #[test]
    fn a_torch_installed_by_pip_has_its_version() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(version_of(dir.path()), None);
        crate::files::write_atomic(&dir.path().join("version.py"), |out| {
            std::io::Write::write_all(out, b"from typing import Optional\n__version__ = '2.11.0+cu130'\n")
        })
        .unwrap();
        assert_eq!(version_of(dir.path()).as_deref(), Some("2.11.0+cu130"));
    }
}
