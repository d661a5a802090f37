//! `latency.json`: measured step times of a machine.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};
use super::sealed::sealed;
use crate::dtype::Dtype;

const WHAT: &str = "latencies";
const EXPECTED: &str = "holds no latencies; expected {\"plain_step_ms\":…,\"steps\":[{\"nodes\":…,\"depth\":…,\"step_ms\":…}], …} as `medusa tree --latency` writes it; remove the file to measure anew";

/// `latency.json`: step times and the conditions they were measured under.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// As `--device` spells it.
    pub device: String,
    /// The engine that was timed.
    pub engine: String,
    /// `--engine` of the measurement: that engine, or `auto`.
    pub engine_flag: String,
    /// Dtype of the backbone.
    pub dtype: Dtype,
    /// `nf4` or `int8`; absent for weights that were not quantised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// CPU threads.
    pub threads: usize,
    /// Tokens in the context before the steps.
    pub context: usize,
    /// The backbone's path or name, as it was given.
    pub backbone: String,
    /// A hash of its config and of the shapes and dtypes of its weights; absent in files of earlier versions, which are compared by
    /// name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backbone_sha256: Option<String>,
    /// SHA-256 of heads.safetensors; absent if the guesses were no heads'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads_sha256: Option<String>,
    /// Cores that other programs used during the measurement; absent if they left enough for all threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_cores: Option<f64>,
    /// How much longer the steps took than those that nothing interrupted; absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<Slowdown>,
    /// Milliseconds per step of plain decoding: one token.
    pub plain_step_ms: f64,
    /// Steps with a tree.
    pub steps: Vec<StepTime>,
    /// Steps of several texts at a time; absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_sequences: Vec<StepsOfSequences>,
}

/// Mean step times ÷ the times of steps that nothing interrupted, while they were timed. Other programs interrupt long steps more often.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slowdown {
    /// Of plain decoding.
    pub plain: f64,
    /// The mean over the trees.
    pub trees: f64,
}

impl Default for Slowdown {
    /// Nothing interrupted.
    fn default() -> Self {
        Self { plain: 1.0, trees: 1.0 }
    }
}

/// The step times of several texts that are decoded together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepsOfSequences {
    /// Texts.
    pub sequences: usize,
    /// Milliseconds per step of plain decoding: one token of each text.
    pub plain_step_ms: f64,
    /// Steps in which each text has its tree.
    pub steps: Vec<StepTime>,
    /// As [`Latency::slowdown`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<Slowdown>,
}

/// The step time of one tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTime {
    /// Nodes without the root.
    pub nodes: usize,
    /// Levels below the root, which is the number of heads that the tree uses.
    pub depth: usize,
    /// In milliseconds, relative to plain steps that nothing interrupted.
    pub step_ms: f64,
    /// As `step_ms`, in nine of ten rounds; absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_ms_range: Option<[f64; 2]>,
    /// Whether the tree is chosen at each step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
}

/// Conditions that a file must match; `None` matches any.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LatencyConditions {
    /// `cpu`, `cuda:0`.
    pub device: Option<String>,
    /// `--engine`: the engine that was timed, or how it was chosen.
    pub engine: Option<String>,
    /// Dtype of the backbone.
    pub dtype: Option<Dtype>,
    /// `nf4`, `int8` or `none`.
    pub quantization: Option<String>,
    /// CPU threads; compared only on the CPU.
    pub threads: Option<usize>,
    /// Tokens in the context before the steps.
    pub context: Option<usize>,
    /// The backbone's path or name, as it was given.
    pub backbone: Option<String>,
    /// As [`Latency::backbone_sha256`].
    pub backbone_sha256: Option<String>,
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: Option<String>,
}

