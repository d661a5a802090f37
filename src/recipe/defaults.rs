//! Defaults of keys that a recipe leaves out. Required are `backbone.path`, `data.train` and a stage; the defaults of all other keys are
//! here if they depend on other keys, in `file_defaults` if they depend on files, else at their fields.
//!
//! docs/training.md says where each number comes from.

use std::borrow::Cow;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::located::{LocatedToml, find};

/// Values of keys that depend on no other key. Those of `backbone.dtype`, `data.max_length` and the heads' sizes hold until
/// the files are known.
const CONSTANT: [(&str, &str); 7] = [
    ("backbone.dtype", "\"float32\""),
    ("heads.medusa_num_heads", "5"),
    ("heads.medusa_num_layers", "1"),
    ("data.max_length", "2048"),
    ("schedule.name", "\"cosine\""),
    ("train.epochs", "2"),
    ("train.micro_batch_size", "1"),
];
/// Of an optimizer step, where the recipe has neither of the keys that determine it.
const ROWS_OF_A_STEP: &str = "8";

/// Adds the keys that are missing. Keys without a default get a value that passes every check; they were reported as missing.
pub(super) fn fill_in(table: &mut DeTable<'_>, recipe: &Path) {
    set(table, "backbone.path", "\"\"");
    set(table, "data.train", "[]");
    if find(table, "stage").is_none_or(|(_, stages)| stages.get_ref().as_table().is_some_and(DeTable::is_empty)) {
        set(table, "stage.medusa1", "{}");
    }
    if find(table, "heads.architecture").and_then(|(_, value)| value.get_ref().as_str()) == Some("eagle3") {
        set(table, "loss.targets", "\"backbone\"");
    }
    fill_in_rates(table);
    fill_in_schedule(table);
    fill_in_batch(table);
    if has(table, "stage.medusa2.lora") {
        set(table, "stage.medusa2.lora.rank", "32");
        set(table, "stage.medusa2.lora.alpha", "16.0");
    }
    for (key, value) in CONSTANT {
        if key != "train.epochs" || !has(table, "train.max_steps") {
            set(table, key, value);
        }
    }
    let name = recipe.file_stem().unwrap_or_default().to_string_lossy();
    insert(table, "train.output_dir", DeValue::String(Cow::Owned(format!("checkpoints/{name}"))));
}

/// Rates of adapters are the paper's (arXiv 2401.10774, appendix B). A whole backbone learns at a tenth of the adapters' rate, and its heads
/// at half the rate of those beside adapters.
fn fill_in_rates(table: &mut DeTable<'_>) {
    let is_joint = has(table, "stage.medusa2");
    let has_adapters = has(table, "stage.medusa2.lora");
    let distils_itself =
        find(table, "stage.medusa2.self_distillation").and_then(|(_, value)| value.get_ref().as_bool());
    let (rate, multiplier) = match (is_joint, has_adapters, distils_itself) {
        (false, ..) => ("1e-3", None),
        (true, true, Some(true)) => ("1e-4", Some("4.0")),
        (true, true, _) => ("5e-4", Some("4.0")),
        (true, false, _) => ("5e-5", Some("20.0")),
    };
    // A recipe with a rate of its own has the paper's multiplier, as in 0.1.0.
    let multiplier = if has(table, "optimizer.learning_rate") { multiplier.map(|_| "4.0") } else { multiplier };
    set(table, "optimizer.learning_rate", rate);
    if let Some(multiplier) = multiplier {
        set(table, "optimizer.medusa_lr_multiplier", multiplier);
    }
}

/// A recipe with `schedule.name` and without a warm-up key has no warm-up, as in 0.1.0.
fn fill_in_schedule(table: &mut DeTable<'_>) {
    match has(table, "schedule.warmup_steps") || has(table, "schedule.warmup_ratio") {
        true => {}
        false if has(table, "schedule.name") => set(table, "schedule.warmup_steps", "0"),
        false => set(table, "schedule.warmup_ratio", "0.1"),
    }
}

/// A recipe with `train.micro_batch_size` and without `gradient_accumulation_steps` accumulates nothing, as in 0.1.0.
fn fill_in_batch(table: &mut DeTable<'_>) {
    let steps = if has(table, "train.micro_batch_size") { "1" } else { ROWS_OF_A_STEP };
    set(table, "train.gradient_accumulation_steps", steps);
}

/// Keys whose default depends on whether another key is set.
const DEPENDENT: [(&str, &str); 4] = [
    ("optimizer.medusa_lr_multiplier", "optimizer.learning_rate"),
    ("schedule.warmup_ratio", "schedule.name"),
    ("schedule.warmup_steps", "schedule.name"),
    ("train.gradient_accumulation_steps", "train.micro_batch_size"),
];

