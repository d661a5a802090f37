//! `medusa-train RECIPE.toml`: the same as `medusa train`.

fn main() -> std::process::ExitCode {
    medusa::cli::medusa_train()
}