impl Latency {
    /// Reads `latency.json`.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let latency: Self = error::read(path, WHAT, EXPECTED)?;
        let several = &latency.by_sequences;
        let steps = latency.steps.iter().chain(several.iter().flat_map(|batch| &batch.steps));
        let sizes = steps.flat_map(|step| {
            let [low, high] = step.range().map(|end| ("step_ms_range", end));
            [("nodes", step.nodes as f64), ("depth", step.depth as f64), ("step_ms", step.step_ms), low, high]
        });
        let plain =
            several.iter().flat_map(|b| [("sequences", b.sequences as f64), ("plain_step_ms", b.plain_step_ms)]);
        let slowdowns = latency.slowdown.iter().chain(several.iter().filter_map(|batch| batch.slowdown.as_ref()));
        let slowdown = slowdowns.flat_map(|batch| [("slowdown.plain", batch.plain), ("slowdown.trees", batch.trees)]);
        let mut numbers =
            [("plain_step_ms", latency.plain_step_ms)].into_iter().chain(slowdown).chain(plain).chain(sizes);
        if let Some((what, value)) = numbers.find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(FormatError::Damaged { path: path.to_owned(), what, value });
        }
        match latency.invalid_field() {
            Some((key, expected, got)) => Err(FormatError::InvalidField {
                path: path.to_owned(),
                key: key.to_owned(),
                expected,
                got,
                remedy: "remove it to measure anew",
            }),
            None => Ok(latency),
        }
    }

    /// The first number that does not fit the others, what would, and what it is.
    fn invalid_field(&self) -> Option<(&'static str, String, String)> {
        if let Some(busy) = self.busy_cores.filter(|busy| !(busy.is_finite() && *busy >= 0.0)) {
            return Some(("busy_cores", "a number of at least 0".to_owned(), busy.to_string()));
        }
        let several = self.by_sequences.iter().map(|batch| &batch.steps);
        for steps in [&self.steps].into_iter().chain(several) {
            if let Some((nodes, depth, _)) =
                super::twice(steps.iter().map(|step| (step.nodes, step.depth, step.dynamic)))
            {
                let got = format!("{nodes} nodes of {depth} levels twice");
                return Some(("steps", "each tree once".to_owned(), got));
            }
        }
        let all = self.steps.iter().chain(self.by_sequences.iter().flat_map(|batch| &batch.steps));
        if let Some([low, high]) = all.map(StepTime::range).find(|[low, high]| low > high) {
            return Some(("step_ms_range", "the lower end first".to_owned(), format!("[{low}, {high}]")));
        }
        super::twice(self.by_sequences.iter().map(|batch| batch.sequences))
            .map(|twice| ("by_sequences", "each number of sequences once".to_owned(), format!("{twice} twice")))
    }

    /// Writes `latency.json` atomically.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        let json = serde_json::to_string_pretty(self).expect("numbers and texts are JSON");
        error::write(path, WHAT, &sealed(&json))
    }

    /// What to know about times from a busy machine.
    pub fn caveat(&self) -> Option<String> {
        let busy = self.busy_cores?;
        Some(format!(
            "other programs used {busy:.1} cores while its steps were timed, so large trees may look too slow; remove it and measure \
             again on a quiet machine"
        ))
    }

    /// Refuses a file measured under other conditions; `path` is the file's, for the error.
    ///
    /// # Errors
    /// [`FormatError::OtherConditions`], with the first difference.
    pub fn check(&self, asked: &LatencyConditions, path: &Path) -> Result<(), FormatError> {
        let on_cpu = self.device == "cpu";
        let text = |number: &usize| number.to_string();
        let differences = [
            ("device", self.device.clone(), asked.device.clone()),
            ("engine", self.engine_flag.clone(), asked.engine.clone().filter(|asked| *asked != self.engine)),
            ("dtype", self.dtype.to_string(), asked.dtype.map(|dtype| dtype.to_string())),
            ("quantization", self.quantization.clone().unwrap_or_else(|| "none".into()), asked.quantization.clone()),
            ("threads", text(&self.threads), asked.threads.as_ref().filter(|_| on_cpu).map(text)),
            ("a context of", text(&self.context), asked.context.as_ref().map(text)),
            (
                "the backbone",
                self.backbone_in_words(asked),
                asked.backbone.clone().filter(|_| !self.is_of_backbone(asked)),
            ),
            ("heads of sha256", self.heads_sha256.clone().unwrap_or_else(|| "none".into()), asked.heads_sha256.clone()),
        ];
        for (what, measured, asked) in differences {
            if let Some(asked) = asked.filter(|asked| *asked != measured) {
                return Err(FormatError::OtherConditions { path: path.to_owned(), what, measured, asked });
            }
        }
        Ok(())
    }

    /// Whether the backbone has the same config, shapes and dtypes, whatever its path.
    fn is_of_backbone(&self, asked: &LatencyConditions) -> bool {
        self.backbone_sha256.is_some() && self.backbone_sha256 == asked.backbone_sha256
    }

    /// Its name; where another backbone has that name now, also that it was another.
    fn backbone_in_words(&self, asked: &LatencyConditions) -> String {
        let is_renewed = asked.backbone.as_ref() == Some(&self.backbone)
            && self.backbone_sha256.is_some()
            && asked.backbone_sha256.is_some()
            && !self.is_of_backbone(asked);
        if is_renewed { format!("{} as it was before", self.backbone) } else { self.backbone.clone() }
    }

    /// Step time of a static tree of this size and depth, or of one that is chosen at each step: measured, or interpolated between the next smaller
    /// and next larger tree of that depth; `None` outside the measured range.
    pub fn step(&self, dynamic: bool, nodes: usize, depth: usize) -> Option<StepTime> {
        let at_depth = || self.steps.iter().filter(|step| step.depth == depth && step.dynamic == dynamic);
        let below = at_depth().filter(|step| step.nodes <= nodes).max_by_key(|step| step.nodes)?;
        let above = at_depth().filter(|step| step.nodes >= nodes).min_by_key(|step| step.nodes)?;
        let share = (nodes - below.nodes) as f64 / (above.nodes - below.nodes).max(1) as f64;
        let between = |ms: fn(&StepTime) -> f64| ms(below) + share * (ms(above) - ms(below));
        let has_range = below.step_ms_range.is_some() && above.step_ms_range.is_some();
        let range = || [between(|step| step.range()[0]), between(|step| step.range()[1])];
        let step_ms = between(|step| step.step_ms);
        Some(StepTime { nodes, step_ms, step_ms_range: has_range.then(range), ..*below })
    }
}

