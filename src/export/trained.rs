//! The heads to export: the first K of the trained ones, in the dtype of the export.

// V vocabulary, H hidden
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::error::ExportError;
use super::finite::finite_backbone;
use super::format::{ExportFormat, FolderContents, SharedLmHead, WrittenHeads};
use super::request::ExportRequest;
use crate::draft::heads::HeadsShape;
use crate::draft::heads::import::{HeadsFile, folder_of};
use crate::draft::heads::layout::{HeadPart, HeadTensor, HeadsLayout};
use crate::dtype::Dtype;
use crate::files::{is_file, is_folder};
use crate::formats::provenance::Provenance;
use crate::formats::run_folder;
use crate::gguf;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::loading::{LoadError, Purpose};
use crate::model::peft::ADAPTER_CONFIG;
use crate::model::weights::WeightFiles;

/// What to do with a truncated vocabulary in another format than vLLM's.
const VLLM_CAN: &str = "use --format vllm";
/// What to do with a truncated vocabulary that vLLM cannot load.
const NOBODY_CAN: &str = "no other program loads it for heads of this kind: use --format medusa-train, or train without heads.draft_vocab_size";

/// Heads with their adapter or backbone.
pub(super) struct Trained {
    pub(super) format: ExportFormat,
    pub(super) file: HeadsFile,
    /// The first K heads, as in their file.
    pub(super) shape: HeadsShape,
    pub(super) dtype: Dtype,
    pub(super) pickle: bool,
    /// The backbone's folder, or its name if the backbone is not read.
    pub(super) base: Option<PathBuf>,
    /// Folder of the adapter trained with the heads.
    pub(super) adapter: Option<PathBuf>,
    /// Folder of the whole backbone trained with the heads.
    tuned: Option<PathBuf>,
    /// The backbone, if the export includes it.
    pub(super) backbone: Option<Llama>,
    /// V of the backbone, if it was loaded.
    vocab_of_backbone: Option<i64>,
    /// Hub id of the backbone, if it came from there now or, by its provenance, in the run. A name alone may be a path.
    pub(super) base_model: Option<String>,
    /// The backbone's lm_head `[V, H]`, if the heads share it and the export includes it.
    lm_head_vh: Option<Tensor>,
}

impl Trained {
    /// Opens the files of `request` and refuses unsupported combinations.
    pub(super) fn open(request: &ExportRequest) -> Result<Self, ExportError> {
        let mut trained = Self::outline(request)?;
        trained.load(request.dtype)?;
        Ok(trained)
    }

    /// The heads, without a backbone.
    pub(super) fn outline(request: &ExportRequest) -> Result<Self, ExportError> {
        let (format, file) = (request.format, HeadsFile::open(&request.heads)?);
        let there = file.shape().medusa_num_heads;
        let asked = request.medusa_num_heads.map_or(there, Into::into);
        if asked > there {
            return Err(ExportError::TooManyHeads { path: file.path().into(), asked, there });
        }
        let shape = HeadsShape { medusa_num_heads: asked, ..file.shape() };
        let folder = folder_of(&request.heads);
        let TrainedBackbone { base, adapter, tuned } = backbone_with(Some(&file), request.backbone.as_deref())?;
        let recorded = match &request.backbone {
            Some(_) => request.backbone_name.clone(),
            None => file.base().and_then(|name| backbone_of_run(folder, name)),
        };
        let trained = Self {
            format,
            shape,
            dtype: request.dtype.unwrap_or(Dtype::of(file.kind()).by_default()),
            pickle: request.pickle,
            base,
            adapter,
            tuned,
            backbone: None,
            vocab_of_backbone: None,
            base_model: recorded,
            lm_head_vh: None,
            file,
        };
        trained.refuse(request)?;
        Ok(trained)
    }

