//! Whether all processes were started for the same run: compared before the first of them writes anything.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::formats::provenance::{HashedFile, Provenance};
use crate::plural::counted;
use crate::torch::device_kind;
use crate::train::TrainConfig;
use crate::train::checked::CheckedRun;
use crate::train::error::TrainError;
use crate::train::ranks::{Ranks, RanksError};
use crate::train::recipe_changes;
use crate::train::run_folder::RunFolder;
use crate::train::training_loop::RunEvent;

/// What must be the same in all processes, in words, and its value.
type RunFacts = BTreeMap<String, String>;

/// Compares this process's run with those of the others. The first process of each machine hashes the files, whose hashes are cached.
///
/// # Errors
/// [`RanksError::Differs`], the same in all processes, or a file cannot be read.
pub(super) fn check(checked: &CheckedRun, ranks: Ranks, emit: &mut dyn FnMut(RunEvent)) -> Result<(), TrainError> {
    if ranks.is_alone() {
        return Ok(());
    }
    let facts = ranks.first_of_machine_first(|| {
        let folder = RunFolder::new(checked)?;
        emit(RunEvent::Hashing { bytes: folder.bytes_to_hash() });
        Ok::<_, TrainError>(facts(checked, &folder.provenance()?))
    })?;
    let own = serde_json::to_vec(&facts).expect("JSON holds texts");
    let all = ranks.gather(&own)?;
    // Those of another version of the program may be unreadable: then they lack everything.
    let all: Vec<RunFacts> = all.iter().map(|facts| serde_json::from_slice(facts).unwrap_or_default()).collect();
    Ok(difference(&all).map_or(Ok(()), Err)?)
}

/// Checks that an optimizer step has a micro batch for each process.
///
/// # Errors
/// [`TrainError::TooManyRanks`] with a split of the step's rows that has.
pub fn check_micro_batches(train: &TrainConfig, world_size: usize) -> Result<(), TrainError> {
    let (rows, micro_batches) = (train.micro_batch_size.get(), train.gradient_accumulation_steps.get());
    if micro_batches >= world_size {
        return Ok(());
    }
    let in_step = rows * micro_batches;
    let fits = |rows: &usize| in_step.is_multiple_of(*rows) && in_step / rows >= world_size;
    let advice = match (1..rows).rev().find(fits) {
        Some(fewer) => format!(
            "set train.micro_batch_size = {fewer} and train.gradient_accumulation_steps = {}, which are the same {in_step} rows, or start at \
             most {micro_batches}",
            in_step / fewer
        ),
        None => format!(
            "a step has only {}; start at most as many processes with train.micro_batch_size = 1 and \
             train.gradient_accumulation_steps = {in_step}, or raise the latter",
            counted(in_step, "row")
        ),
    };
    Err(TrainError::TooManyRanks { world_size, micro_batches, advice })
}

fn facts(checked: &CheckedRun, provenance: &Provenance) -> RunFacts {
    let mut facts = vec![
        ("the program".to_owned(), format!("{} ({})", provenance.program, env!("MEDUSA_SOURCE_HASH"))),
        ("the kind of device".to_owned(), device_kind(checked.plan.device)),
        ("the number of steps".to_owned(), checked.total_steps.to_string()),
        ("the numbers of layers on its devices (`backbone.device_map`)".to_owned(), layers_of_stages(checked)),
        ("--skip-bad-rows".to_owned(), provenance.skip_bad_rows.to_string()),
        ("the files of `data.hidden_states`".to_owned(), files_of_states(provenance)),
        (
            "the backbone's commit".to_owned(),
            provenance.backbone.as_ref().map_or_else(String::new, |hub| hub.commit.clone()),
        ),
    ];
    facts.extend(
        recipe_changes::keys_of(&checked.plan.resolved_recipe)
            .into_iter()
            .map(|(key, value)| (format!("`{key}` of the recipe"), value)),
    );
    let files = [
        ("backbone", &provenance.backbone_files),
        ("initial heads or adapters", &provenance.init_from_files),
        ("data and tokenizer", &provenance.data),
    ];
    facts.extend(files.into_iter().flat_map(|(of, files)| files_of(of, files)));
    facts.extend(provenance.rows.iter().enumerate().flat_map(|(split, rows)| rows_of(split, rows)));
    facts.into_iter().collect()
}

