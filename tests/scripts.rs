//! Promise: the Python programs of `scripts`, most of which need models or packages that tests have not, have no name that is not defined.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints every name that a program reads from its module and that nothing there defines.
const UNDEFINED_NAMES: &str = "
import builtins, dis, sys, types

def names(code):
    yield from ((step.opname, step.argval) for step in dis.get_instructions(code))
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from names(part)

for file in sys.argv[1:]:
    found = list(names(compile(open(file, encoding='utf-8').read(), file, 'exec')))
    defined = {name for step, name in found if step in ('STORE_NAME', 'STORE_GLOBAL')} | {'__annotations__', '__doc__', '__file__', '__name__'}
    read = {name for step, name in found if step in ('LOAD_NAME', 'LOAD_GLOBAL')}
    for name in sorted(read - defined - set(dir(builtins))):
        print(f'{file}: {name}')
";

fn python_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let files = |path: PathBuf| match path.is_dir() {
        true => python_files(&path),
        false if is_python(&path) => vec![path],
        false => vec![],
    };
    entries.flat_map(files).collect()
}

fn is_python(file: &Path) -> bool {
    let first = std::fs::read(file).expect("a file");
    let first = first.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
    file.extension().is_some_and(|end| end == "py") || first.starts_with(b"#!") && first.ends_with(b"python3")
}

#[test]
fn every_name_in_a_python_program_is_defined() {
    let files = python_files(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts")));
    assert!(files.len() > 20, "{files:?}");
    let output = Command::new("python3").arg("-c").arg(UNDEFINED_NAMES).args(&files).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
}