    fn refuse(&self, request: &ExportRequest) -> Result<(), ExportError> {
        let (format, path, layers) = (self.format, request.heads.clone(), self.shape.medusa_num_layers);
        if format.contents == FolderContents::Adapter && self.adapter.is_none() {
            return Err(ExportError::NoAdapter { path });
        }
        if format.lm_head == SharedLmHead::OfBackboneWithOneBlock && self.shares_lm_head() && layers != 1 {
            return Err(ExportError::TgiLayers { format: format.name, path, layers });
        }
        let only_hydra = self.for_hydra_alone().filter(|_| !format.own);
        if let Some(tokens) = self.file.token_map().filter(|_| !format.draft_vocabulary || only_hydra.is_some()) {
            let (format, size) = (format.name, tokens.len());
            let advice = if only_hydra.is_none() { VLLM_CAN } else { NOBODY_CAN };
            return Err(ExportError::TruncatedVocabulary { format, path, size, advice });
        }
        if let Some(what) = only_hydra.filter(|_| !format.hydra) {
            return Err(ExportError::HydraHeads { format: format.name, path, what });
        }
        if format.hydra {
            let most = 1 + self.file.first_square_block();
            if let Some(head) = self.file.head_of_several_blocks(self.shape.medusa_num_heads)? {
                return Err(ExportError::HydraLayers { path, head, layers, most });
            }
        }
        if self.pickle && format.pickle.is_none() {
            return Err(ExportError::Pickle { format: format.name });
        }
        match format.needs_name {
            Some(why) if self.base_name().is_none() => Err(ExportError::NoBackbone { format: format.name, why }),
            _ => Ok(()),
        }
    }

