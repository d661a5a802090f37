//! `medusa VERB …`: runs the verbs that need no libtorch, and becomes `medusa-libtorch` for the others.

fn main() {
    medusa::cli::end(medusa::cli::launcher::medusa())
}