impl StepTime {
    /// `step_ms_range`, or only `step_ms`.
    pub fn range(&self) -> [f64; 2] {
        self.step_ms_range.unwrap_or([self.step_ms; 2])
    }
}

#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    pub(crate) fn latency(steps: &[(usize, usize, f64)]) -> Latency {
        Latency {
            device: "cpu".into(),
            engine: "tch".into(),
            engine_flag: "tch".into(),
            dtype: Dtype::Float32,
            quantization: None,
            threads: 2,
            context: 256,
            backbone: "b".into(),
            backbone_sha256: Some("cafe".into()),
            heads_sha256: Some("ab".into()),
            busy_cores: None,
            slowdown: None,
            plain_step_ms: 2.0,
            steps: steps
                .iter()
                .map(|&(nodes, depth, step_ms)| StepTime { nodes, depth, step_ms, ..StepTime::default() })
                .collect(),
            by_sequences: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::examples::latency;
    use super::*;

    #[test]
    fn saved_latencies_come_back_and_broken_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latency.json");
        let saved = latency(&[(1, 1, 2.5), (8, 3, 4.0)]);
        saved.save(&path).unwrap();
        assert_eq!(Latency::load(&path).unwrap(), saved);
        assert!(saved.caveat().is_none(), "absent, as in files of earlier versions");
        let busy = Latency { busy_cores: Some(1.44), ..saved.clone() };
        busy.save(&path).unwrap();
        assert!(Latency::load(&path).unwrap().caveat().unwrap().starts_with("other programs used 1.4 cores while"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("by_sequences"), "a file of earlier versions has none: {text}");
        let four = StepsOfSequences { sequences: 4, plain_step_ms: 3.0, steps: saved.steps.clone(), slowdown: None };
        let several = Latency { by_sequences: vec![four], ..saved.clone() };
        several.save(&path).unwrap();
        assert_eq!(Latency::load(&path).unwrap(), several);
        let mut ranged = saved.clone();
        ranged.steps[0].step_ms_range = Some([2.25, 2.75]);
        ranged.save(&path).unwrap();
        assert_eq!(Latency::load(&path).unwrap(), ranged);
        let complaint = |text: &str| {
            crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
            Latency::load(&path).unwrap_err().to_string()
        };
        let text = serde_json::to_string(&saved).unwrap();
        assert!(complaint(&text.replace(r#""engine":"tch","#, "")).contains("remove the file to measure anew"));
        let negative = complaint(&text.replace("4.0", "-4.0"));
        assert!(negative.contains("latency.json: step_ms is -4; expected a number above 0"), "{negative}");
        assert!(complaint(&text.replace("\"nodes\":8", "\"nodes\":0")).contains("nodes is 0"));
        let no_time = serde_json::to_string(&ranged).unwrap().replace("[2.25,2.75]", "[0.0,2.75]");
        assert!(complaint(&no_time).contains("step_ms_range is 0"));
        let reversed = serde_json::to_string(&ranged).unwrap().replace("[2.25,2.75]", "[2.75,2.25]");
        assert!(complaint(&reversed).contains("step_ms_range: expected the lower end first, got [2.75, 2.25]"));
        let twice = text.replace("\"nodes\":8,\"depth\":3", "\"nodes\":1,\"depth\":1");
        assert!(complaint(&twice).contains("steps: expected each tree once, got 1 nodes of 1 levels twice"));
        assert!(complaint(&text[..40]).contains("latency.json holds no latencies"));
        assert!(complaint("[[0]]").contains("holds no latencies"));
    }

    #[test]
    fn only_what_was_asked_for_and_differs_is_refused() {
        let (file, path) = (latency(&[(1, 1, 2.5)]), Path::new("l.json"));
        let refused = |asked: &LatencyConditions| file.check(asked, path).unwrap_err().to_string();
        let same = LatencyConditions {
            device: Some("cpu".into()),
            threads: Some(2),
            context: Some(256),
            ..LatencyConditions::default()
        };
        assert!(file.check(&same, path).is_ok() && file.check(&LatencyConditions::default(), path).is_ok());
        assert!(
            refused(&LatencyConditions { device: Some("cuda:0".into()), ..same.clone() })
                .starts_with("l.json was measured with device cpu, not with cuda:0; give another --latency FILE")
        );
        assert!(
            refused(&LatencyConditions { dtype: Some(Dtype::BFloat16), ..same.clone() })
                .contains("dtype float32, not with bfloat16")
        );
        let on = |engine: &str| LatencyConditions { engine: Some(engine.into()), ..same.clone() };
        assert!(refused(&on("cuda")).contains("engine tch, not with cuda"));
        assert!(refused(&on("auto")).contains("engine tch, not with auto"), "another engine may decode");
        let chosen = Latency { engine_flag: "auto".into(), ..file.clone() };
        assert!(chosen.check(&on("auto"), path).is_ok() && chosen.check(&on("tch"), path).is_ok());
        assert!(chosen.check(&on("cuda"), path).is_err());
        assert!(refused(&LatencyConditions { threads: Some(4), ..same.clone() }).contains("threads 2, not with 4"));
        assert!(
            refused(&LatencyConditions { context: Some(64), ..same.clone() }).contains("a context of 256, not with 64")
        );
        assert!(
            refused(&LatencyConditions { backbone: Some("c".into()), ..same.clone() })
                .contains("the backbone b, not with c")
        );
        let conditions = |name: &str, sha256: &str| LatencyConditions {
            backbone: Some(name.into()),
            backbone_sha256: Some(sha256.into()),
            ..same.clone()
        };
        assert!(file.check(&conditions("/elsewhere/b", "cafe"), path).is_ok(), "the same backbone by another path");
        assert!(refused(&conditions("b", "beef")).contains("the backbone b as it was before, not with b"));
        let old = Latency { backbone_sha256: None, ..file.clone() };
        assert!(
            old.check(&conditions("b", "cafe"), path).is_ok() && old.check(&conditions("c", "cafe"), path).is_err()
        );
        assert!(refused(&LatencyConditions { heads_sha256: Some("cd".into()), ..same }).contains("heads of sha256 ab"));
        let on_gpu = Latency { device: "cuda:0".into(), ..file };
        assert!(on_gpu.check(&LatencyConditions { threads: Some(4), ..LatencyConditions::default() }, path).is_ok());
    }

    #[test]
    fn between_measured_sizes_of_one_depth_times_lie_on_a_line() {
        let mut file = latency(&[(4, 2, 3.0), (8, 2, 5.0), (6, 3, 100.0), (16, 3, 110.0)]);
        let step_ms = |nodes, depth| file.step(false, nodes, depth).map(|step| step.step_ms);
        assert_eq!(
            [(4, 2), (5, 2), (11, 3)].map(|(nodes, depth)| step_ms(nodes, depth)),
            [Some(3.0), Some(3.5), Some(105.0)]
        );
        assert_eq!([(3, 2), (9, 2), (8, 4)].map(|(nodes, depth)| step_ms(nodes, depth)), [None; 3]);
        file.steps[0].step_ms_range = Some([2.0, 4.0]);
        assert_eq!(file.step(false, 5, 2).unwrap().range(), [3.5; 2], "one of the two has no range");
        file.steps[1].step_ms_range = Some([4.0, 9.0]);
        assert_eq!(file.step(false, 5, 2).unwrap().step_ms_range, Some([2.5, 5.25]));
    }
}
