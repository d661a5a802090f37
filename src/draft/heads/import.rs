//! Reads heads from any file that trainers and servers write: detects the layout and counts heads and layers. Counts come from
//! the tensors, since published config.json files are often wrong about them.

// K heads, V vocabulary, H hidden
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::layout::{
    HEADS_FILE, HYDRA_UNUSED, HeadPart, HeadTensor, HeadsArchitecture, HeadsLayout, HeadsShape, VLLM_LM_HEAD,
};
use crate::draft::error::DrafterError;
use crate::draft::token_map::{TOKEN_MAP, TokenMap};
use crate::files::{self, failed, sha256, sha256_of_all};
use crate::formats::heads_config::{PublishedHeadsConfig, SHARED_W2};
use crate::model::config::LlamaConfig;
use crate::model::prefix_layer::{PREFIX, PrefixLayer};
use crate::model::weights::{MODEL_FILE, MODEL_INDEX, WeightFiles, WeightsError, dtype_of, same_up_to_rounding};

pub mod notices;

/// Heads file name in FasterDecoding, TGI, LoRAX and TensorRT-LLM.
pub const MEDUSA_LM_HEAD: &str = "medusa_lm_head.safetensors";
/// Its pickled form.
pub const MEDUSA_LM_HEAD_PT: &str = "medusa_lm_head.pt";
/// Heads file name of Hydra's authors, a pickled one.
pub const HYDRA_LM_HEAD_PT: &str = "hydra_lm_head.pt";
/// File names looked for in a folder, in this order.
const CANDIDATES: [&str; 6] =
    [HEADS_FILE, MEDUSA_LM_HEAD, MEDUSA_LM_HEAD_PT, HYDRA_LM_HEAD_PT, MODEL_INDEX, MODEL_FILE];

/// A heads file with its header read and its layout detected.
#[derive(Debug)]
pub struct HeadsFile {
    path: PathBuf,
    layout: HeadsLayout,
    tensors: WeightFiles,
    /// Names in the file.
    names: BTreeMap<HeadTensor, String>,
    /// Names of the prefix layer's tensors in the file, by ours.
    prefix: BTreeMap<String, String>,
    shape: HeadsShape,
    kind: Kind,
    config: Option<PublishedHeadsConfig>,
    /// Name of the lm_head shared by all heads, if the file has one.
    lm_head: Option<String>,
    /// Whether all heads have one W2, which is not the backbone's lm_head.
    shared_w2: bool,
    /// The tokens that heads with a truncated vocabulary can guess.
    token_map: Option<Vec<i64>>,
    /// Rows of W2 in the file. vLLM takes those of the token map from a whole one.
    w2_rows: i64,
}

