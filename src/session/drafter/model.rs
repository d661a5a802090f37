//! A draft model, loaded beside the backbone.

use std::num::NonZeroUsize;
use std::path::Path;

use crate::data::tokenize::TextTokenizer;
use crate::draft::levels::LevelDrafter;
use crate::draft::model::{Guessing, ModelGuesser};
use crate::engine::fastest::fastest;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::plural::counted;
use crate::session::error::SessionError;
use crate::session::loading::load_backbone;
use crate::session::opened::OpenedBackbone;
use crate::session::reporter::LoadContext;
use crate::session::setup::ModelSetup;
use crate::tree::guess_tree::GuessTree;

/// Guesses of a chain without `--draft-tokens`: as many as the Medusa paper's baseline has with a 7B backbone (appendix D).
pub const DRAFT_TOKENS: NonZeroUsize = NonZeroUsize::new(4).expect("above 0");

/// Levels of trees that are chosen at each step.
pub const DRAFT_LEVELS: usize = 6;

/// A draft model and the tree that it fills.
#[derive(Debug)]
pub struct DraftModel {
    model: Llama,
    /// Tokens that both tokenizers have.
    vocabulary: usize,
    tree: GuessTree,
}

/// What a draft model has to fit to.
#[derive(Debug, Clone, Copy)]
pub struct Target<'t> {
    pub backbone: &'t Llama,
    pub tokenizer: &'t TextTokenizer,
    /// Of the backbone's weights.
    pub purpose: Purpose,
}

impl DraftModel {
    /// Loads a draft model to compute in the context's dtype, by default that of its weights, as a backbone is loaded; on a CPU with the kernels its
    /// weights have the dtype of drafters.
    ///
    /// # Errors
    /// As [`check_vocabulary`]; a folder without a backbone, or a tree with more guesses at a node than there are tokens.
    pub fn load(folder: &Path, tree: GuessTree, target: Target, context: LoadContext) -> Result<Self, SessionError> {
        let tokenizer = check_vocabulary(folder, target.tokenizer)?;
        let purpose = match target.purpose {
            Purpose::Decoding => Purpose::Guesses(context.draft_dtype),
            purpose => purpose,
        };
        let model = load_backbone(&ModelSetup::new(OpenedBackbone::open(folder)?), purpose, context)?;
        tokenizer.check_vocabulary(usize::try_from(model.config.vocab_size)?)?;
        let vocabulary = tokenizer.vocab_size().min(target.tokenizer.vocab_size());
        tree.check_fits(usize::MAX, vocabulary)?;
        let draft = Self { model, vocabulary, tree };
        let (name, parameters) = (folder.display(), counted(draft.parameters(), "parameter"));
        context.reporter.notice(&format_args!("draft model {name}: {parameters} beside the backbone's"));
        let [own, longest] = [&draft.model, target.backbone].map(|model| model.config.max_position_embeddings);
        if own < longest {
            context.reporter.notice(&format_args!(
                "draft model {name}: its context of {own} tokens is shorter than the backbone's {longest}; longer texts go on without guesses"
            ));
        }
        Ok(draft)
    }

    /// Its weights.
    pub fn parameters(&self) -> usize {
        self.model.config.parameters().unsigned_abs() as usize
    }

    /// The tree that it fills.
    pub fn tree(&self) -> &GuessTree {
        &self.tree
    }

    /// A drafter with an empty cache.
    pub fn drafter<'a>(&'a self, backbone: &'a Llama, guessing: Guessing) -> LevelDrafter<'a> {
        let guesser = Box::new(ModelGuesser::new(fastest(&self.model), self.vocabulary, self.tree.depth(), guessing));
        match &self.tree {
            GuessTree::Static(tree) => LevelDrafter::for_tree(backbone, guesser, tree),
            GuessTree::Dynamic(limits) => LevelDrafter::dynamic(backbone, guesser, *limits),
        }
    }
}

/// The tokenizer of a draft model.
///
/// # Errors
/// A folder without a tokenizer, or with another vocabulary than the backbone's.
pub fn check_vocabulary(folder: &Path, backbones: &TextTokenizer) -> Result<TextTokenizer, SessionError> {
    let tokenizer = TextTokenizer::load(folder)
        .map_err(|source| SessionError::DraftTokenizer { folder: folder.to_owned(), source: source.into() })?;
    backbones
        .check_same_vocabulary(&tokenizer)
        .map_err(|source| SessionError::DraftVocabulary { folder: folder.to_owned(), source: source.into() })?;
    Ok(tokenizer)
}
