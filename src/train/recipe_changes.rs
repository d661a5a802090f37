//! Which keys of its recipe a run may change when it is resumed.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use toml::{Table, Value};

/// Places of files, which may move: hashes identify the data, and the run is in its folder.
const PLACES: [&str; 4] = ["data.train", "data.hidden_states", "data.validation", "train.output_dir"];
/// The number of a run's steps.
const LENGTH: [&str; 2] = ["train.epochs", "train.max_steps"];
const PATIENCE: &str = "train.patience";
const LOG_EVERY: &str = "train.log_every";
const SAVE_EVERY: &str = "train.save_every";
/// Intervals, and what is kept of the checkpoints.
const INTERVALS: [&str; 4] = [LOG_EVERY, SAVE_EVERY, "train.eval_every", "train.keep_checkpoints"];
/// Where the run computes: on other GPUs it is the same run.
const DEVICE_MAP: &str = "backbone.device_map";
/// How processes share the optimizer's state: checkpoints hold whole tensors.
const SHARING: [&str; 1] = ["optimizer.zero_stage"];
/// The sequences of an optimizer step are the product; it must stay.
const BATCH: [&str; 2] = ["train.micro_batch_size", "train.gradient_accumulation_steps"];

/// The keys by their paths.
type Keys = BTreeMap<String, Value>;

/// How the recipe that a run is resumed with differs from its own, in keys that may change.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RecipeChanges {
    /// Each in words.
    pub(super) keys: Vec<String>,
    /// Whether one of them sets the number of steps.
    pub(super) length: bool,
    /// Whether `train.patience` is one of them.
    pub(super) patience: bool,
}

impl RecipeChanges {
    /// Compares two resolved recipes.
    ///
    /// # Errors
    /// The first difference that makes `now` another run, as the end of a sentence.
    pub(super) fn between(before: &str, now: &str) -> Result<Self, String> {
        let [before, now] = [before, now].map(|text| text.parse::<Table>().map(|table| keys(&table)));
        let before = before.map_err(|error| format!("its recipe is no TOML: {}", error.message()))?;
        let now = now.map_err(|error| format!("this recipe is no TOML: {}", error.message()))?;
        same_batch(&before, &now)?;
        let mut changes = Self::default();
        let mut both: Vec<&String> = before.keys().chain(now.keys()).collect();
        both.sort();
        both.dedup();
        for key in both {
            let (old, new) = (before.get(key), now.get(key));
            if old != new {
                changes.add(key, old, new)?;
            }
        }
        Ok(changes)
    }

    fn add(&mut self, key: &str, old: Option<&Value>, new: Option<&Value>) -> Result<(), String> {
        let is_one_of = |keys: &[&str]| keys.contains(&key);
        if is_one_of(&PLACES) {
            return Ok(());
        }
        self.length |= is_one_of(&LENGTH);
        self.patience |= key == PATIENCE;
        let may_change = [&LENGTH[..], &[PATIENCE], &INTERVALS, &BATCH, &SHARING, &[DEVICE_MAP]].concat();
        if !may_change.contains(&key) {
            return Err(difference(key, old, new));
        }
        let name = key.strip_prefix("train.").or_else(|| key.strip_prefix("optimizer.")).unwrap_or(key);
        let was = old.map_or_else(String::new, |old| format!(" (was {old})"));
        self.keys.push(new.map_or_else(|| format!("no {name}{was}"), |new| format!("{name} = {new}{was}")));
        Ok(())
    }
}

/// The keys of a resolved recipe and their values.
pub(super) fn keys_of(recipe: &str) -> Vec<(String, String)> {
    let table = recipe.parse::<Table>().unwrap_or_default();
    keys(&table).into_iter().map(|(key, value)| (key, value.to_string())).collect()
}

/// The keys of a table and of the tables in it; an empty table counts as a key.
fn keys(table: &Table) -> Keys {
    let mut keys = Keys::new();
    for (name, value) in table {
        match value {
            Value::Table(inner) if !inner.is_empty() => {
                keys.extend(self::keys(inner).into_iter().map(|(key, value)| (format!("{name}.{key}"), value)));
            }
            value => drop(keys.insert(name.clone(), value.clone())),
        }
    }
    keys
}

/// An interval of a resolved recipe, by its key.
fn interval(recipe: &str, key: &str) -> Option<NonZeroUsize> {
    let value = keys(&recipe.parse().ok()?).remove(key)?;
    NonZeroUsize::new(usize::try_from(value.as_integer()?).ok()?)
}

/// `train.save_every` of a resolved recipe.
pub(super) fn save_every(recipe: &str) -> Option<NonZeroUsize> {
    interval(recipe, SAVE_EVERY)
}

/// `train.log_every` of a resolved recipe.
pub(super) fn log_every(recipe: &str) -> Option<NonZeroUsize> {
    interval(recipe, LOG_EVERY)
}

