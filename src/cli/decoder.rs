//! A backbone with its tokenizer, and heads and a tree if there are some: how each command loads them, and conversations turn by turn.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tch::Device;

use super::{CommonFlags, UsageError};
use crate::data::chat_template::{ChatTemplate, Message, TemplateChoice};
use crate::data::prompts::{self, Prompt, PromptInput};
use crate::data::tokenize::{TextTokenizer, narrow, wide};
use crate::draft::medusa::heads::Heads;
use crate::draft::medusa::heads::import::{HeadsFile, folder_of};
use crate::dtype::Dtype;
use crate::engine::cpu::{CpuEngine, Unsupported};
use crate::formats::run_folder;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::weights::WeightFiles;
use crate::torch::memory;
use crate::tree::sparse_tree::SparseTree;

/// Loads a backbone as the common flags say; without `--dtype` it computes in its file's own. Where `heads` were trained with an
/// adapter, which lies beside them, it becomes part of the backbone.
///
/// # Errors
/// When the device cannot be used, or the folder is no backbone.
pub fn load_backbone(
    folder: &Path,
    heads: Option<&Path>,
    common: &CommonFlags,
    purpose: Purpose,
) -> anyhow::Result<Llama> {
    let device = common.device.resolve()?;
    let dtype = match common.dtype {
        Some(dtype) => dtype,
        None => own_dtype(folder)?,
    };
    let heads = heads.map(folder_of);
    if let Some(tuned) =
        heads.map(|heads| heads.join(run_folder::BACKBONE)).filter(|tuned| tuned.exists() && tuned != folder)
    {
        common.say(format_args!(
            "these heads were trained with the backbone in {}, not with {}",
            tuned.display(),
            folder.display()
        ));
    }
    let Some(adapter) = heads.filter(|heads| heads.join(ADAPTER_CONFIG).exists()) else {
        return Ok(Llama::load(folder, dtype.kind(), device, purpose)?);
    };
    common.say(format_args!("with the adapter beside the heads ({})", adapter.join(ADAPTER_FILE).display()));
    Ok(Llama::load_merged(folder, adapter, dtype.kind(), device, purpose)?)
}

/// In a tiny backbone, threads wait for each other longer than a product takes; where other programs run, many times longer.
/// `OMP_NUM_THREADS`, if set, is obeyed. Where the CPU's own kernels run, they have the threads, and libtorch works alone.
fn spare_threads(backbone: &Llama) {
    const WORTH_SHARING: i64 = 1 << 17; // weights of the largest product
    let config = &backbone.config;
    let largest = config.hidden_size * config.vocab_size.max(2 * config.intermediate_size);
    let few =
        backbone.device() == Device::Cpu && largest < WORTH_SHARING && std::env::var_os("OMP_NUM_THREADS").is_none();
    if few || CpuEngine::supports(backbone).is_ok() {
        tch::set_num_threads(1);
    }
}

/// The dtype of a backbone's file.
///
/// # Errors
/// When the folder is no backbone.
pub fn own_dtype(folder: &Path) -> anyhow::Result<Dtype> {
    let config = LlamaConfig::load(folder)?;
    let embedding = WeightFiles::open(folder)?.mapped(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size])?;
    Ok(Dtype::of(embedding.kind()))
}

/// `--chat-template`.
///
/// # Errors
/// What would be accepted.
pub fn chat_template(text: &str) -> Result<TemplateChoice, String> {
    TemplateChoice::try_from(text.to_owned())
}

/// Heads in any layout, with what the user should know of their file told first.
///
/// # Errors
/// What is wrong with the file, or does not fit the backbone.
pub fn load_heads(path: &Path, backbone: &Llama, common: &CommonFlags) -> anyhow::Result<Heads> {
    HeadsFile::open(path)?.notices()?.iter().for_each(|notice| common.say(notice));
    Ok(Heads::load(path, backbone)?)
}

