//! Medusa heads: ResBlocks on the last hidden state, then a linear layer to the vocabulary (paper section 2.1.1).

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[heads]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadsConfig {
    /// K, the number of heads.
    pub medusa_num_heads: NonZeroUsize,
    /// ResBlocks a head, each with its own weights.
    pub medusa_num_layers: NonZeroUsize,
    /// Folder of trained heads to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// Heads are ResBlocks only and go through the backbone's lm_head.
    #[serde(default)]
    pub shared_lm_head: bool,
}
