//! Heads from any file that trainers and servers write: which layout it is, how many heads and layers its tensors are, what its
//! config.json says to the contrary. What is counted from tensors is believed; published configs are wrong about it.

// K heads, V vocabulary, H hidden
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::error::HeadsError;
use super::layout::{HEADS_FILE, HeadPart, HeadTensor, HeadsLayout, HeadsShape, VLLM_LM_HEAD, VLLM_TOKEN_MAP};
use crate::files::{self, failed, sha256, sha256_of_all};
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::model::weights::{MODEL_FILE, MODEL_INDEX, WeightFiles, WeightsError, dtype_of, same_up_to_rounding};

pub mod notices;

/// The file of heads as FasterDecoding, TGI, LoRAX and TensorRT-LLM look for it.
pub const MEDUSA_LM_HEAD: &str = "medusa_lm_head.safetensors";
/// Its pickled form.
pub const MEDUSA_LM_HEAD_PT: &str = "medusa_lm_head.pt";
/// What is looked for in a folder, in this order.
const CANDIDATES: [&str; 5] = [HEADS_FILE, MEDUSA_LM_HEAD, MEDUSA_LM_HEAD_PT, MODEL_INDEX, MODEL_FILE];

/// A file of heads, its header read, its layout known.
#[derive(Debug)]
pub struct HeadsFile {
    path: PathBuf,
    layout: HeadsLayout,
    tensors: WeightFiles,
    /// Names as they are in the file.
    names: BTreeMap<HeadTensor, String>,
    shape: HeadsShape,
    kind: Kind,
    config: Option<PublishedHeadsConfig>,
    /// The one lm_head of all heads, where the file has it.
    lm_head: Option<String>,
}

impl HeadsFile {
    /// Finds the file of heads in a folder (or takes the file itself) and reads its header.
    ///
    /// # Errors
    /// [`HeadsError`] names the file and what is wrong in it.
    pub fn open(path: &Path) -> Result<Self, HeadsError> {
        let path = locate(path)?;
        let tensors = WeightFiles::open_file(&path)?;
        let config = PublishedHeadsConfig::load_beside(&path)?;
        let names: Vec<String> = tensors.names().into_iter().map(str::to_owned).collect();
        let layout = layout_of(&names).ok_or_else(|| no_heads(&path, &names))?;
        let places = places(layout, &names, &path)?;
        let mut file = Self {
            path,
            layout,
            tensors,
            names: places,
            shape: HeadsShape::NONE,
            kind: Kind::Float,
            config,
            lm_head: None,
        };
        file.refuse_unsupported()?;
        file.lm_head = file.find_lm_head();
        file.shape = file.measure()?;
        file.check_places()?;
        Ok(file)
    }

    /// The file, or the index of its shards.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose names it has.
    pub fn layout(&self) -> HeadsLayout {
        self.layout
    }

    /// Heads, layers and sizes, counted from its tensors.
    pub fn shape(&self) -> HeadsShape {
        self.shape
    }

    /// The dtype of its first weight.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The backbone that config.json names.
    pub fn base(&self) -> Option<&str> {
        self.config.as_ref()?.base()
    }

    /// Checks that heads fit a backbone of `[V, H]` and that every tensor is there; reads headers alone.
    ///
    /// # Errors
    /// [`HeadsError`] names the file and what does not fit.
    pub fn check(&self, [vocab, hidden]: [i64; 2]) -> Result<(), HeadsError> {
        let mismatch = |what, expected, got| HeadsError::Mismatch { path: self.path.clone(), what, expected, got };
        if self.shape.hidden_size != hidden {
            return Err(mismatch("hidden size", hidden, self.shape.hidden_size));
        }
        let got = self.lm_head_size()?.map_or(self.shape.vocab_size, |[v, _]| v);
        if got != 0 && got != vocab {
            return Err(mismatch("vocabulary", vocab, got));
        }
        self.check_alone()
    }

    /// That every tensor is there, of its shape, of floats; against no backbone.
    ///
    /// # Errors
    /// [`HeadsError`] names the tensor that is missing or wrong.
    pub fn check_alone(&self) -> Result<(), HeadsError> {
        self.lm_head_size()?;
        for place in self.shape.places() {
            if let Some(name) = self.name(place)? {
                self.tensors.check(&name, &self.shape.size(place))?;
            }
        }
        Ok(())
    }

    /// One tensor in `kind` on the CPU. A bias that is not there and not meant to be is 0.
    ///
    /// # Errors
    /// [`HeadsError`] names the tensor that is missing or wrong.
    pub fn tensor(&self, place: HeadTensor, kind: Kind) -> Result<Tensor, HeadsError> {
        Ok(self.stored(place)?.to_kind(kind))
    }

