//! The columns of rows and the keys of messages that known programs write, and how each is used. `docs/data.md` has these tables.

use ColumnUse::{Harmless, NotRead, Read, Template};

/// How a column or a key of a row is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnUse {
    /// It decides what is trained on.
    Read,
    /// It is not read and may matter: the report names it and counts its rows.
    NotRead,
    /// It is not read and does not affect what to train on.
    Harmless,
    /// The chat template gets it. Where the template does not name it, it counts as not read.
    Template,
}

/// A column or key, the programs whose data have it, and what it is there.
#[derive(Debug, Clone, Copy)]
pub struct RowKey {
    pub name: &'static str,
    pub usage: ColumnUse,
    /// Empty for what no program reads.
    pub writers: &'static str,
    pub meaning: &'static str,
}

const fn key(name: &'static str, usage: ColumnUse, writers: &'static str, meaning: &'static str) -> RowKey {
    RowKey { name, usage, writers, meaning }
}

const fn harmless(name: &'static str) -> RowKey {
    key(name, Harmless, "", "")
}

/// Columns of rows. A column that is not among them is [`NotRead`].
pub static COLUMNS: [RowKey; 96] = [
    key("input_ids", Read, "TRL, axolotl, speculators", "token ids"),
    key(
        "labels",
        Read,
        "TRL, axolotl",
        "beside `input_ids`: the token ids, or -100 for no loss; another number is an error",
    ),
    key("loss_mask", Read, "speculators", "beside `input_ids`: 0 for no loss"),
    key("assistant_masks", Read, "TRL, transformers", "beside `input_ids`: 0 for no loss"),
    key("completion_mask", Read, "TRL", "beside `input_ids`: 0 for no loss"),
    key("attention_mask", Read, "transformers, axolotl", "beside `input_ids`: 0 for padding, which is removed"),
    key("messages", Read, "OpenAI, TRL, axolotl, ms-swift", "a conversation"),
    key("conversations", Read, "LLaMA-Factory, axolotl, ms-swift", "a conversation"),
    key("instruction", Read, "LLaMA-Factory, axolotl, ms-swift", "a question"),
    key("input", Read, "LLaMA-Factory, axolotl, ms-swift", "what the `instruction` is about"),
    key("output", Read, "LLaMA-Factory, axolotl, ms-swift", "the answer to the `instruction`"),
    key("prompt", Read, "TRL", "what the `completion` follows"),
    key("completion", Read, "TRL", "what follows the `prompt`"),
    key("text", Read, "TRL, axolotl", "raw text"),
    key(
        "tools",
        Read,
        "OpenAI, TRL, LLaMA-Factory, axolotl, ms-swift",
        "tools of a conversation, for the chat template",
    ),
    key("chat_template_kwargs", Read, "TRL, ms-swift", "variables of the chat template"),
    key("system", Read, "LLaMA-Factory, axolotl, ms-swift", "the system message of a conversation that has none"),
    key("history", Read, "LLaMA-Factory, ms-swift", "earlier questions and answers of a conversation"),
    key("chosen", NotRead, "TRL, LLaMA-Factory, axolotl", "the better answer of a pair"),
    key("rejected", NotRead, "TRL, LLaMA-Factory, axolotl", "the worse answer of a pair"),
    key("preferred_output", NotRead, "OpenAI", "the better answer of a pair"),
    key("non_preferred_output", NotRead, "OpenAI", "the worse answer of a pair"),
    key("rejected_response", NotRead, "ms-swift", "the worse answer of a pair"),
    key("rejected_messages", NotRead, "ms-swift", "the worse conversation of a pair"),
    key("positive_messages", NotRead, "ms-swift", "texts of an embedding model"),
    key("negative_messages", NotRead, "ms-swift", "texts of an embedding model"),
    key("kto_tag", NotRead, "LLaMA-Factory", "whether the answer is good"),
    key("label", NotRead, "TRL, ms-swift", "whether the answer is good, or a class"),
    key("margin", NotRead, "TRL, ms-swift", "how much better an answer is"),
    key("completions", NotRead, "TRL", "steps of an answer"),
    key("segments", NotRead, "axolotl", "texts with and without loss"),
    key("images", NotRead, "TRL, LLaMA-Factory, axolotl, ms-swift", "pictures"),
    key("image", NotRead, "TRL", "a picture"),
    key("videos", NotRead, "LLaMA-Factory, ms-swift", "videos"),
    key("video", NotRead, "", "a video"),
    key("audios", NotRead, "LLaMA-Factory, ms-swift", "sounds"),
    key("audio", NotRead, "", "a sound"),
    key("objects", NotRead, "ms-swift", "places in pictures"),
    key("rejected_images", NotRead, "ms-swift", "pictures"),
    key("teacher_images", NotRead, "ms-swift", "pictures"),
    key("teacher_prompt", NotRead, "ms-swift", "the teacher's system message"),
    key("channel", NotRead, "ms-swift", "a group of rows whose loss is logged"),
    key("solution", NotRead, "TRL, ms-swift", "what a reward compares an answer with"),
    key("system_prompt", NotRead, "ms-swift", "another name of `system`"),
    key("conversation", NotRead, "ms-swift", "another name of `messages`"),
    key("query", NotRead, "ms-swift", "a question"),
    key("response", NotRead, "ms-swift", "an answer"),
    key("functions", NotRead, "OpenAI", "`tools` of an older form"),
    key("function_call", NotRead, "OpenAI", "which of the `functions` is to be called"),
    key("tool_choice", NotRead, "OpenAI", "which of the `tools` is to be called"),
    key("parallel_tool_calls", NotRead, "OpenAI", "whether several tools may be called at once"),
    key("weight", NotRead, "", "how much a row counts; messages have a key of this name that is read"),
    key("position_ids", NotRead, "TRL, axolotl", "places of tokens; several texts in one row are trained as one"),
    key("seq_lengths", NotRead, "TRL", "lengths of the texts in one row, which is trained as one text"),
    key("token_type_ids", NotRead, "transformers", "parts of a row"),
    harmless("id"),
    harmless("_id"),
    harmless("idx"),
    harmless("index"),
    harmless("__index_level_0__"),
    harmless("key"),
    harmless("uuid"),
    harmless("hash"),
    harmless("prompt_id"),
    harmless("question_id"),
    harmless("conversation_id"),
    harmless("chat_id"),
    harmless("source"),
    harmless("data_source"),
    harmless("dataset"),
    harmless("subset"),
    harmless("split"),
    harmless("origin"),
    harmless("url"),
    harmless("license"),
    harmless("author"),
    harmless("model"),
    harmless("lang"),
    harmless("language"),
    harmless("category"),
    harmless("task"),
    harmless("topic"),
    harmless("tags"),
    harmless("meta"),
    harmless("metadata"),
    harmless("extra_info"),
    harmless("timestamp"),
    harmless("created_at"),
    harmless("date"),
    harmless("score"),
    harmless("num_turns"),
    harmless("num_tokens"),
    harmless("token_count"),
    harmless("length"),
    harmless("seq_len"),
    harmless("finish_reason"),
];

