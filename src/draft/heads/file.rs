//! Heads as a [`DrafterFile`].

use super::Heads;
use super::import::HeadsFile;
use super::import::notices::Notice;
use crate::draft::error::DrafterError;
use crate::draft::file::DrafterFile;
use crate::draft::trained::TrainedDrafter;
use crate::dtype::DraftDtype;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;

impl DrafterFile for HeadsFile {
    fn architecture(&self) -> &'static str {
        self.shape().architecture.name()
    }

    fn config(&self) -> Option<&PublishedHeadsConfig> {
        HeadsFile::config(self)
    }

    fn num_parameters(&self) -> u64 {
        self.shape().parameters().unsigned_abs()
    }

    fn check(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        HeadsFile::check(self, backbone)
    }

    fn sha256(&self) -> Result<String, DrafterError> {
        HeadsFile::sha256(self)
    }

    fn oddities(&self) -> Result<Vec<String>, DrafterError> {
        let is_other = |notice: &Notice| !matches!(notice, Notice::Quantized { .. });
        Ok(self.notices()?.into_iter().filter(is_other).map(|notice| notice.to_string()).collect())
    }

    fn load(&self, backbone: &Llama, dtype: DraftDtype) -> Result<Box<dyn TrainedDrafter>, DrafterError> {
        Ok(Box::new(Heads::from_file(self, backbone)?.for_decoding(dtype)))
    }
}