/// A backbone with all that goes with it.
#[derive(Debug)]
pub struct Decoder {
    /// The backbone.
    pub backbone: Llama,
    /// Its tokenizer.
    pub tokenizer: TextTokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Heads and the tree that they fill.
    pub medusa: Option<(Heads, SparseTree)>,
}

impl Decoder {
    /// Loads everything, and checks that it belongs together.
    ///
    /// # Errors
    /// What is missing or does not fit.
    pub fn load(
        purpose: Purpose,
        folder: &Path,
        heads: Option<&PathBuf>,
        tree: Option<&PathBuf>,
        common: &CommonFlags,
    ) -> anyhow::Result<Self> {
        LlamaConfig::load(folder)?; // first: it says best what is wrong with a folder that is no backbone
        let tree = tree.map(|path| SparseTree::load(path)).transpose()?.map(|(tree, _)| tree);
        let tokenizer = TextTokenizer::load(folder)?;
        let template = ChatTemplate::load(folder)?;
        let backbone = load_backbone(folder, heads.map(PathBuf::as_path), common, purpose)?;
        spare_threads(&backbone);
        if let (Purpose::Decoding, Err(why @ Unsupported::Weights)) = (purpose, CpuEngine::supports(&backbone)) {
            common.say(format_args!("decoding with libtorch's operations: {why}"));
        }
        tokenizer.check_vocabulary(usize::try_from(backbone.config.vocab_size)?)?;
        let medusa = match heads {
            Some(path) => {
                let heads = load_heads(path, &backbone, common)?.for_decoding();
                let tree = tree.map_or_else(|| chain_of(&heads, common), Ok)?;
                Some((heads, tree))
            }
            None if tree.is_some() => {
                return Err(UsageError("--tree needs --heads: a tree holds the heads' guesses".into()).into());
            }
            None => None,
        };
        memory::keep_freed_blocks();
        Ok(Self { backbone, tokenizer, template, medusa })
    }

    /// Runs `answer` on a prompt's tokens, and on each further turn's with the answers' texts so far in the context; `answer` gets the
    /// turn, 0-based, and its tokens.
    ///
    /// # Errors
    /// What the template, the tokenizer or `answer` says; the turn is named.
    pub fn each_turn(
        &self,
        input: &PromptInput,
        mut answer: impl FnMut(u64, &[i64]) -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        let PromptInput::Turns(turns) = input else {
            let ids = prompts::to_ids(input, &self.tokenizer, self.template.as_ref())?;
            return answer(0, &wide(&ids)).map(drop);
        };
        let mut messages = Vec::new();
        for (at, turn) in turns.iter().enumerate() {
            let context = || format!("turn {}", at + 1);
            messages.push(Message::new("user", turn));
            let ids = prompts::chat_ids(&messages, &self.tokenizer, self.template.as_ref()).with_context(context)?;
            let said = answer(at as u64, &wide(&ids)).with_context(context)?;
            messages.push(Message::new("assistant", said));
        }
        Ok(())
    }

    /// The text of new tokens, special ones left out.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn text(&self, ids: &[i64]) -> anyhow::Result<String> {
        Ok(self.tokenizer.decode(&narrow(ids), true)?)
    }
}

/// Without a tree, each head's best guess follows the one before.
fn chain_of(heads: &Heads, common: &CommonFlags) -> anyhow::Result<SparseTree> {
    common.say(format_args!(
        "no --tree: a chain of the {} heads' best guesses; `medusa tree` makes a better one",
        heads.num_heads()
    ));
    Ok(SparseTree::chain(heads.num_heads())?)
}

/// `--prompts`, or the one of `--prompt`.
///
/// # Errors
/// What is wrong with the file.
pub fn read_prompts(prompt: Option<&String>, file: Option<&PathBuf>) -> anyhow::Result<Vec<Prompt>> {
    match (prompt, file) {
        (Some(text), _) => Ok(vec![Prompt { category: None, input: PromptInput::Text(text.clone()) }]),
        (None, Some(path)) => Ok(prompts::read(path)?),
        (None, None) => Err(UsageError("nothing to decode: give --prompt TEXT or --prompts FILE".into()).into()),
    }
}