/// Keys of messages. A key that is not among them goes to the [`Template`].
pub static MESSAGE_KEYS: [RowKey; 34] = [
    key("role", Read, "OpenAI, TRL, axolotl, ms-swift", "who speaks"),
    key("from", Read, "LLaMA-Factory, axolotl, ms-swift", "who speaks"),
    key("content", Read, "OpenAI, TRL, axolotl, ms-swift", "what is said"),
    key("value", Read, "LLaMA-Factory, axolotl, ms-swift", "what is said"),
    key("tool_calls", Read, "OpenAI, TRL, axolotl, ms-swift", "calls of tools"),
    key("function_call", Read, "OpenAI", "a call of a tool in an older form"),
    key("tool_call_id", Read, "OpenAI", "the call that a tool answers"),
    key("name", Read, "OpenAI, TRL", "the tool that answers, or who speaks"),
    key("reasoning_content", Read, "axolotl", "what was thought before the answer"),
    key("reasoning", Read, "", "what was thought before the answer"),
    key("thinking", Read, "TRL", "what was thought before the answer"),
    key("weight", Read, "OpenAI", "0 for no loss on this turn"),
    key("train", Read, "axolotl", "false for no loss on this turn"),
    key("loss", Read, "ms-swift", "false for no loss on this turn"),
    key("training", NotRead, "axolotl", "another name of `train`"),
    key("train_detail", NotRead, "axolotl", "parts of a turn without loss"),
    key("training_detail", NotRead, "axolotl", "another name of `train_detail`"),
    key("loss_scale", NotRead, "ms-swift", "how much a turn's loss counts"),
    key("reasoning_details", NotRead, "OpenRouter", "thoughts in a form of their own"),
    key("thinking_blocks", NotRead, "LiteLLM", "thoughts in a form of their own"),
    key("refusal", Template, "OpenAI", "the words with which a model refuses"),
    key("audio", Template, "OpenAI", "a sound"),
    key("images", Template, "", "pictures"),
    harmless("id"),
    harmless("timestamp"),
    harmless("created_at"),
    harmless("model"),
    harmless("language"),
    harmless("metadata"),
    harmless("token_count"),
    harmless("annotations"),
    harmless("cache_control"),
    harmless("provider_specific_fields"),
    harmless("prefix"),
];

/// Columns that make up a row, in the order in which forms count; lists of tokens count before them. Where a row has several, those that do
/// not count are no loss: data sets keep a conversation beside its text.
pub(super) const FORMS: [&str; 8] =
    ["messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text"];
/// Columns that stand beside a conversation.
pub(super) const BESIDE: [&str; 4] = ["tools", "chat_template_kwargs", "system", "history"];

/// A key that a row has, as the report names it, and how it is used; never [`Read`].
pub(super) type OtherKey = (ColumnUse, String);

/// Whether rows are made of the column, by itself or beside others; lists of tokens aside.
pub(super) fn is_read(column: &str) -> bool {
    FORMS.contains(&column) || BESIDE.contains(&column)
}

/// How a column that the row is not made of is used.
pub(super) fn other_column(name: &str) -> OtherKey {
    let usage = COLUMNS.iter().find(|known| known.name == name).map_or(NotRead, |known| known.usage);
    (if usage == Read { NotRead } else { usage }, name.to_owned()) // others are read in another form of a row
}

/// How a message's key of this name is used.
pub(super) fn message_use(name: &str) -> ColumnUse {
    MESSAGE_KEYS.iter().find(|known| known.name == name).map_or(Template, |known| known.usage)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::data::token_lists::LISTS;

    #[test]
    fn a_key_is_listed_once() {
        for keys in [&COLUMNS[..], &MESSAGE_KEYS] {
            let names: BTreeSet<&str> = keys.iter().map(|key| key.name).collect();
            assert_eq!(names.len(), keys.len());
        }
    }

    #[test]
    fn the_table_names_what_rows_are_made_of() {
        let read = COLUMNS.iter().filter(|key| key.usage == Read).map(|key| key.name);
        assert_eq!(read.collect::<Vec<_>>(), [&LISTS[..], &FORMS, &BESIDE].concat());
    }
}
