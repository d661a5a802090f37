//! Checks of a recipe against the files that it names: the backbone's config, data, templates, and weights to start from.

use std::io::ErrorKind;
use std::path::Path;

use tch::Device;

use super::Recipe;
use super::heads::HeadsTable;
use super::mistakes::{Findings, Mistake};
use crate::data::chat_template::TemplateChoice;
use crate::data::{captured, source};
use crate::draft::heads::{HEADS_FILE, import};
use crate::dtype::Dtype;
use crate::files;
use crate::gguf;
use crate::model::config::LlamaConfig;
use crate::model::lora::modules_of;
use crate::model::peft::ADAPTER_FILE;
use crate::torch::device_name;

const DEVICE_MAP: &str = "backbone.device_map";

/// Of a file's name, on the file systems in use.
const NAME_BYTES: usize = 255;

impl Recipe {
    /// Checks values against the backbone's config; the recipe must have local paths. Returns the config if it can be read.
    pub(super) fn check_backbone(&self, findings: &mut Findings<'_>) -> Option<LlamaConfig> {
        let key = "backbone.path";
        if !findings.are_as_written(&[key]) {
            return None;
        }
        let (folder, place) = (Path::new(&self.backbone.path), findings.text().value(key));
        if !folder.is_dir() && !gguf::file::is_gguf(folder) {
            let hint = "give a folder in Hugging Face layout, a GGUF file, or an id of the Hub: owner/name or owner/name@revision";
            findings.add(place, Mistake::Missing { key, path: folder.to_owned(), hint });
            return None;
        }
        match LlamaConfig::load(folder) {
            Ok(config) => {
                self.check_lora(findings, &config);
                self.check_w2_sizes(findings, &config);
                self.heads.check_taps(findings, &config);
                self.check_context(findings, &config);
                self.check_layers(findings, &config);
                Some(config)
            }
            Err(error) => {
                findings.add(place, Mistake::Backbone(error));
                None
            }
        }
    }

    /// A default length is the context at most.
    fn check_context(&self, findings: &mut Findings<'_>, config: &LlamaConfig) {
        let (key, length, context) = ("data.max_length", self.data.max_length.get(), config.largest_context());
        let is_written = findings.text().key(key).is_some() && findings.are_as_written(&[key]);
        if is_written && i64::try_from(length).is_ok_and(|length| length > context) {
            findings.clash(key, length, format!("at most {context}, the backbone's context"));
        }
    }

    /// Every layer is on one device.
    fn check_layers(&self, findings: &mut Findings<'_>, backbone: &LlamaConfig) {
        if let Some((map, expected)) = self
            .backbone
            .device_map
            .as_ref()
            .and_then(|map| Some((map, map.expected_layers(backbone.num_hidden_layers)?)))
        {
            findings.clash(DEVICE_MAP, map, expected);
        }
    }

    /// Every stage has a device. `gpus`: see [`crate::torch::shared_gpus::SharedGpus::per_process`].
    pub(super) fn check_gpus(&self, findings: &mut Findings<'_>, gpus: Option<usize>) {
        if let Some((map, expected)) =
            self.backbone.device_map.as_ref().and_then(|map| Some((map, map.expected_gpus(gpus)?)))
        {
            findings.clash(DEVICE_MAP, map, expected);
        }
    }

    /// Float64 is for the CPU: kernels of GPUs compute in at most float32.
    pub(super) fn check_device(&self, findings: &mut Findings<'_>, device: Device) {
        if self.backbone.dtype == Dtype::Float64 && device != Device::Cpu {
            let expected =
                format!("float32 or 16 bits on {}; or train on the CPU with --device cpu", device_name(device));
            findings.clash("backbone.dtype", "\"float64\"", expected);
        }
    }

    /// B·A of the hidden size or more would have more weights than W2, and a vocabulary of all tokens is not truncated.
    fn check_w2_sizes(&self, findings: &mut Findings<'_>, backbone: &LlamaConfig) {
        let HeadsTable { w2_rank, draft_vocab_size, .. } = self.heads;
        let sizes = [
            ("heads.w2_rank", w2_rank, backbone.hidden_size, "hidden size"),
            ("heads.draft_vocab_size", draft_vocab_size, backbone.vocab_size, "vocabulary"),
        ];
        for (key, size, most, what) in sizes {
            if let Some(size) = size.filter(|size| size.get() as i64 >= most) {
                findings.clash(key, size, format!("less than {most}, the backbone's {what}; or remove the key"));
            }
        }
    }

