//! The model card: README.md of an exported folder. Unknown facts are left out.

use std::io::Write as _;
use std::path::Path;

use minijinja::Environment;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use serde_json::{Value, json};

use super::companions::{CardBench, Companions};
use super::error::ExportError;
use super::format::FolderContents;
use super::trained::Trained;
use crate::draft::heads::HeadsArchitecture;
use crate::files::write_synced;
use crate::formats::bench::SweptValue;
use crate::formats::calibration::{Calibration, HeadAccuracy};

/// The card, which people edit.
pub(super) const FILE: &str = "README.md";
const TEMPLATE: &str = include_str!("card.md");
/// Placeholder in commands for the reader's path.
const OUT: &str = "FOLDER";
/// Placeholder for a backbone that is not known to be on the Hub.
const BACKBONE: &str = "BACKBONE";

pub(super) fn write(folder: &Path, trained: &Trained, companions: &Companions) -> Result<(), ExportError> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    let text = environment.render_str(TEMPLATE, Serde(facts(trained, companions)))?;
    let path = folder.join(FILE);
    write_synced(&path, |out| out.write_all(text.as_bytes())).map_err(|source| ExportError::Io { path, source })
}

/// The template's variables.
fn facts(trained: &Trained, companions: &Companions) -> Value {
    let shape = trained.written_shape();
    let (base, measured) = (trained.served_by_id(), companions.calibration.as_ref().map(|found| &found.content));
    let tree = companions.tree.as_ref().map(|found| &found.content);
    let expected = tree.and_then(|file| file.expected_tokens_per_step);
    let choices = tree.filter(|file| file.dynamic.is_none()).map(|file| &file.choices);
    json!({
            "format": trained.format.name,
            "base_model": trained.base_model,
            "serve": base.as_deref().unwrap_or(BACKBONE),
            "out": OUT,
            "kind": kind_of(shape.architecture),
            "hydra": shape.reads().tokens,
            "heads": shape.medusa_num_heads,
            "layers": shape.medusa_num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": trained.vocab_size(),
            "shared": shape.vocab_size == 0,
            "truncated": trained.file.token_map().map(<[i64]>::len),
            "copied": trained.copies_lm_head(),
            "one_w2": shape.shared_w2,
            "copied_w2": trained.copies_shared_w2(),
            "parameters": shape.parameters(),
            "dtype": trained.dtype.to_string(),
            "tuned": trained.tuned_backbone().is_some(),
            "holds_backbone": trained.format.holds_backbone(),
            "is_alone": trained.format.contents == FolderContents::Heads,
            "pickle": trained.pickle,
            "recipe": companions.recipe.as_ref().map(|found| found.content.trim_end()),
            "accuracies": measured.map(|measured| accuracies(&measured.heads, shape.medusa_num_heads)),
            "tokens": measured.map(|measured| measured.tokens),
            "measured_sha256": measured.map(Calibration::measured_sha256),
            "tree": tree.map(|file| file.dynamic.map_or(file.choices.len(), |limits| limits.nodes)),
            "expected": expected.map(|tokens| format!("{tokens:.2}")),
            "choices": choices.map(|choices| json!(choices).to_string()),
            "medusa_tokens": choices.map_or(63, Vec::len),
            "bench": companions.bench.as_ref().map(|found| figures(&found.content)),
    })
}

fn kind_of(architecture: HeadsArchitecture) -> &'static str {
    match architecture {
        HeadsArchitecture::Medusa => "Medusa",
        HeadsArchitecture::Hydra => "Hydra",
        HeadsArchitecture::HydraPlusPlus => "Hydra++",
    }
}

/// Top-1 and top-5 accuracy of each head.
fn accuracies(by_head: &[HeadAccuracy], exported: usize) -> Vec<Value> {
    let row = |(head, HeadAccuracy { accuracy, .. }): (usize, &HeadAccuracy)| {
        let top5: f64 = accuracy.iter().take(5).sum();
        let top1 = accuracy.first().map(|top1| format!("{top1:.3}"));
        json!({"head": head + 1, "ahead": head + 2, "top1": top1, "top5": format!("{top5:.3}")})
    };
    by_head.iter().take(exported).enumerate().map(row).collect()
}

/// Figures of `medusa bench`, rounded.
fn figures(CardBench { fastest: bench, results }: &CardBench) -> Value {
    let figure = |number: f64| format!("{number:.2}");
    let swept = bench.sweep.as_ref().map(|SweptValue { name, value }| format!("{name} = {value}"));
    json!({
        "acceleration_rate": figure(bench.acceleration_rate),
        "overhead": bench.overhead.map(figure),
        "speedup": figure(bench.speedup),
        "device": bench.device,
        "dtype": bench.dtype,
        "sweep": swept.filter(|_| *results > 1),
        "results": results,
    })
}
