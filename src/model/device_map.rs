//! `backbone.device_map` of a recipe: over which devices a backbone's layers are spread.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::plural::counted;
use crate::torch::shared_gpus::SharedGpus;

/// How layers are spread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "MapAsWritten", into = "MapAsWritten")]
pub enum DeviceMap {
    /// Over all GPUs of the process, so that the fullest has as little as possible; on a CPU, or with one GPU, nothing is spread.
    Auto,
    /// So many on the first GPU, so many on the second, …
    Layers(Vec<NonZeroUsize>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"auto\" or a list of layer counts, such as [40, 40]")]
enum MapAsWritten {
    Word(String),
    List(Vec<i64>),
}

impl TryFrom<MapAsWritten> for DeviceMap {
    type Error = String;

    fn try_from(written: MapAsWritten) -> Result<Self, String> {
        let counts = match written {
            MapAsWritten::Word(word) if word == "auto" => return Ok(Self::Auto),
            MapAsWritten::Word(word) => {
                return Err(format!("expected \"auto\" or a list of layer counts, such as [40, 40], got {word:?}"));
            }
            MapAsWritten::List(counts) => counts,
        };
        let count = |&count: &i64| {
            let layers = usize::try_from(count).ok().and_then(NonZeroUsize::new);
            layers.ok_or_else(|| format!("expected at least one layer for each GPU, got {count}"))
        };
        match &counts[..] {
            [] => Err("expected at least one layer count, got []".into()),
            counts => Ok(Self::Layers(counts.iter().map(count).collect::<Result<_, _>>()?)),
        }
    }
}

impl From<DeviceMap> for MapAsWritten {
    fn from(map: DeviceMap) -> Self {
        match map {
            DeviceMap::Auto => Self::Word("auto".into()),
            DeviceMap::Layers(counts) => Self::List(counts.into_iter().map(|count| count.get() as i64).collect()),
        }
    }
}

/// As a flag has it: `auto`, or `40,40`.
impl FromStr for DeviceMap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let counts: Result<Vec<i64>, _> = text.split(',').map(|count| count.trim().parse()).collect();
        let counts = counts.map_err(|_| format!("expected auto or layer counts, such as 40,40, got {text:?}"))?;
        MapAsWritten::List(counts).try_into()
    }
}

impl DeviceMap {
    /// Over how many devices layers are spread. `gpus`: those of each process ([`SharedGpus::per_process`]).
    pub fn stages(&self, gpus: Option<usize>) -> usize {
        match self {
            Self::Auto => gpus.unwrap_or(1).max(1),
            Self::Layers(counts) => counts.len(),
        }
    }

    /// The devices that a map spreads a backbone over, for a run on `device`, which is the first of them; without a map, only that.
    pub fn devices(map: Option<&Self>, gpus: SharedGpus, device: Device) -> Vec<Device> {
        let stages = map.map_or(1, |map| map.stages(gpus.per_process(device)));
        match device {
            Device::Cuda(first) => (first..first + stages).map(Device::Cuda).collect(),
            _ => vec![device; stages],
        }
    }

    /// What is expected instead, if it does not fit a backbone of so many layers.
    pub fn expected_layers(&self, layers: usize) -> Option<String> {
        let Self::Layers(counts) = self else { return None };
        let sum = counts.iter().map(|count| count.get()).fold(0, usize::saturating_add);
        let expected = || format!("counts that add up to {layers}, the backbone's layers; these add up to {sum}");
        (sum != layers).then(expected)
    }

    /// What is expected instead, if there are too few GPUs: see [`SharedGpus::per_process`].
    pub fn expected_gpus(&self, gpus: Option<usize>) -> Option<String> {
        let (Self::Layers(counts), Some(gpus)) = (self, gpus) else { return None };
        let (most, there) = (counted(gpus, "count"), counted(gpus, "GPU"));
        let expected = || format!("at most {most}, one for each GPU: this process has {there}; or \"auto\"");
        (counts.len() > gpus).then(expected)
    }
}

impl fmt::Display for DeviceMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("\"auto\""),
            Self::Layers(counts) => write!(f, "{counts:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::DeviceChoice;

    fn map(text: &str) -> Result<DeviceMap, String> {
        #[derive(Deserialize)]
        struct Table {
            device_map: DeviceMap,
        }
        let table: Result<Table, _> = toml::from_str(&format!("device_map = {text}"));
        table.map(|table| table.device_map).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_map_is_a_word_or_counts_of_at_least_one_layer() {
        for text in ["\"auto\"", "[20, 20]", "[7]"] {
            assert_eq!(map(text).unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("\"gpu\"", "expected \"auto\" or a list of layer counts, such as [40, 40], got \"gpu\""),
            ("3", "expected \"auto\" or a list of layer counts, such as [40, 40]"),
            ("[\"a\"]", "expected \"auto\" or a list of layer counts, such as [40, 40]"),
            ("[2, 0]", "expected at least one layer for each GPU, got 0"),
            ("[-2]", "expected at least one layer for each GPU, got -2"),
            ("[]", "expected at least one layer count, got []"),
        ] {
            assert_eq!(map(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn a_flag_is_a_word_or_counts() {
        assert_eq!("20,20".parse(), map("[20, 20]"));
        assert_eq!("auto".parse(), map("\"auto\""));
        let refused = |text: &str| text.parse::<DeviceMap>().unwrap_err();
        assert_eq!(refused("20,x"), "expected auto or layer counts, such as 40,40, got \"20,x\"");
        assert_eq!(refused("20,0"), "expected at least one layer for each GPU, got 0");
    }

    #[test]
    fn processes_of_one_machine_have_groups_of_gpus_of_their_own() {
        let cuda = |range: std::ops::Range<usize>| range.map(Device::Cuda).collect::<Vec<_>>();
        let (auto, two) = (map("\"auto\"").unwrap(), map("[3, 4]").unwrap());
        let alone = SharedGpus { gpus: 4, local_rank: 0, processes: 1 };
        let devices = DeviceMap::devices;
        assert_eq!(devices(None, alone, Device::Cuda(2)), cuda(2..3));
        assert_eq!(devices(Some(&auto), alone, Device::Cuda(0)), cuda(0..4));
        assert_eq!(devices(Some(&auto), alone, Device::Cuda(3)), cuda(3..4));
        assert_eq!(devices(Some(&two), alone, Device::Cuda(1)), cuda(1..3));
        assert_eq!(devices(Some(&auto), alone, Device::Cpu), [Device::Cpu]);
        assert_eq!(devices(Some(&two), alone, Device::Cpu), [Device::Cpu; 2]);
        let second = SharedGpus { gpus: 8, local_rank: 1, processes: 2 };
        let on_own = |map: &DeviceMap| {
            let stages = map.stages(second.per_process(Device::Cuda(0)));
            let first = DeviceChoice::Auto.for_process(second, stages).expect("a GPU for each");
            let DeviceChoice::Cuda(first) = first else { panic!("{first:?}") };
            devices(Some(map), second, Device::Cuda(first))
        };
        assert_eq!([on_own(&auto), on_own(&two)], [cuda(4..8), cuda(2..4)]);
        assert_eq!([second.per_process(Device::Cuda(0)), second.per_process(Device::Cpu)], [Some(4), None]);
    }
}