    /// As [`HeadsFile::tensor`], in the dtype that this tensor has in the file: a view of it, but for one of several names of one tensor.
    ///
    /// # Errors
    /// As [`HeadsFile::tensor`].
    pub fn stored(&self, place: HeadTensor) -> Result<Tensor, HeadsError> {
        let size = self.shape.size(place);
        match self.name(place)? {
            Some(name) => {
                let tensor = self.tensors.mapped(&name, &size)?;
                let is_tied = self.names.values().any(|other| *other != name && self.tensors.same_memory(other, &name));
                Ok(if is_tied { tensor.copy() } else { tensor })
            }
            None => Ok(Tensor::zeros(size, (self.kind, Device::Cpu))),
        }
    }

    /// Bytes of the heads' tensors, by their dtype as safetensors calls it.
    ///
    /// # Errors
    /// [`HeadsError`] if a file is damaged.
    pub fn bytes(&self) -> Result<BTreeMap<String, u64>, HeadsError> {
        let mut bytes = BTreeMap::new();
        for name in self.names.values().chain(&self.lm_head) {
            let numel: i64 = self.tensors.shape(name)?.iter().product();
            let kind = self.tensors.kind(name).unwrap_or(Kind::Float);
            *bytes.entry(dtype_of(kind).to_string()).or_default() +=
                numel.unsigned_abs() * kind.elt_size_in_bytes() as u64;
        }
        Ok(bytes)
    }

    /// The lm_head that a file of vLLM's has for all heads, `[V, H]`, in its own dtype: the backbone's, by its meaning.
    ///
    /// # Errors
    /// [`HeadsError`] if it has no such shape.
    pub fn lm_head(&self) -> Result<Option<Tensor>, HeadsError> {
        let (Some(name), Some(size)) = (&self.lm_head, self.lm_head_size()?) else { return Ok(None) };
        Ok(Some(self.tensors.mapped(name, &size)?))
    }

    /// `[V, H]` of that lm_head; H must be the heads'.
    fn lm_head_size(&self) -> Result<Option<[i64; 2]>, HeadsError> {
        let Some(name) = &self.lm_head else { return Ok(None) };
        let (got, hidden) = (self.tensors.shape(name)?, self.shape.hidden_size);
        match got[..] {
            [v, h] if h == hidden => Ok(Some([v, h])),
            _ => {
                let (path, name) = (self.path.clone(), name.clone());
                Err(HeadsError::LmHeadShape { path, name, hidden, got })
            }
        }
    }

    /// That the file's lm_head, if it has one, is the backbone's `own_vh`, up to rounding.
    ///
    /// # Errors
    /// [`HeadsError::OtherLmHead`].
    pub fn compare_lm_head(&self, own_vh: &Tensor) -> Result<(), HeadsError> {
        let Some(found) = self.lm_head()? else { return Ok(()) };
        if same_up_to_rounding(&found, own_vh) {
            return Ok(());
        }
        Err(HeadsError::OtherLmHead { path: self.path.clone(), name: self.lm_head.clone().unwrap_or_default() })
    }

