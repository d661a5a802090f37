//! NVRTC compiles every kernel for every GPU.

use super::*;

#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
#[expect(clippy::print_stdout, reason = "the table of what kernels take")]
fn every_kernel_compiles_for_every_gpu_without_spilling() {
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
    for (arch, (program, kind)) in
        product(&["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"], &product(&Program::ALL, &KINDS))
    {
        if kind != KINDS[0] && !program.has_elements() {
            continue;
        }
        let element = KernelDtype::of(kind).expect("16 bits");
        for &head_size in if program.has_head_size() { &[64, 128][..] } else { &[128] } {
            let compiled =
                compiler.compile(program, element, head_size, arch).unwrap_or_else(|error| panic!("{error}"));
            let again = compiler.compile(program, element, head_size, arch).unwrap_or_else(|error| panic!("{error}"));
            assert!(compiled.cubin.starts_with(b"\x7fELF") && compiled == again);
            let mut found: Vec<String> = vec![];
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
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
fn a_kernel_that_is_refused_names_the_file_and_the_line() {
    let compiler = Compiler::open(None).unwrap_or_else(|error| panic!("{error}"));
    let error = compiler.compile(Program::TreeAttention, KernelDtype::BFloat16, 128, "sm_75").unwrap_err().to_string();
    assert!(error.contains("tree_attention.cu for sm_75"), "{error}");
}