impl HeadsFile {
    /// Finds the heads file in a folder (or takes the file itself) and reads its header.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, DrafterError> {
        let path = locate(path)?;
        let tensors = WeightFiles::open_file(&path)?;
        let config = PublishedHeadsConfig::load_beside(&path)?;
        let names: Vec<String> = tensors.names().into_iter().map(str::to_owned).collect();
        let layout = layout_of(&names).ok_or_else(|| no_heads(&path, &names))?;
        let prefix = prefix_of(layout, &names);
        let places = places(layout, &names, &path)?;
        let mut file = Self {
            path,
            layout,
            tensors,
            names: places,
            prefix,
            shape: HeadsShape::default(),
            kind: Kind::Float,
            config,
            lm_head: None,
            shared_w2: false,
            token_map: None,
            w2_rows: 0,
        };
        file.refuse_unsupported()?;
        file.token_map = file.read_token_map()?;
        file.lm_head = file.find_lm_head();
        file.find_shared_w2()?;
        file.shape = file.measure()?;
        file.w2_rows = file.shape.vocab_size;
        if let Some(tokens) = &file.token_map {
            file.shape.vocab_size = file.outputs(tokens)?;
        }
        file.check_places()?;
        Ok(file)
    }

    /// The file, or the index of its shards.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The naming scheme of the tensors.
    pub fn layout(&self) -> HeadsLayout {
        self.layout
    }

    /// Heads, layers and sizes, counted from the tensors.
    pub fn shape(&self) -> HeadsShape {
        self.shape
    }

    /// The tokens that heads with a truncated vocabulary can guess, in the order of their outputs.
    pub fn token_map(&self) -> Option<&[i64]> {
        self.token_map.as_deref()
    }

    /// The dtype of the first weight.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The backbone named in config.json.
    pub fn base(&self) -> Option<&str> {
        self.config.as_ref()?.base()
    }

    /// The config.json beside it.
    pub fn config(&self) -> Option<&PublishedHeadsConfig> {
        self.config.as_ref()
    }

    /// Checks that the heads fit a backbone and that no tensor is missing; reads only headers.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what does not fit.
    pub fn check(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        let (vocab, hidden) = (backbone.vocab_size, backbone.hidden_size);
        let mismatch = |what, expected, got| DrafterError::Mismatch { path: self.path.clone(), what, expected, got };
        if self.shape.hidden_size != hidden {
            return Err(mismatch("hidden size", hidden, self.shape.hidden_size));
        }
        if let Some(got) = self.whole_vocabulary()?.filter(|&got| got != vocab) {
            return Err(mismatch("vocabulary", vocab, got));
        }
        if let Some(token) = self.token_map().into_iter().flatten().find(|&&token| token >= vocab) {
            return Err(self.bad_token_map(format!("holds token {token}, and the backbone has {vocab}")));
        }
        self.check_prefix(backbone)?;
        self.check_alone()
    }

    /// V according to the file; `None` if it has neither an lm_head nor a W2 with a row for every token.
    fn whole_vocabulary(&self) -> Result<Option<i64>, DrafterError> {
        let outputs = self.token_map.as_ref().map_or(0, |tokens| tokens.len() as i64);
        let rows = Some(self.w2_rows).filter(|&rows| rows != outputs);
        Ok(self.lm_head_size()?.map(|[v, _]| v).or(rows))
    }

    /// Checks that every tensor exists, has its shape and holds floats, without a backbone to compare with.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing or wrong.
    pub fn check_alone(&self) -> Result<(), DrafterError> {
        self.lm_head_size()?;
        for place in self.shape.places() {
            if let Some(name) = self.name(place)? {
                self.tensors.check(&name, &self.stored_size(place))?;
            }
        }
        Ok(())
    }

    /// Reads one tensor in `kind` to the CPU. A bias that config.json declares absent is zero.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing or wrong.
    pub fn tensor(&self, place: HeadTensor, kind: Kind) -> Result<Tensor, DrafterError> {
        Ok(self.stored(place)?.to_kind(kind))
    }

    /// As [`HeadsFile::tensor`], of finite numbers.
    ///
    /// # Errors
    /// As [`HeadsFile::tensor`]; [`WeightsError::NotFinite`].
    pub fn finite_tensor(&self, place: HeadTensor, kind: Kind) -> Result<Tensor, DrafterError> {
        let tensor = self.tensor(place, kind)?;
        match self.name(place)? {
            Some(name) => Ok(self.tensors.finite(&name, tensor)?),
            None => Ok(tensor),
        }
    }

    /// As [`HeadsFile::prefix_tensor`], in `kind`, of finite numbers.
    ///
    /// # Errors
    /// As [`HeadsFile::finite_tensor`].
    pub fn finite_prefix_tensor(&self, ours: &str, size: &[i64], kind: Kind) -> Result<Tensor, DrafterError> {
        Ok(self.tensors.finite(&self.prefix_name(ours)?, self.prefix_tensor(ours, size)?.to_kind(kind))?)
    }

    /// Like [`HeadsFile::tensor`], in the tensor's own dtype: a view of the file, or a copy if several names share the tensor.
    ///
    /// # Errors
    /// As [`HeadsFile::tensor`].
    pub fn stored(&self, place: HeadTensor) -> Result<Tensor, DrafterError> {
        let size = self.stored_size(place);
        match self.name(place)? {
            Some(name) if size != self.shape.size(place) => {
                let tokens_n = Tensor::from_slice(self.token_map.as_deref().unwrap_or_default());
                Ok(self.tensors.mapped(&name, &size)?.index_select(0, &tokens_n))
            }
            Some(name) => {
                let tensor = self.tensors.mapped(&name, &size)?;
                let is_tied = self.names.values().any(|other| *other != name && self.tensors.same_memory(other, &name));
                Ok(if is_tied { tensor.copy() } else { tensor })
            }
            None => Ok(Tensor::zeros(size, (self.kind, Device::Cpu))),
        }
    }

    /// The shape of a tensor in the file.
    fn stored_size(&self, place: HeadTensor) -> Vec<i64> {
        let mut size = self.shape.size(place);
        if matches!(place.part, HeadPart::W2 | HeadPart::W2Bias) {
            size[0] = self.w2_rows;
        }
        size
    }

    /// The token map, if there is one: distinct token ids.
    fn read_token_map(&self) -> Result<Option<Vec<i64>>, DrafterError> {
        if !matches!(self.layout, HeadsLayout::Heads | HeadsLayout::Vllm) {
            return Ok(None);
        }
        let Some(tokens) = TokenMap::in_file(&self.tensors)? else { return Ok(None) };
        let mut sorted = tokens.clone();
        sorted.sort_unstable();
        let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        match (sorted.first(), twice) {
            (None, _) => Err(self.bad_token_map("is empty".into())),
            (Some(&first), _) if first < 0 => Err(self.bad_token_map(format!("holds token {first}"))),
            (_, Some(token)) => Err(self.bad_token_map(format!("holds token {token} twice"))),
            (Some(_), None) => Ok(Some(tokens)),
        }
    }

    /// The outputs of heads with this token map: a W2 has as many rows, or, in vLLM's files, one for every token.
    fn outputs(&self, tokens: &[i64]) -> Result<i64, DrafterError> {
        let (rows, outputs) = (self.w2_rows, tokens.len() as i64);
        let is_whole = self.layout == HeadsLayout::Vllm && tokens.iter().all(|&token| token < rows);
        if rows == outputs || is_whole {
            return Ok(outputs);
        }
        Err(self.bad_token_map(format!("has {outputs} tokens, and the output layers have {rows} rows")))
    }

    fn bad_token_map(&self, what: String) -> DrafterError {
        DrafterError::TokenMap { path: self.path.clone(), what }
    }

    /// Checks that the file has every tensor of the prefix layer for this backbone, and no other.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing, wrong or unknown.
    fn check_prefix(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        let expected = PrefixLayer::tensors(backbone);
        if let Some((_, name)) = self.prefix.iter().find(|(ours, _)| expected.iter().all(|(name, _)| name != *ours)) {
            return Err(DrafterError::PrefixTensor { path: self.path.clone(), name: name.clone() });
        }
        let check = |(ours, size): &(String, Vec<i64>)| Ok(self.tensors.check(&self.prefix_name(ours)?, size)?);
        if self.prefix.is_empty() { Ok(()) } else { expected.iter().try_for_each(check) }
    }

    /// Our names and the shapes of the prefix layer's tensors; empty without one.
    ///
    /// # Errors
    /// [`DrafterError`] if the file is damaged.
    pub fn prefix_tensors(&self) -> Result<Vec<(String, Vec<i64>)>, DrafterError> {
        let sized = |(ours, name): (&String, &String)| Ok((ours.clone(), self.tensors.shape(name)?));
        self.prefix.iter().map(sized).collect()
    }

    /// A tensor of the prefix layer by our name, in its own dtype.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing or wrong.
    pub fn prefix_tensor(&self, ours: &str, size: &[i64]) -> Result<Tensor, DrafterError> {
        Ok(self.tensors.mapped(&self.prefix_name(ours)?, size)?)
    }

    fn prefix_name(&self, ours: &str) -> Result<String, DrafterError> {
        let missing = || {
            let (path, own_prefix) = (self.path.clone(), self.layout.prefix_layer().unwrap_or(PREFIX));
            WeightsError::MissingTensor { path, name: ours.replacen(PREFIX, own_prefix, 1) }
        };
        self.prefix.get(ours).cloned().ok_or_else(|| missing().into())
    }

    /// Number of weights, with those of the prefix layer.
    ///
    /// # Errors
    /// [`DrafterError`] if the file is damaged.
    pub fn parameters(&self) -> Result<i64, DrafterError> {
        let numel = |name: &String| Ok(self.tensors.shape(name)?.iter().product::<i64>());
        Ok(self.shape.parameters() + self.prefix.values().map(numel).sum::<Result<i64, DrafterError>>()?)
    }

    /// Bytes of the heads' tensors, by safetensors dtype.
    ///
    /// # Errors
    /// [`DrafterError`] if a file is damaged.
    pub fn bytes(&self) -> Result<BTreeMap<String, u64>, DrafterError> {
        let mut bytes = BTreeMap::new();
        for name in self.names.values().chain(self.prefix.values()).chain(&self.lm_head) {
            let numel: i64 = self.tensors.shape(name)?.iter().product();
            let kind = self.tensors.kind(name).unwrap_or(Kind::Float);
            *bytes.entry(dtype_of(kind).to_string()).or_default() +=
                numel.unsigned_abs() * kind.elt_size_in_bytes() as u64;
        }
        Ok(bytes)
    }

    /// The lm_head that a vLLM file stores for all heads, `[V, H]`, in its own dtype. It should be the backbone's.
    ///
    /// # Errors
    /// [`DrafterError`] if it has another shape.
    pub fn lm_head(&self) -> Result<Option<Tensor>, DrafterError> {
        let (Some(name), Some(size)) = (&self.lm_head, self.lm_head_size()?) else { return Ok(None) };
        Ok(Some(self.tensors.mapped(name, &size)?))
    }

    /// Shape `[V, H]` of that lm_head; H must be the heads'.
    fn lm_head_size(&self) -> Result<Option<[i64; 2]>, DrafterError> {
        let Some(name) = &self.lm_head else { return Ok(None) };
        let (got, hidden) = (self.tensors.shape(name)?, self.shape.hidden_size);
        match got[..] {
            [v, h] if h == hidden => Ok(Some([v, h])),
            _ => {
                let (path, name) = (self.path.clone(), name.clone());
                Err(DrafterError::LmHeadShape { path, name, hidden, got })
            }
        }
    }

    /// Checks that the file's lm_head, if it has one, equals the backbone's up to rounding.
    ///
    /// # Errors
    /// [`DrafterError::OtherLmHead`].
    pub fn compare_lm_head(&self, own_vh: impl FnOnce() -> Tensor) -> Result<(), DrafterError> {
        let Some(found) = self.lm_head()? else { return Ok(()) };
        if same_up_to_rounding(&found, &own_vh()) {
            return Ok(());
        }
        Err(DrafterError::OtherLmHead { path: self.path.clone(), name: self.lm_head.clone().unwrap_or_default() })
    }

    /// The file, or the shards that hold heads.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            self.names.values().filter_map(|name| self.tensors.file_of(name)).map(Path::to_owned).collect();
        paths.sort();
        paths.dedup();
        paths
    }

    /// SHA-256 of the file, or of all shards that hold heads.
    ///
    /// # Errors
    /// [`DrafterError`] if one cannot be read.
    pub fn sha256(&self) -> Result<String, DrafterError> {
        let read = |path: &PathBuf| sha256(path).map_err(failed("read", path));
        let files = self.files();
        let mut sums = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        if sums.len() == 1 { Ok(sums.remove(0)) } else { Ok(sha256_of_all(&sums)) }
    }

    fn refuse_unsupported(&self) -> Result<(), DrafterError> {
        let refuse = |key: &str, got: String, expected| {
            let path = self.config.as_ref().map_or(&self.path, |config| &config.path).clone();
            Err(DrafterError::Unsupported { path, key: key.into(), got, expected })
        };
        let number = |key| self.config.as_ref().and_then(|config| config.count(&[key]));
        let is_published = matches!(self.layout, HeadsLayout::Hydra | HeadsLayout::HydraPlusPlus);
        if let (true, Some((key, offset @ 1..))) = (is_published, number("hidden_state_offset")) {
            return refuse(&key, offset.to_string(), "0: these heads read hidden states of an earlier layer");
        }
        if self.layout != HeadsLayout::Vllm {
            return Ok(());
        }
        let scale = self.config.as_ref().and_then(|config| config.logit_scale()).unwrap_or(1.0);
        if scale.total_cmp(&1.0).is_ne() {
            return refuse("logit_scale", scale.to_string(), "1.0: these heads were trained for scaled logits");
        }
        Ok(())
    }

    /// Name of the lm_head shared by all heads in vLLM's layout: `lm_head.weight`, or head 0's if config.json declares it shared.
    fn find_lm_head(&mut self) -> Option<String> {
        if self.layout != HeadsLayout::Vllm {
            return None;
        }
        let own: Vec<HeadTensor> = self.names.keys().filter(|place| place.part == HeadPart::W2).copied().collect();
        if self.says("original_lm_head") != Some(true) && !own.is_empty() {
            return None;
        }
        let first_name = own.first().and_then(|place| self.names.get(place)).cloned();
        own.iter().for_each(|place| drop(self.names.remove(place)));
        if self.tensors.contains(VLLM_LM_HEAD) { Some(VLLM_LM_HEAD.into()) } else { first_name }
    }

    /// A W2 that all heads share: under a name of its own in our files; in vLLM's the lm_head, if config.json says that it is not the
    /// backbone's, or if a token map makes it another.
    ///
    /// # Errors
    /// [`DrafterError::OwnW2`] if a head also has one of its own.
    fn find_shared_w2(&mut self) -> Result<(), DrafterError> {
        let is_other = self.says(SHARED_W2) == Some(true) || self.token_map.is_some();
        let is_vllm = self.layout == HeadsLayout::Vllm && is_other;
        let vllm = if is_vllm { self.lm_head.take().map(|name| (HeadPart::W2, name)) } else { None };
        let names = self.tensors.names();
        let ours = names.iter().filter(|_| self.layout == HeadsLayout::Heads);
        let ours = ours.filter_map(|name| Some((self.layout.shared_part(name)?, (*name).to_owned())));
        let found: Vec<_> = ours.chain(vllm).collect();
        let own = self.names.iter().find(|(place, _)| !place.part.is_of_block());
        if let (Some((_, shared)), Some((_, own))) = (found.first(), own) {
            let (path, shared, own) = (self.path.clone(), shared.clone(), own.clone());
            return Err(DrafterError::OwnW2 { path, shared, own });
        }
        self.shared_w2 = !found.is_empty();
        self.names.extend(found.into_iter().map(|(part, name)| (HeadTensor { head: 0, layer: 0, part }, name)));
        Ok(())
    }

    /// Counts heads and layers, and takes H and V from the first tensors that have them.
    fn measure(&mut self) -> Result<HeadsShape, DrafterError> {
        let is = |part: HeadPart| move |place: &&HeadTensor| place.part == part;
        let places = || self.names.keys();
        let size = |name: &String| self.tensors.shape(name);
        let first = |part: HeadPart| places().find(is(part)).map(|place| &self.names[place]);
        let w1 = first(HeadPart::W1).map(size).transpose()?;
        let w2 = first(HeadPart::W2).map(size).transpose()?;
        let down = first(HeadPart::W2Down).map(size).transpose()?;
        let axis = |size: &Option<Vec<i64>>, axis: usize| size.as_ref().and_then(|size| size.get(axis)).copied();
        let has = |part| first(part).is_some();
        let shape = HeadsShape {
            architecture: match (self.prefix.is_empty(), has(HeadPart::Res)) {
                (false, _) => HeadsArchitecture::HydraPlusPlus,
                (true, true) => HeadsArchitecture::Hydra,
                (true, false) => HeadsArchitecture::Medusa,
            },
            w2_bias: has(HeadPart::W2Bias),
            w2_rank: axis(&down, 0).unwrap_or(0),
            medusa_num_heads: places().map(|place| place.head + 1).max().unwrap_or(0),
            medusa_num_layers: places().filter(is(HeadPart::W1)).map(|place| place.layer + 1).max().unwrap_or(0),
            hidden_size: axis(&w1, 0).or(axis(&w2, 1)).unwrap_or(0),
            vocab_size: axis(&w2, 0).unwrap_or(0),
            shared_w2: self.shared_w2,
        };
        let shape = HeadsShape { shared_w2: shape.shared_w2 && shape.medusa_num_heads > 1, ..shape };
        let any = first(HeadPart::W1).or(first(HeadPart::W2)).cloned();
        self.kind = any.and_then(|name| self.tensors.kind(&name)).unwrap_or(Kind::Float);
        Ok(shape)
    }

    /// Rejects tensors that the shape has no place for, such as a W2 between ResBlocks.
    fn check_places(&self) -> Result<(), DrafterError> {
        let last = self.shape.medusa_num_layers;
        let fits = |place: &HeadTensor| match place.part {
            HeadPart::W1 | HeadPart::B1 => place.layer < last,
            HeadPart::Res | HeadPart::ResBias => place.layer == 0,
            HeadPart::W2Down | HeadPart::W2 | HeadPart::W2Bias => {
                self.layout.names_w2_by_head() || self.shared_w2 || place.layer == last
            }
        };
        match self.names.iter().find(|(place, _)| !fits(place)) {
            Some((_, name)) => Err(DrafterError::Layout { path: self.path.clone(), name: name.clone() }),
            None => Ok(()),
        }
    }

    /// A tensor's name in the file; `None` for a bias that config.json declares absent.
    fn name(&self, place: HeadTensor) -> Result<Option<String>, DrafterError> {
        let is_by_head = self.layout.names_w2_by_head() && !place.part.is_of_block();
        let key = match self.shape.is_shared(place) {
            true => HeadTensor { head: 0, layer: 0, ..place },
            false if is_by_head => HeadTensor { layer: 0, ..place },
            false => place,
        };
        if let Some(name) = self.names.get(&key) {
            return Ok(Some(name.clone()));
        }
        let no_biases = self.layout == HeadsLayout::Vllm && !self.has_biases();
        if place.part == HeadPart::B1 && no_biases && self.says("medusa_fc_bias") == Some(false) {
            return Ok(None);
        }
        let (path, name) = (self.path.clone(), self.layout.name_in(&self.shape, place));
        Err(WeightsError::MissingTensor { path, name }.into())
    }

    fn has_biases(&self) -> bool {
        self.names.keys().any(|place| place.part == HeadPart::B1)
    }

    /// A boolean in config.json, false if the key is missing; `None` without a config.json.
    fn says(&self, key: &str) -> Option<bool> {
        self.config.as_ref().map(|config| config.says(key))
    }
}