/// Why a key has its default, where that depends on whether another key is set: "train.micro_batch_size is not set".
pub(super) fn reason(key: &str, text: &LocatedToml<'_>) -> Option<String> {
    let (_, other) = DEPENDENT.iter().find(|(dependent, _)| *dependent == key)?;
    if key == "optimizer.medusa_lr_multiplier" && text.key("stage.medusa2.lora").is_some() {
        return None; // the same with and without a rate
    }
    let not = if text.key(other).is_some() { "" } else { "not " };
    Some(format!("{other} is {not}set"))
}

fn has(table: &DeTable<'_>, key: &str) -> bool {
    find(table, key).is_some()
}

/// Adds a key, unless it is there or its table is no table.
fn set(table: &mut DeTable<'_>, key: &'static str, value: &'static str) {
    insert(table, key, DeValue::parse(value).expect("a constant in TOML").into_inner());
}

fn insert<'t>(table: &mut DeTable<'t>, key: &'static str, value: DeValue<'t>) {
    let (path, name) = key.rsplit_once('.').expect("every key is in a table");
    let mut table = table;
    for part in path.split('.') {
        let inner = table.entry(added(Cow::Borrowed(part))).or_insert_with(|| added(DeValue::Table(DeTable::new())));
        let DeValue::Table(inner) = inner.get_mut() else { return };
        table = inner;
    }
    table.entry(added(Cow::Borrowed(name))).or_insert_with(|| added(value));
}

/// Without a place in the file.
fn added<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::recipe::Recipe;

    fn filled(text: &str) -> Recipe {
        let text = format!("[backbone]\npath = \"b\"\n[data]\ntrain = [\"d\"]\n{text}");
        Recipe::parse(Path::new("runs/first.toml"), &text).unwrap()
    }

    /// Rate and multiplier of the recipe with these lines.
    fn rates(text: &str) -> (f64, Option<f64>) {
        let optimizer = filled(text).optimizer;
        (optimizer.learning_rate.get(), optimizer.medusa_lr_multiplier.map(crate::numbers::Positive::get))
    }

    #[test]
    fn rates_depend_on_what_is_trained() {
        assert_eq!(rates("[stage.medusa1]"), (1e-3, None));
        assert_eq!(rates("[stage.medusa2]"), (5e-5, Some(20.0)));
        assert_eq!(rates("[stage.medusa2.lora]"), (5e-4, Some(4.0)));
        assert_eq!(rates("[stage.medusa2]\nself_distillation = true\nlora = {}"), (1e-4, Some(4.0)));
        assert_eq!(rates("[optimizer]\nlearning_rate = 1e-5\n[stage.medusa2]"), (1e-5, Some(4.0)));
    }

    #[test]
    fn eagle_learns_the_backbones_distribution() {
        let labels = |text: &str| filled(text).loss.targets.labels();
        assert_eq!(labels("[stage.medusa1]\n[heads]\narchitecture = \"eagle3\""), 0.0);
        assert_eq!(labels("[stage.medusa1]\n[heads]\narchitecture = \"eagle3\"\n[loss]\ntargets = \"labels\""), 1.0);
        assert_eq!(labels("[stage.medusa1]"), 1.0);
    }

    #[test]
    fn what_a_recipe_says_means_what_it_meant_before_it_could_be_left_out() {
        let schedule = filled("[stage.medusa1]\n[schedule]\nname = \"linear\"").schedule;
        assert_eq!((schedule.warmup_steps, schedule.warmup_ratio), (Some(0), None));
        let schedule = filled("[stage.medusa1]\n[schedule]\nmin_ratio = 0.1").schedule;
        assert_eq!(
            (schedule.warmup_steps, schedule.warmup_ratio.map(crate::numbers::Fraction::get)),
            (None, Some(0.1))
        );
        let batch = |text: &str| {
            let train = filled(&format!("[stage.medusa1]\n[train]\n{text}")).train;
            (train.micro_batch_size.get(), train.gradient_accumulation_steps.get())
        };
        assert_eq!(batch("micro_batch_size = 2"), (2, 1));
        assert_eq!(batch("gradient_accumulation_steps = 4"), (1, 4));
        assert_eq!(batch(""), (1, 8));
        let train = filled("[stage.medusa1]\n[train]\nmax_steps = 5").train;
        assert_eq!((train.epochs, train.max_steps.map(NonZeroUsize::get)), (None, Some(5)));
        assert_eq!(train.output_dir, Path::new("checkpoints/first"));
    }
}
