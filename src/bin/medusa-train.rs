//! `medusa-train RECIPE.toml`: the same as `medusa train`.

fn main() {
    medusa::cli::end(medusa::cli::launcher::medusa_train())
}
