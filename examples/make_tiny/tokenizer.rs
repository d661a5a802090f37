//! The byte-level BPE tokenizer of the tiny backbone, and the config that transformers reads with it.

use serde_json::{Map, Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use crate::conversations::{ASSISTANT, BOS, EOS, USER};

/// Pieces, including special tokens.
pub(crate) const VOCAB_SIZE: usize = 1536;
/// In the order of their ids.
pub(crate) const SPECIAL_TOKENS: [&str; 4] = [BOS, EOS, USER, ASSISTANT];
/// Positions that the backbone is trained for.
pub(crate) const CONTEXT: usize = 512;

/// The chat template; [`crate::conversations::Conversation::text`] does the same in Rust.
const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
    {% if message['role'] not in ['user', 'assistant'] %}\
    {{ raise_exception('this chat template has only the roles user and assistant') }}{% endif %}\
    {{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// Trains the tokenizer on the texts; deterministic.
pub(crate) fn train(texts: &[String]) -> tokenizers::Result<Tokenizer> {
    let specials: Vec<AddedToken> = SPECIAL_TOKENS.iter().map(|&token| AddedToken::from(token, true)).collect();
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    tokenizer.add_special_tokens(&specials);
    let trainer = BpeTrainer::builder()
        .vocab_size(VOCAB_SIZE)
        .special_tokens(specials)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts.iter())?;
    let bos = tokenizer.token_to_id(BOS).ok_or("the trainer dropped the special tokens")?;
    let template = TemplateProcessing::builder()
        .try_single(format!("{BOS} $A"))?
        .try_pair(format!("{BOS} $A $B"))?
        .special_tokens(vec![(BOS, bos)])
        .build()?;
    tokenizer.with_post_processor(Some(template));
    Ok(tokenizer)
}

/// tokenizer_config.json.
pub(crate) fn config() -> Value {
    let decoder: Map<String, Value> =
        SPECIAL_TOKENS.iter().enumerate().map(|(id, token)| (id.to_string(), added_token(token))).collect();
    json!({
        "added_tokens_decoder": decoder,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn added_token(content: &str) -> Value {
    json!({
        "content": content,
        "lstrip": false,
        "normalized": false,
        "rstrip": false,
        "single_word": false,
        "special": true,
    })
}