    /// What only Hydra's format holds, if the heads have it.
    fn for_hydra_alone(&self) -> Option<&'static str> {
        match (self.shape.reads().tokens, self.shape.w2_bias) {
            (true, _) => Some("Hydra heads"),
            (false, true) => Some("a bias in the output layer of its heads"),
            (false, false) => None,
        }
    }

    /// Loads the backbone if the export needs it, and checks the heads against it.
    fn load(&mut self, asked: Option<Dtype>) -> Result<(), ExportError> {
        let format = self.format;
        let Some(why) = self.use_of_backbone() else { return self.check_headers() };
        let base = self.base.clone().ok_or(ExportError::NoBackbone { format: format.name, why })?;
        let own = WeightFiles::open(&base)?.kind(names::EMBED_TOKENS).unwrap_or(Kind::Float);
        let written = asked.unwrap_or(Dtype::of(own).by_default());
        let kind = if format.holds_backbone() { written.kind() } else { own };
        let backbone = match &self.adapter {
            Some(adapter) => Llama::load_merged(&base, adapter, kind, Device::Cpu, Purpose::Saving, None)?,
            None => Llama::load(&base, kind, Device::Cpu, Purpose::Saving)?,
        };
        if format.contents != FolderContents::Heads {
            finite_backbone(&backbone)?; // before the backbone is freed: adapters are merged into it
        }
        self.file.check(&backbone.config)?;
        self.vocab_of_backbone = Some(backbone.config.vocab_size);
        if format.holds_backbone() {
            self.dtype = Dtype::of(kind); // all tensors of a folder have one dtype
        }
        if self.writes_lm_head() {
            let own_vh = backbone.lm_head_weight();
            self.file.compare_lm_head(|| own_vh.shallow_clone())?;
            self.lm_head_vh = Some(own_vh);
        }
        self.backbone = Some(backbone).filter(|_| format.holds_backbone());
        Ok(())
    }

    /// Why the backbone is needed; `None` if it is not.
    pub(super) fn use_of_backbone(&self) -> Option<&'static str> {
        match self.format.contents {
            FolderContents::Backbone => Some("its weights are in the folder"),
            FolderContents::Adapter => Some("the adapter is tried on it"),
            FolderContents::Heads if self.writes_lm_head() => {
                Some("its lm_head is in the folder, since these heads share it")
            }
            FolderContents::Heads => None,
        }
    }

    fn writes_lm_head(&self) -> bool {
        self.shares_lm_head() && matches!(self.format.lm_head, SharedLmHead::Written | SharedLmHead::Copied)
    }

    /// Checks the heads against the backbone's config if there is one; a backbone may also be only a name on the Hub.
    fn check_headers(&mut self) -> Result<(), ExportError> {
        let config =
            self.base.as_deref().map(|base| is_file(&gguf::folder::behind(base.join("config.json")))).transpose()?;
        let folder = self.base.as_deref().filter(|_| config == Some(true));
        match folder.map(LlamaConfig::load).transpose().map_err(LoadError::from)? {
            Some(config) => {
                self.vocab_of_backbone = Some(config.vocab_size);
                Ok(self.file.check(&config)?)
            }
            None => Ok(self.file.check_alone()?),
        }
    }

    /// Whether the heads use the backbone's lm_head.
    pub(super) fn shares_lm_head(&self) -> bool {
        self.shape.vocab_size == 0
    }

    /// Whether every head gets a copy of the backbone's lm_head.
    pub(super) fn copies_lm_head(&self) -> bool {
        self.shares_lm_head() && self.format.lm_head == SharedLmHead::Copied
    }

    /// Whether every head gets a copy of the W2 that all heads share.
    pub(super) fn copies_shared_w2(&self) -> bool {
        self.shape.shared_w2 && !self.format.one_w2
    }

    /// The shape of the exported heads.
    pub(super) fn written_shape(&self) -> HeadsShape {
        let copied_rows = || self.lm_head_vh.as_ref().map_or(0, |lm_head| lm_head.size()[0]);
        let vocab_size = if self.copies_lm_head() { copied_rows() } else { self.shape.vocab_size };
        // Hydra's loader leaves a missing bias random.
        let w2_bias = self.format.hydra || self.shape.w2_bias;
        let shared_w2 = self.shape.shared_w2 && !self.copies_shared_w2() && self.shape.medusa_num_heads > 1;
        let w2_rank = if self.format.own { self.shape.w2_rank } else { 0 };
        HeadsShape { vocab_size, w2_bias, shared_w2, w2_rank, ..self.shape }
    }

    pub(super) fn written_heads(&self) -> WrittenHeads {
        WrittenHeads {
            trained: self.shape,
            written: self.written_shape(),
            dtype: self.dtype,
            vocab_size: self.vocab_size(),
            truncated: self.file.token_map().map(<[i64]>::len),
        }
    }

    /// The layout of the written names.
    pub(super) fn layout(&self) -> HeadsLayout {
        if self.format.hydra && self.shape.reads().whole_rows { HeadsLayout::HydraPlusPlus } else { self.format.layout }
    }

    /// V, if it is known.
    pub(super) fn vocab_size(&self) -> Option<i64> {
        if self.file.token_map().is_some() {
            return self.vocab_of_backbone.or_else(|| self.file.config()?.vocab_size());
        }
        Some(self.shape.vocab_size).filter(|&v| v > 0).or(self.vocab_of_backbone)
    }

    /// A tensor of [`Trained::written_shape`], rounded to `kind`.
    pub(super) fn tensor(&self, place: HeadTensor, kind: Kind) -> Result<Tensor, ExportError> {
        match &self.lm_head_vh {
            Some(lm_head_vh) if place.part == HeadPart::W2 => Ok(lm_head_vh.to_kind(kind)),
            _ if place.part == HeadPart::W2Bias && !self.shape.w2_bias => {
                Ok(Tensor::zeros(self.written_shape().size(place), (kind, Device::Cpu)))
            }
            None if place.part == HeadPart::W2 && self.shape.w2_rank > 0 && !self.format.own => {
                let down = HeadTensor { part: HeadPart::W2Down, ..place };
                let [b_vr, a_rh] = [place, down].map(|place| self.file.tensor(place, Kind::Float));
                Ok(b_vr?.matmul(&a_rh?).to_kind(kind))
            }
            _ => Ok(self.file.tensor(place, kind)?),
        }
    }

    /// The backbone's lm_head, for a file that has one for all heads.
    pub(super) fn one_lm_head(&self) -> Option<&Tensor> {
        self.lm_head_vh.as_ref().filter(|_| self.format.lm_head == SharedLmHead::Written)
    }

    /// The trained backbone or adapter that the heads need, in words.
    pub(super) fn tuned_backbone(&self) -> Option<String> {
        let adapter = self.adapter.as_ref().map(|adapter| format!("with the adapter in {}", adapter.display()));
        self.tuned.as_ref().map(|tuned| tuned.display().to_string()).or(adapter)
    }

    /// The backbone's Hub id, or its path.
    pub(super) fn base_name(&self) -> Option<String> {
        let base_path = || self.base.as_deref().map(Path::to_string_lossy).map(Into::into);
        self.served_by_id().or_else(base_path).or_else(|| self.file.base().map(str::to_owned))
    }

    /// The backbone's name for other people: its Hub id, or the name of its folder without the path, which only this machine has.
    pub(super) fn public_base_name(&self) -> Option<String> {
        let last_name = |base: String| match Path::new(&base).canonicalize() {
            Ok(folder) if folder.is_dir() => last_part(&folder.to_string_lossy()),
            _ => without_local_path(&base),
        };
        self.served_by_id().or_else(|| self.base_name().map(last_name))
    }

    /// The backbone's Hub id, unless a whole backbone was trained with the heads.
    pub(super) fn served_by_id(&self) -> Option<String> {
        self.base_model.clone().filter(|_| self.tuned.is_none())
    }
}