/// Gradients are summed in a buffer for each stage. A map `auto` spreads layers over the GPUs that a process has.
fn layers_of_stages(checked: &CheckedRun) -> String {
    let layers = |stage| checked.stages.layers(stage, checked.config.num_hidden_layers).len().to_string();
    format!("[{}]", (0..checked.stages.len()).map(layers).collect::<Vec<_>>().join(", "))
}

/// Copies on other machines have other times of change.
fn files_of_states(provenance: &Provenance) -> String {
    let files = provenance.hidden_states.as_ref();
    files.map_or_else(String::new, |all| format!("{} with {} bytes", counted(all.files, "file"), all.bytes))
}

fn files_of(of: &str, files: &[HashedFile]) -> impl Iterator<Item = (String, String)> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // With the number, since files of several folders may have one name.
    files
        .iter()
        .enumerate()
        .map(move |(at, file)| (format!("file {} ({of}, number {at})", name(&file.path)), file.sha256.clone()))
}

/// The numbers of rows and tokens that were read, and hashes of the tokens.
fn rows_of(split: usize, report: &Value) -> Vec<(String, String)> {
    let split = if split == 0 { "training" } else { "validation" };
    let number = |key: &str| (format!("{key} of the {split} rows"), report[key].to_string());
    let files = report["files"].as_array().into_iter().flatten().enumerate();
    let tokens = files
        .map(|(at, file)| (format!("the tokens of file {at} of the {split} rows"), file["tokens_sha256"].to_string()));
    ["rows", "tokens", "tokens_with_loss"].map(number).into_iter().chain(tokens).collect()
}

/// The first process that differs from rank 0, and in what.
fn difference(all: &[RunFacts]) -> Option<RanksError> {
    let first = all.first()?;
    all.iter().enumerate().find_map(|(rank, facts)| {
        let mut whats = first.keys().chain(facts.keys());
        let what = whats.find(|&what| first.get(what) != facts.get(what))?;
        let value = |of: &RunFacts| of.get(what).map_or("nothing", String::as_str).to_owned();
        Some(RanksError::Differs { rank, what: what.clone(), value: value(facts), first: value(first) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_needs_a_micro_batch_for_each_process() {
        let train = |rows: usize, steps: usize| {
            let text = format!(
                "output_dir = \"run\"\nmicro_batch_size = {rows}\ngradient_accumulation_steps = {steps}\nmax_steps = 1"
            );
            toml::from_str::<TrainConfig>(&text).unwrap()
        };
        let refused =
            |rows, steps, world_size| check_micro_batches(&train(rows, steps), world_size).unwrap_err().to_string();
        assert!(check_micro_batches(&train(2, 4), 4).is_ok() && check_micro_batches(&train(8, 1), 1).is_ok());
        let eight = refused(8, 1, 4);
        assert!(eight.starts_with("4 processes share the micro batches of an optimizer step"), "{eight}");
        assert!(eight.contains(
            "set train.micro_batch_size = 2 and train.gradient_accumulation_steps = 4, which are the same 8 rows"
        ));
        assert!(eight.ends_with("or start at most 1"), "{eight}");
        assert!(refused(6, 2, 5).contains("micro_batch_size = 2 and train.gradient_accumulation_steps = 6"));
        assert!(
            refused(2, 2, 5)
                .contains("a step has only 4 rows; start at most as many processes with train.micro_batch_size = 1")
        );
    }

    fn run(facts: &[(&str, &str)]) -> RunFacts {
        facts.iter().map(|(what, value)| ((*what).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_first_process_that_differs_is_named_with_both_values() {
        let same = run(&[("steps", "9"), ("`train.seed` of the recipe", "1")]);
        assert!(difference(&[same.clone(), same.clone()]).is_none());
        let other = run(&[("steps", "9"), ("`train.seed` of the recipe", "2")]);
        let error = difference(&[same.clone(), same.clone(), other]).unwrap().to_string();
        assert!(
            error.starts_with("rank 2 differs from rank 0 in `train.seed` of the recipe: it has 2, rank 0 has 1;"),
            "{error}"
        );
        let error = difference(&[same.clone(), run(&[("steps", "9")])]).unwrap().to_string();
        assert!(error.contains("`train.seed` of the recipe: it has nothing, rank 0 has 1"), "{error}");
        let more = run(&[("steps", "9"), ("`train.seed` of the recipe", "1"), ("weights", "x")]);
        assert!(difference(&[same, more]).unwrap().to_string().contains("weights: it has x, rank 0 has nothing"));
    }
}
