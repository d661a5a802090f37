//! Rows of data files, prompts, and the cache of tokens.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use medusa::data::cache::check_file;
use medusa::data::chat::LossOn;
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::prompts::{self, PromptFile};
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, LoadSettings, source};
use medusa::files::hex;
use sha2::{Digest, Sha256};

use super::scratch::{checked, choice, file, folder, write};

/// What rows are read with.
struct Reading {
    tokenizer: TextTokenizer,
    template: Option<ChatTemplate>,
}

impl Reading {
    fn new() -> Self {
        let folder = folder("reading");
        write(&folder.join("tokenizer.model"), include_bytes!("../../../tests/fixtures/tokenizers/suffix.model"));
        let tokenizer = TextTokenizer::load(&folder).expect("a tokenizer of the fixtures");
        let choice = TemplateChoice::try_from("zephyr".to_owned()).expect("a built-in template");
        Self { tokenizer, template: ChatTemplate::choose(&choice, &folder).expect("a template that parses") }
    }
}

thread_local! {
    static READING: Reading = Reading::new();
}

/// Rows of a file as training reads them, and once more with bad rows left out.
fn rows(path: &Path) {
    READING.with(|Reading { tokenizer, template }| {
        for skip_bad_rows in [false, true] {
            let settings = LoadSettings {
                tokenizer: Some(tokenizer),
                template: template.as_ref(),
                skip_bad_rows,
                loss_on: if skip_bad_rows { LossOn::All } else { LossOn::Assistant },
                ..LoadSettings::new(tokenizer.vocab_size(), NonZeroUsize::new(64).expect("64 is not 0"))
            };
            let read = checked(path, data::load(&[path.display().to_string()], &settings));
            let Some((rows, report)) = read else { continue };
            assert_eq!(rows.len(), report.counts.rows);
            for at in (0..rows.len()).take(4) {
                rows.row(at).expect("rows that were read a moment ago");
            }
        }
    });
}

pub(super) fn jsonl(input: &[u8]) {
    rows(&file("rows_jsonl", "rows.jsonl", input));
}

pub(super) fn json_array(input: &[u8]) {
    let array = [b"[", input].concat();
    rows(&file("rows_json_array", "rows.json", if input.starts_with(b"[") { input } else { &array }));
}

/// The first byte says what separates the columns, or that the rows are plain text.
pub(super) fn csv(input: &[u8]) {
    let (form, rest) = choice(input);
    let name = match form {
        b't' => "rows.tsv",
        b'p' => "rows.txt",
        _ => "rows.csv",
    };
    rows(&file("rows_csv", name, rest));
}

/// JSON lines in gzip; the first byte says how much is cut off the end, or that the bytes are the file.
pub(super) fn gzip(input: &[u8]) {
    let (form, rest) = choice(input);
    let packed = || {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(rest).and_then(|()| out.finish()).expect("a vector takes everything")
    };
    rows(&file("rows_gzip", "rows.jsonl.gz", &cut(form, rest, packed)));
}

/// As [`gzip`], in zstd.
pub(super) fn zstd(input: &[u8]) {
    let (form, rest) = choice(input);
    let packed = || zstd::encode_all(rest, 1).expect("a vector takes everything");
    rows(&file("rows_zstd", "rows.jsonl.zst", &cut(form, rest, packed)));
}

fn cut(form: u8, raw: &[u8], packed: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
    if form == b'r' {
        return raw.to_vec();
    }
    let mut packed = packed();
    packed.truncate(packed.len() - usize::from(form & 7).min(packed.len()));
    packed
}

/// A Parquet file without its magic words: the last two bytes are the footer's length, as far as there are so many bytes.
pub(super) fn parquet(input: &[u8]) {
    let (body, length) = footed(input);
    let file_bytes = [b"PAR1", body, &length.to_le_bytes(), b"PAR1"].concat();
    rows(&file("rows_parquet", "rows.parquet", &file_bytes));
}

/// An Arrow file without its magic words, as [`parquet`]; behind an `s`, a stream.
pub(super) fn arrow(input: &[u8]) {
    let (form, rest) = choice(input);
    if form == b's' {
        return rows(&file("rows_arrow", "rows.arrow", &[&[0xff; 4], rest].concat()));
    }
    rows(&file("rows_arrow", "rows.arrow", &arrow_file(rest)));
}

/// Batches and footer between the magic words.
fn arrow_file(input: &[u8]) -> Vec<u8> {
    let (body, length) = footed(input);
    [b"ARROW1\0\0", body, &length.to_le_bytes(), b"ARROW1"].concat()
}

/// All but the last two bytes, and the number that they are.
fn footed(input: &[u8]) -> (&[u8], u32) {
    let (body, length) = input.split_at(input.len().saturating_sub(2));
    let length = length.iter().rev().fold(0, |length, &byte| length << 8 | u32::from(byte));
    (body, length.min(body.len() as u32))
}

/// What a folder says of its files; the first byte says in which of its own.
pub(super) fn data_folder(input: &[u8]) {
    let (form, rest) = choice(input);
    let name = match form {
        b's' => "state.json",
        b'd' => "dataset_dict.json",
        _ => "README.md",
    };
    let folder = folder(&format!("data_folder/{name}"));
    write(&folder.join(name), rest);
    checked(&folder, source::find(&[folder.display().to_string()]));
}

/// A file of the token cache, as [`arrow`] has it, under the name that its footer's hash gives it; with the checksums of its batches made
/// right where the footer says where they end.
pub(super) fn token_cache(input: &[u8]) {
    let bytes = arrow_file(input);
    let length = u32::from_le_bytes(bytes[bytes.len() - 10..bytes.len() - 6].try_into().expect("four bytes")) as usize;
    let tail = bytes.len().saturating_sub(8 + length + 10);
    let name = format!("{}-{}.arrow", "0".repeat(32), &hex(&Sha256::digest(&bytes[tail..]))[..32]);
    let folder = folder("token_cache");
    write(&folder.join(&name), &bytes);
    let _ = check_file(&folder.join(&name)).expect("a file of the cache");
    let _ = std::fs::remove_file(folder.join(name));
    let _ = check_file(&file("token_cache", &format!("{}.sha256", "0".repeat(32)), input));
}

/// Prompts, for generating and for distilling.
pub(super) fn prompts(input: &[u8]) {
    let path = file("prompts", "prompts.jsonl", input);
    if let Some(file) = checked(&path, PromptFile::open(&path)) {
        let _ = (file.sha256().len(), checked(&path, file.dialogues()));
    }
    let Some(read) = checked(&path, prompts::read(&path)) else { return };
    READING.with(|Reading { tokenizer, template }| {
        for prompt in &read {
            let _ = prompts::to_ids(&prompt.input, tokenizer, template.as_ref());
        }
    });
}