/// The backbone of heads.
pub(super) struct TrainedBackbone {
    /// Its folder, or its name.
    pub(super) base: Option<PathBuf>,
    /// Folder of the adapter that was trained with the heads.
    pub(super) adapter: Option<PathBuf>,
    /// Folder of the whole backbone that was trained with the heads.
    tuned: Option<PathBuf>,
}

/// The backbone of heads, unless the user names another. A run's `final/` names the backbone that the heads were trained on; a fully trained
/// backbone is in the same folder.
pub(super) fn backbone_with(heads: Option<&HeadsFile>, named: Option<&Path>) -> Result<TrainedBackbone, ExportError> {
    let folder = heads.map(|heads| folder_of(heads.path()));
    let beside = |name: &str| folder.map(|folder| folder.join(name));
    let is_there = |path: PathBuf| is_folder(&path).map(|is_there| is_there.then_some(path));
    let tuned = beside(run_folder::BACKBONE).map(is_there).transpose()?.flatten();
    let config = beside(ADAPTER_CONFIG).map(|config| is_file(&config)).transpose()?;
    let adapter = folder.filter(|_| config == Some(true)).map(Path::to_owned);
    let by_heads = || tuned.clone().or_else(|| heads?.base().map(PathBuf::from));
    Ok(TrainedBackbone { base: named.map(Path::to_owned).or_else(by_heads), adapter, tuned })
}

/// The last part of a path that only this machine has; other texts as they are.
pub(super) fn without_local_path(text: &str) -> String {
    let is_local = ["/", "~/", "./", "../"].iter().any(|begin| text.starts_with(begin));
    if is_local { last_part(text) } else { text.to_owned() }
}

fn last_part(path: &str) -> String {
    path.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default().to_owned()
}

/// Hub id of a run's backbone, if heads in `folder` belong to the run and name that backbone.
fn backbone_of_run(folder: &Path, name: &str) -> Option<String> {
    let id = Provenance::backbone_of(&run_folder::above(folder)?.join(run_folder::PROVENANCE))?.id;
    let is_it = name.strip_prefix(&id).is_some_and(|rest| rest.is_empty() || rest.starts_with('@'));
    is_it.then_some(id)
}
