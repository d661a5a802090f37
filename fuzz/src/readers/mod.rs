//! Every reader as a function of bytes, for libFuzzer and for `tests/fuzz_corpus.rs`. A function puts the bytes where the reader expects
//! them, mostly in a file, and panics where the reader breaks a promise: it panics itself, or its error does not name the file.
//!
//! Where bytes alone do not get past a first check, the function makes the check right: lengths and checksums.

mod checkpoints;
mod formats;
mod hub;
mod recipes;
mod rows;
mod scratch;
mod serve;
mod tokenizers;
mod weights;

/// A reader under a name, which is also the name of its corpus and of its libFuzzer target.
#[derive(Clone, Copy)]
pub struct Reader {
    pub name: &'static str,
    /// Panics where the reader breaks a promise.
    pub read: fn(&[u8]),
}

const fn reader(name: &'static str, read: fn(&[u8])) -> Reader {
    Reader { name, read }
}

/// The files of a checkpoint, for seeds.
pub fn checkpoint_files() -> Vec<(String, Vec<u8>)> {
    checkpoints::files()
}

/// All readers.
pub const READERS: &[Reader] = &[
    reader("calibration", formats::calibration),
    reader("calibration_share", formats::calibration_share),
    reader("captured_states", weights::captured_states),
    reader("chat_template", tokenizers::chat_template),
    reader("checkpoint", checkpoints::checkpoint),
    reader("checksums", formats::checksums),
    reader("config", recipes::config),
    reader("data_folder", rows::data_folder),
    reader("distill_folder", formats::distill_folder),
    reader("gguf", weights::gguf),
    reader("heads", weights::heads),
    reader("heads_config", formats::heads_config),
    reader("hub", hub::hub),
    reader("journal", formats::journal),
    reader("latency", formats::latency),
    reader("metrics", formats::metrics),
    reader("peft", weights::peft),
    reader("pickle", weights::pickle),
    reader("prompts", rows::prompts),
    reader("provenance", formats::provenance),
    reader("recipe", recipes::recipe),
    reader("results", formats::results),
    reader("rows_arrow", rows::arrow),
    reader("rows_csv", rows::csv),
    reader("rows_gzip", rows::gzip),
    reader("rows_json_array", rows::json_array),
    reader("rows_jsonl", rows::jsonl),
    reader("rows_parquet", rows::parquet),
    reader("rows_zstd", rows::zstd),
    reader("safetensors", weights::safetensors),
    reader("serve_http", serve::http),
    reader("serve_request", serve::request),
    reader("token_cache", rows::token_cache),
    reader("tokenizer_config", tokenizers::config),
    reader("tokenizer_json", tokenizers::json),
    reader("tokenizer_model", tokenizers::model),
    reader("torch_file", weights::torch_file),
    reader("trained_prompts", formats::trained_prompts),
    reader("tree", formats::tree),
    reader("weights_index", weights::index),
];