fn same_batch(before: &Keys, now: &Keys) -> Result<(), String> {
    let size = |keys: &Keys| {
        let [rows, steps] = BATCH.map(|key| keys.get(key)?.as_integer());
        rows?.checked_mul(steps?)
    };
    match (size(before), size(now)) {
        (Some(old), Some(new)) if old != new => Err(format!(
            "its optimizer steps have {old} sequences, this recipe's {new} (micro_batch_size × \
             gradient_accumulation_steps); only the split into micro batches may change"
        )),
        _ => Ok(()),
    }
}

fn difference(key: &str, old: Option<&Value>, new: Option<&Value>) -> String {
    let line = |value: &Value| if value.is_table() { format!("`[{key}]`") } else { format!("`{key} = {value}`") };
    match (old.map(line), new.map(line)) {
        (Some(old), Some(new)) => format!("its recipe says {old}, this one {new}"),
        (Some(old), None) => format!("its recipe says {old}, this one does not"),
        (_, new) => format!("this recipe says {}, its own does not", new.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "[stage.medusa1]\n[optimizer]\nlearning_rate = 0.01\n[data]\ntrain = [\"a\"]\n[train]\noutput_dir = \"run\"\nepochs = 2\n\
        micro_batch_size = 2\ngradient_accumulation_steps = 4\nsave_every = 5\n";

    fn changed(edits: &[(&str, &str)]) -> Result<RecipeChanges, String> {
        let now = edits.iter().fold(BEFORE.to_owned(), |text, (piece, by)| {
            assert!(text.contains(piece), "{piece}");
            text.replace(piece, by)
        });
        RecipeChanges::between(BEFORE, &now)
    }

    #[test]
    fn ends_intervals_places_and_the_split_of_a_batch_may_change() {
        assert_eq!(changed(&[]), Ok(RecipeChanges::default()));
        assert_eq!(changed(&[("\"run\"", "\"elsewhere\""), ("\"a\"", "\"b\"")]), Ok(RecipeChanges::default()));
        let changes = changed(&[("epochs = 2", "max_steps = 9"), ("save_every = 5", "save_every = 6")]).unwrap();
        assert_eq!(changes.keys, ["no epochs (was 2)", "max_steps = 9", "save_every = 6 (was 5)"]);
        assert!(changes.length && !changes.patience);
        let patience = changed(&[("epochs = 2", "epochs = 2\npatience = 3")]).unwrap();
        assert!(patience.patience && !patience.length);
        let split = changed(&[("micro_batch_size = 2", "micro_batch_size = 8"), ("steps = 4", "steps = 1")]).unwrap();
        assert_eq!(split.keys, ["gradient_accumulation_steps = 1 (was 4)", "micro_batch_size = 8 (was 2)"]);
        assert!(!split.length);
        let shared = changed(&[("learning_rate = 0.01", "learning_rate = 0.01\nzero_stage = 1")]).unwrap();
        assert_eq!(shared.keys, ["zero_stage = 1"]);
    }

    #[test]
    fn layers_may_lie_on_other_devices() {
        let mapped = |map| format!("[stage.medusa1]\n[backbone]\ndevice_map = {map}");
        let changes = |before: &str, now: &str| {
            let [before, now] = [before, now].map(|stage| BEFORE.replace("[stage.medusa1]", stage));
            RecipeChanges::between(&before, &now).unwrap().keys
        };
        let (auto, list) = (mapped("\"auto\""), mapped("[2, 3]"));
        assert_eq!(changes(&auto, &list), ["backbone.device_map = [2, 3] (was \"auto\")"]);
        assert_eq!(
            changes("[stage.medusa1]\n[backbone]\npath = \"b\"", &(list + "\npath = \"b\"")),
            ["backbone.device_map = [2, 3]"]
        );
    }

    #[test]
    fn other_changes_make_another_run() {
        let refused = |piece, by| changed(&[(piece, by)]).unwrap_err();
        let rate = refused("learning_rate = 0.01", "learning_rate = 0.02");
        assert_eq!(rate, "its recipe says `optimizer.learning_rate = 0.01`, this one `optimizer.learning_rate = 0.02`");
        let stage = refused("[stage.medusa1]", "[stage.medusa2]");
        assert_eq!(stage, "its recipe says `[stage.medusa1]`, this one does not");
        assert!(
            refused("epochs = 2", "epochs = 2\nseed = 1")
                .starts_with("this recipe says `train.seed = 1`, its own does not")
        );
        assert!(
            refused("steps = 4", "steps = 2").starts_with("its optimizer steps have 8 sequences, this recipe's 4 (")
        );
        assert!(RecipeChanges::between("[", BEFORE).unwrap_err().starts_with("its recipe is no TOML: "));
    }
}
