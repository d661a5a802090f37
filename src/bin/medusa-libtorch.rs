//! `medusa` and `medusa-train` in a program that is linked to libtorch. They start it under their own name.

fn main() {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_trainer = std::path::Path::new(&name).ends_with("medusa-train");
    let status = if is_trainer { medusa::cli::medusa_train() } else { medusa::cli::medusa() };
    medusa::cli::end(status)
}