/// The folder that holds the heads, given as a folder or as a file in it. Other outputs of their training are there too.
pub fn folder_of(heads: &Path) -> &Path {
    if heads.is_dir() { heads } else { files::parent(heads) }
}

/// The heads file in a folder; a file is returned unchanged.
///
/// # Errors
/// [`DrafterError::NoFile`] for a folder without one.
pub fn locate(path: &Path) -> Result<PathBuf, DrafterError> {
    if !path.is_dir() {
        return Ok(path.into());
    }
    let found = CANDIDATES.iter().map(|name| path.join(name)).find(|file| file.exists() && !file.is_dir());
    found.ok_or_else(|| DrafterError::NoFile { folder: path.into() })
}

/// The layout that most names match.
fn layout_of(names: &[String]) -> Option<HeadsLayout> {
    let hits = |layout: HeadsLayout| names.iter().filter(|name| layout.place(name).is_some()).count();
    let best = HeadsLayout::ALL.into_iter().max_by_key(|layout| hits(*layout))?;
    (hits(best) > 0).then_some(best)
}

fn no_heads(path: &Path, names: &[String]) -> DrafterError {
    DrafterError::Layout { path: path.into(), name: names.first().map_or("(none)", String::as_str).into() }
}

/// The names of a prefix layer's tensors, by ours.
fn prefix_of(layout: HeadsLayout, names: &[String]) -> BTreeMap<String, String> {
    let Some(prefix) = layout.prefix_layer() else { return BTreeMap::new() };
    let ours = |name: &String| Some((format!("{PREFIX}{}", name.strip_prefix(prefix)?), name.clone()));
    names.iter().filter(|name| !HYDRA_UNUSED.contains(&name.as_str())).filter_map(ours).collect()
}

/// Parses each name. Among a backbone's weights, only names with the layout's prefix belong to heads.
fn places(layout: HeadsLayout, names: &[String], path: &Path) -> Result<BTreeMap<HeadTensor, String>, DrafterError> {
    let others = |name: &String| match (layout, layout.prefix()) {
        (_, Some(prefix)) => !name.starts_with(prefix),
        (HeadsLayout::Vllm, _) => [VLLM_LM_HEAD, TOKEN_MAP].contains(&name.as_str()),
        (HeadsLayout::Heads, _) if name == TOKEN_MAP || layout.shared_part(name).is_some() => true,
        (HeadsLayout::Hydra | HeadsLayout::HydraPlusPlus, _) if HYDRA_UNUSED.contains(&name.as_str()) => true,
        _ => layout.prefix_layer().is_some_and(|prefix| name.starts_with(prefix)),
    };
    let place = |name: &String| match layout.place(name) {
        Some(place) => Ok((place, name.clone())),
        None => Err(DrafterError::Layout { path: path.into(), name: name.clone() }),
    };
    names.iter().filter(|name| !others(name)).map(place).collect()
}
