//! NVRTC compiles every kernel for every GPU.

use super::*;

const GPUS: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// All variants for one architecture; for the oldest and the newest, one variant with the larger head size.
#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
fn every_kernel_compiles_for_old_and_new_gpus_without_spilling() {
    let one_variant = |kind, head_size| kind == KINDS[0] && head_size == 128;
    check_variants(&|arch, kind, head_size| match arch {
        "sm_90a" => true,
        "sm_80" | "sm_120" => one_variant(kind, head_size),
        _ => false,
    });
}

#[test]
#[ignore = "two to five minutes, for a change to a kernel: cargo test --test promises -- --ignored --nocapture every_variant"]
fn every_variant_of_every_kernel_compiles_for_every_gpu_without_spilling() {
    check_variants(&|_, _, _| true);
}

/// Compiles the variants that `wanted` selects by architecture, element type and head size, and prints their resources.
#[expect(clippy::print_stdout, reason = "the table of what kernels take")]
fn check_variants(wanted: &dyn Fn(&str, Kind, i64) -> bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let compiler = Compiler::open(Some(folder.path().into())).unwrap_or_else(|error| panic!("{error}"));
    println!(
        "NVRTC {:?}\n{:<24} {:>9} {:>5} {:>5} {:>5} {:>7} {:>6}",
        compiler.version(),
        "kernel",
        "element",
        "D",
        "arch",
        "regs",
        "shared",
        "spills"
    );
    let mut faults = vec![];
    for (arch, (program, kind)) in product(&GPUS, &product(&Program::ALL, &KINDS)) {
        if kind != KINDS[0] && !program.has_elements() {
            continue;
        }
        let head_sizes = if program.has_head_size() { &[64, 128][..] } else { &[128] };
        for &head_size in head_sizes.iter().filter(|&&head_size| wanted(arch, kind, head_size)) {
            faults.extend(check_variant(&compiler, program, (kind, head_size, arch)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The lines of the kernels that spill registers.
#[expect(clippy::print_stdout, reason = "the table of what kernels take")]
fn check_variant(compiler: &Compiler, program: Program, (kind, head_size, arch): (Kind, i64, &str)) -> Vec<String> {
    let element = KernelDtype::of(kind).expect("16 bits");
    let compile = || compiler.compile(program, element, head_size, arch).unwrap_or_else(|error| panic!("{error}"));
    let (compiled, again) = (compile(), compile());
    assert!(compiled.cubin.starts_with(b"\x7fELF") && compiled == again);
    let (mut found, mut faults) = (vec![], vec![]);
    for takes in compiled.resources() {
        let line = format!(
            "{:<24} {kind:>9?} {head_size:>5} {arch:>6} {:>4} {:>7} {:>6}",
            takes.kernel, takes.registers, takes.shared_bytes, takes.spilled_bytes
        );
        println!("{line}");
        faults.extend((takes.spilled_bytes > 0 || takes.registers == 0).then_some(line));
        found.push(takes.kernel);
    }
    let mut expected = program.kernels();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
    faults
}

#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
fn a_kernel_that_is_refused_names_the_file_and_the_line() {
    let compiler = Compiler::open(None).unwrap_or_else(|error| panic!("{error}"));
    let error = compiler.compile(Program::TreeAttention, KernelDtype::BFloat16, 128, "sm_75").unwrap_err().to_string();
    assert!(error.contains("tree_attention.cu for sm_75"), "{error}");
}