    /// The file, or the shards that hold heads.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            self.names.values().filter_map(|name| self.tensors.file_of(name)).map(Path::to_owned).collect();
        paths.sort();
        paths.dedup();
        paths
    }

    /// SHA-256 of the file; of shards, of all those that hold heads.
    ///
    /// # Errors
    /// [`HeadsError`] if one cannot be read.
    pub fn sha256(&self) -> Result<String, HeadsError> {
        let read = |path: &PathBuf| sha256(path).map_err(failed("read", path));
        let files = self.files();
        let mut sums = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        if sums.len() == 1 { Ok(sums.remove(0)) } else { Ok(sha256_of_all(&sums)) }
    }

    fn refuse_unsupported(&self) -> Result<(), HeadsError> {
        let refuse = |key: &str, got: String, expected| {
            let path = self.config.as_ref().map_or(&self.path, |config| &config.path).clone();
            Err(HeadsError::Unsupported { path, key: key.into(), got, expected })
        };
        if self.layout != HeadsLayout::Vllm {
            return Ok(());
        }
        if self.tensors.contains(VLLM_TOKEN_MAP) {
            let got = "a part of the vocabulary".into();
            return refuse(
                VLLM_TOKEN_MAP,
                got,
                "all of it: tokens outside have no weights here; export the heads untruncated",
            );
        }
        let scale = self.config.as_ref().and_then(|config| config.logit_scale()).unwrap_or(1.0);
        if scale.total_cmp(&1.0).is_ne() {
            return refuse("logit_scale", scale.to_string(), "1.0: these heads were trained for scaled logits");
        }
        Ok(())
    }

    /// The one lm_head of all heads in vLLM's layout: `lm_head.weight`, or head 0's where config.json says it is all heads'.
    fn find_lm_head(&mut self) -> Option<String> {
        if self.layout != HeadsLayout::Vllm {
            return None;
        }
        let own: Vec<HeadTensor> = self.names.keys().filter(|place| place.part == HeadPart::W2).copied().collect();
        if self.says("original_lm_head") != Some(true) && !own.is_empty() {
            return None;
        }
        let of_first = own.first().and_then(|place| self.names.get(place)).cloned();
        own.iter().for_each(|place| drop(self.names.remove(place)));
        if self.tensors.contains(VLLM_LM_HEAD) { Some(VLLM_LM_HEAD.into()) } else { of_first }
    }

    /// Counts heads and layers, and reads H and V off the first tensors that have them.
    fn measure(&mut self) -> Result<HeadsShape, HeadsError> {
        let is = |part: HeadPart| move |place: &&HeadTensor| place.part == part;
        let places = || self.names.keys();
        let size = |name: &String| self.tensors.shape(name);
        let first = |part: HeadPart| places().find(is(part)).map(|place| &self.names[place]);
        let w1 = first(HeadPart::W1).map(size).transpose()?;
        let w2 = first(HeadPart::W2).map(size).transpose()?;
        let axis = |size: &Option<Vec<i64>>, axis: usize| size.as_ref().and_then(|size| size.get(axis)).copied();
        let shape = HeadsShape {
            medusa_num_heads: places().map(|place| place.head + 1).max().unwrap_or(0),
            medusa_num_layers: places().filter(is(HeadPart::W1)).map(|place| place.layer + 1).max().unwrap_or(0),
            hidden_size: axis(&w1, 0).or(axis(&w2, 1)).unwrap_or(0),
            vocab_size: axis(&w2, 0).unwrap_or(0),
        };
        let any = first(HeadPart::W1).or(first(HeadPart::W2)).cloned();
        self.kind = any.and_then(|name| self.tensors.kind(&name)).unwrap_or(Kind::Float);
        Ok(shape)
    }

    /// Tensors that the shape has no place for, such as a W2 between ResBlocks.
    fn check_places(&self) -> Result<(), HeadsError> {
        let last = self.shape.medusa_num_layers;
        let fits = |place: &HeadTensor| match place.part {
            HeadPart::W1 | HeadPart::B1 => place.layer < last,
            HeadPart::W2 => self.layout == HeadsLayout::Vllm || place.layer == last,
        };
        match self.names.iter().find(|(place, _)| !fits(place)) {
            Some((_, name)) => Err(HeadsError::Layout { path: self.path.clone(), name: name.clone() }),
            None => Ok(()),
        }
    }

    /// A tensor's name in the file; `None` for a bias that is not meant to be there.
    fn name(&self, place: HeadTensor) -> Result<Option<String>, HeadsError> {
        let key = match (self.layout, place.part) {
            (HeadsLayout::Vllm, HeadPart::W2) => HeadTensor { layer: 0, ..place },
            _ => place,
        };
        if let Some(name) = self.names.get(&key) {
            return Ok(Some(name.clone()));
        }
        let no_biases = self.layout == HeadsLayout::Vllm && !self.has_biases();
        if place.part == HeadPart::B1 && no_biases && self.says("medusa_fc_bias") == Some(false) {
            return Ok(None);
        }
        let (path, name) = (self.path.clone(), self.layout.name(place));
        Err(WeightsError::MissingTensor { path, name }.into())
    }

    fn has_biases(&self) -> bool {
        self.names.keys().any(|place| place.part == HeadPart::B1)
    }

    /// A truth value of config.json, false where it has no such key; `None` without a config.json.
    fn says(&self, key: &str) -> Option<bool> {
        self.config.as_ref().map(|config| config.says(key))
    }
}

/// The folder of heads that are given as a folder, or as a file in it: what was trained with them lies there.
pub fn folder_of(heads: &Path) -> &Path {
    if heads.is_dir() { heads } else { files::parent(heads) }
}

/// The file of heads in a folder; a file is taken as it is.
///
/// # Errors
/// [`HeadsError::NoFile`] for a folder without one.
pub fn locate(path: &Path) -> Result<PathBuf, HeadsError> {
    if !path.is_dir() {
        return Ok(path.into());
    }
    let found = CANDIDATES.iter().map(|name| path.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| HeadsError::NoFile { folder: path.into() })
}

/// The layout that most of the names are of.
fn layout_of(names: &[String]) -> Option<HeadsLayout> {
    let hits = |layout: HeadsLayout| names.iter().filter(|name| layout.place(name).is_some()).count();
    let best = HeadsLayout::ALL.into_iter().max_by_key(|layout| hits(*layout))?;
    (hits(best) > 0).then_some(best)
}

fn no_heads(path: &Path, names: &[String]) -> HeadsError {
    HeadsError::Layout { path: path.into(), name: names.first().map_or("(none)", String::as_str).into() }
}

/// What each name means. Beside a backbone's weights, only names with the layout's prefix are heads'.
fn places(layout: HeadsLayout, names: &[String], path: &Path) -> Result<BTreeMap<HeadTensor, String>, HeadsError> {
    let others = |name: &String| match layout.prefix() {
        Some(prefix) => !name.starts_with(prefix),
        None => layout == HeadsLayout::Vllm && [VLLM_LM_HEAD, VLLM_TOKEN_MAP].contains(&name.as_str()),
    };
    let place = |name: &String| match layout.place(name) {
        Some(place) => Ok((place, name.clone())),
        None => Err(HeadsError::Layout { path: path.into(), name: name.clone() }),
    };
    names.iter().filter(|name| !others(name)).map(place).collect()
}
