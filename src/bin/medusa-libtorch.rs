//! `medusa` and `medusa-train` in a program that is linked to libtorch. They start it under their own name.

use medusa::cli::in_process;

fn main() {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_trainer = std::path::Path::new(&name).ends_with("medusa-train");
    let program = if is_trainer { in_process::medusa_train } else { in_process::medusa };
    let status = medusa::cli::run_if_same_build(program);
    medusa::cli::end(status)
}
