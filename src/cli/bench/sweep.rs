//! Parses `--sweep`.

use std::num::NonZeroUsize;
use std::str::FromStr;

use serde_json::Number;

use crate::cli::numbers::{above_zero, probability, temperature};
use crate::formats::bench::SweptValue;
use crate::numbers::{NonNegative, Probability};

/// `--sweep NAME=VALUE,VALUE,…`: one result per value.
#[derive(Debug, Clone, PartialEq)]
pub enum SweepFlag {
    /// The best tree of each size (paper figure 4).
    Nodes(Vec<NonZeroUsize>),
    /// ε of typical acceptance (paper figure 5).
    PosteriorThreshold(Vec<Probability>),
    /// Tokens of each prompt.
    Context(Vec<NonZeroUsize>),
    Temperature(Vec<NonNegative>),
}

impl SweepFlag {
    /// The swept values, one per result.
    pub(super) fn values(&self) -> Vec<SweptValue> {
        let number = |value| Number::from_f64(value).expect("flags hold finite numbers");
        let (name, numbers): (_, Vec<Number>) = match self {
            SweepFlag::Nodes(counts) => ("nodes", counts.iter().map(|count| count.get().into()).collect()),
            SweepFlag::PosteriorThreshold(of) => {
                ("posterior-threshold", of.iter().map(|one| number(one.get())).collect())
            }
            SweepFlag::Context(counts) => ("context", counts.iter().map(|count| count.get().into()).collect()),
            SweepFlag::Temperature(of) => ("temperature", of.iter().map(|one| number(one.get())).collect()),
        };
        numbers.into_iter().map(|value| SweptValue { name: name.into(), value }).collect()
    }
}

impl FromStr for SweepFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, values) = text.split_once('=').ok_or("expected NAME=VALUE,VALUE,…, for example nodes=8,16,32")?;
        match name {
            "nodes" => Ok(SweepFlag::Nodes(list(name, values, above_zero)?)),
            "posterior-threshold" => Ok(SweepFlag::PosteriorThreshold(list(name, values, probability)?)),
            "context" => Ok(SweepFlag::Context(list(name, values, above_zero)?)),
            "temperature" => Ok(SweepFlag::Temperature(list(name, values, temperature)?)),
            _ => Err(format!("no sweep {name:?}; expected nodes, posterior-threshold, context or temperature")),
        }
    }
}

fn list<T>(name: &str, values: &str, one: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    if values.trim().is_empty() {
        return Err(format!("{name} has no values; expected {name}=VALUE,VALUE,…"));
    }
    values.split(',').map(|value| one(value.trim()).map_err(|why| format!("{name} {value:?}: {why}"))).collect()
}
