//! The trained tensors of a backbone (all weights, or adapters), part by part, with their names in the files.

use tch::{Kind, Tensor};

use crate::model::block_spec::names;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::peft;
use crate::model::stored::table::TokenTable;
use crate::torch::wide;

impl Llama {
    /// The same backbone with float32 (or float64) weights of its own, all of them trained; it computes in `kind`.
    #[must_use]
    pub fn for_fine_tuning(mut self, kind: Kind) -> Self {
        let own = |tensor: &Tensor| tensor.to_kind(wide(kind)).copy();
        self.embed_tokens = TokenTable::Dense(own(self.embed_tokens.dense()));
        self.norm_h = own(&self.norm_h);
        for layer in &mut self.layers {
            layer.norms_mut().for_each(|norm| *norm = own(norm));
        }
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.own(wide(kind)));
        if self.config.tie_word_embeddings {
            self.lm_head = Linear::dense(self.tied_weight(), None);
        }
        self.ropes = self.stages.ropes(&self.block.layers, kind);
        self.kind = kind;
        for (_, weight) in self.weights() {
            let _ = weight.set_requires_grad(true);
        }
        self
    }

    /// The embedding as the LM head; with several stages a copy on the last one.
    fn tied_weight(&self) -> Tensor {
        let embedding_vh = self.embed_tokens.dense().detach();
        match self.stages.len() {
            1 => embedding_vh,
            _ => embedding_vh.to_device(self.stages.last()).copy(),
        }
    }

    /// The LM head's copy `[V, H]` of a trained embedding that lies on another stage. It follows the embedding after each update.
    pub fn copied_embedding(&self) -> Option<&Tensor> {
        let is_copied = self.config.tie_word_embeddings && self.stages.len() > 1 && self.lm_head.adapter().is_none();
        self.lm_head.dense_weight().filter(|_| is_copied && self.embed_tokens.dense().requires_grad())
    }

    /// What is trained in a part of a pass (see [`Llama::forward_kept`]), by the name in its file: adapters by PEFT's, weights by
    /// Hugging Face's.
    pub fn trained_in(&self, part: usize) -> Vec<(String, &Tensor)> {
        let all = match part.checked_sub(1) {
            None => vec![(names::EMBED_TOKENS.to_owned(), self.embed_tokens.dense())],
            Some(layer) if layer < self.layers.len() => self.tensors_of_layer(layer),
            Some(_) => vec![(names::NORM.to_owned(), &self.norm_h)],
        };
        all.into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
    }

    /// Weights and adapters of a decoder layer, by the names in their files.
    fn tensors_of_layer(&self, index: usize) -> Vec<(String, &Tensor)> {
        let (layer, linears) = (&self.layers[index], self.block.linears());
        let mut all = layer.weights(&self.block, index);
        for (spec, linear) in linears.all().zip(layer.linears()) {
            all.extend(linear.adapter().into_iter().flat_map(|a| peft::named(&names::in_layer(index, spec.part), a)));
        }
        all
    }

    /// What is trained in the LM head; nothing where it is tied to a trained embedding, which is [`Llama::trained_in`] part 0.
    pub fn trained_in_lm_head(&self) -> Vec<(String, &Tensor)> {
        if let Some(adapter) = self.lm_head.adapter() {
            return peft::named(names::LM_HEAD, adapter).into_iter().filter(|(_, t)| t.requires_grad()).collect();
        }
        let own = self.lm_head.dense_weight().filter(|w| w.requires_grad() && !self.config.tie_word_embeddings);
        own.map(|weight| (names::LM_HEAD_WEIGHT.to_owned(), weight)).into_iter().collect()
    }
}
