//! `medusa VERB …`: the library's command line.

fn main() -> std::process::ExitCode {
    medusa::cli::medusa()
}