    /// Every named layer exists: families name theirs differently. B·A has no more ranks than a layer has inputs.
    fn check_lora(&self, findings: &mut Findings<'_>, backbone: &LlamaConfig) {
        let Some(lora) = self.stage.lora() else { return };
        let most = backbone.hidden_size.max(backbone.intermediate_size);
        if !i64::try_from(lora.rank.get()).is_ok_and(|rank| rank <= most) {
            let expected = format!("at most {most}, the inputs of this backbone's largest layer");
            findings.clash("stage.medusa2.lora.rank", lora.rank, expected);
        }
        if let Some(foreign) = lora.target_modules.foreign_to(backbone) {
            let expected = format!("some of this backbone's layers: {}", modules_of(backbone).join(", "));
            findings.clash("stage.medusa2.lora.target_modules", foreign, expected);
        }
    }

    /// The run's folder can be made: nothing above it is a file.
    fn check_output_dir(&self, findings: &mut Findings<'_>) {
        let (key, path) = ("train.output_dir", &self.train.output_dir);
        if !findings.are_as_written(&[key]) {
            return;
        }
        let file = path.ancestors().find(|place| place.exists() && !place.is_dir());
        let expected = match file {
            Some(file) if file == path => "a folder, but this is a file".to_owned(),
            Some(file) => format!("a folder, but {} above it is a file", file.display()),
            None if path.as_os_str().is_empty() || path.as_os_str().as_encoded_bytes().contains(&0) => {
                "the name of a folder".to_owned()
            }
            None if path.iter().any(|name| name.len() > NAME_BYTES) => format!("names of at most {NAME_BYTES} bytes"),
            None => return,
        };
        findings.clash(key, format!("{:?}", path.display().to_string()), expected);
    }

    /// Checks that data, template and weights to start from exist; the recipe must have local paths.
    pub(super) fn check_files(&self, findings: &mut Findings<'_>) {
        for (key, patterns) in [("data.train", &self.data.train), ("data.validation", &self.data.validation)] {
            if let (true, Err(error)) = (findings.are_as_written(&[key]), source::find(patterns)) {
                findings.add(findings.text().value(key), Mistake::Files { key, error });
            }
        }
        if let Some(entry) = &self.data.hidden_states
            && let Err(error) = captured::find(entry)
        {
            let key = "data.hidden_states";
            findings.add(findings.text().value(key), Mistake::Files { key, error });
        }
        self.check_output_dir(findings);
        if let TemplateChoice::File(path) = &self.data.chat_template {
            let hint = "give the path of a Jinja template, or the name of a built-in one";
            check_exists(findings, "data.chat_template", path, hint);
        }
        if let Some(path) = &self.heads.init_from {
            let path = import::locate(path).unwrap_or_else(|_| path.join(HEADS_FILE));
            let hint =
                "give heads.safetensors or a folder with it, such as a run's final/ (other layouts are also read)";
            check_exists(findings, "heads.init_from", &path, hint);
        }
        if let Some(path) = self.stage.lora().and_then(|lora| lora.init_from.as_ref()) {
            let hint = "give a folder with a PEFT adapter, such as a run's final/";
            check_exists(findings, "stage.medusa2.lora.init_from", &path.join(ADAPTER_FILE), hint);
        }
    }
}

fn check_exists(findings: &mut Findings<'_>, key: &'static str, path: &Path, hint: &'static str) {
    let Err(error) = files::check_regular(path) else { return };
    let is_absent = [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::IsADirectory].contains(&error.kind());
    let mistake = match is_absent {
        true => Mistake::Missing { key, path: path.to_owned(), hint },
        false => Mistake::Files { key, error: files::failed("read", path)(error).into() },
    };
    findings.add(findings.text().value(key), mistake);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::recipe::located::LocatedToml;

    fn mistakes_with(gpus: Option<usize>, map: &str) -> String {
        let text = format!("[backbone]\npath = \"b\"\ndevice_map = {map}\n[stage.medusa1]\n[data]\ntrain = [\"d\"]\n");
        let file = Path::new("recipe.toml");
        let recipe = Recipe::parse(file, &text).expect("a recipe");
        let text = LocatedToml::parse(file, &text);
        let mut findings = Findings::new(&text);
        recipe.check_gpus(&mut findings, gpus);
        findings.into_result().map_or_else(|mistakes| mistakes.to_string(), |()| String::new())
    }

    #[test]
    fn a_map_has_no_more_stages_than_there_are_gpus() {
        let refused = mistakes_with(Some(1), "[2, 3]");
        let expected = "recipe.toml: line 3, column 14: backbone.device_map = [2, 3]: expected at most 1 count, one for each GPU: this process has 1 GPU; \
                        or \"auto\"";
        assert!(refused.starts_with(expected), "{refused}");
        for (gpus, map) in [(Some(2), "[2, 3]"), (Some(1), "[5]"), (Some(1), "\"auto\""), (None, "[1, 1, 1]")] {
            assert_eq!(mistakes_with(gpus, map), "", "{map} on {gpus:?}");
        }
    }
}
