//! `medusa` and `medusa-train` in a program that is linked to libtorch. They start it under their own name.

fn main() {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_trainer = std::path::Path::new(&name).ends_with("medusa-train");
    let program = if is_trainer { medusa::cli::medusa_train } else { medusa::cli::medusa };
    let status = medusa::cli::run_if_same_build(program);
    medusa::cli::end(status)
}
