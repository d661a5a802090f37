//! Inputs that once made a reader panic or ended the process, each by the name of what was wrong.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use serde_json::Value;

use super::readers::READERS;
use super::seeds::{token_cache, unfooted};

fn read(name: &str, input: &[u8]) {
    (READERS.iter().find(|reader| reader.name == name).expect("a reader").read)(input);
}

#[test]
fn a_config_with_more_weights_than_64_bits_can_count_is_refused() {
    let config = include_bytes!("../../data/tiny/backbone/config.json");
    for key in
        ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    {
        for number in [u64::MAX >> 1, 1 << 62, 1 << 40, 1 << 32, 1 << 31, 1 << 30] {
            let mut config: Value = serde_json::from_slice(config).expect("JSON");
            config[key] = number.into();
            config["num_key_value_heads"] = 1.into();
            read("config", config.to_string().as_bytes());
        }
    }
}

#[test]
fn a_compressed_arrow_buffer_that_says_it_is_larger_than_all_memory_is_an_error() {
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a few words of text"; 20]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).expect("a batch");
    for codec in [CompressionType::ZSTD, CompressionType::LZ4_FRAME] {
        let options = || IpcWriteOptions::default().try_with_compression(Some(codec)).expect("options");
        let mut file = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options()).expect("a writer");
        file.write(&batch).and_then(|()| file.finish()).expect("a file");
        let file = [b"f", &unfooted(&file.into_inner().expect("a file"), 8, 6)[..]].concat();
        let mut stream = StreamWriter::try_new_with_options(Vec::new(), &batch.schema(), options()).expect("a writer");
        stream.write(&batch).and_then(|()| stream.finish()).expect("a stream");
        let stream = [b"s", &stream.into_inner().expect("a stream")[4..]].concat();
        // The bytes that come first in a file, before those that the reader is given: seven more than here, and three.
        for (whole, first) in [(file, 1), (stream, 5)] {
            for at in (first..whole.len() - 8).step_by(8) {
                let mut damaged = whole.clone();
                damaged[at..at + 8].copy_from_slice(&0x00c0_0000_0000_0000_u64.to_le_bytes());
                read("rows_arrow", &damaged);
            }
        }
    }
}

#[test]
fn a_header_of_the_hub_without_a_colon_is_an_error_or_left_out() {
    for answer in [
        "m429\nRetry-After",
        "m503\nRateLimit",
        "m302\nLocation",
        "m401\nX-Error-Code",
        "m200\nTransfer-Encoding",
        "m200\nConnection",
    ] {
        read("hub", answer.as_bytes());
    }
    let head = format!("m200\n\n{{\"sha\": \"{}\"}}", "0".repeat(40));
    read("hub", format!("{head}\x00200\nLink\n\n[]").as_bytes());
}

#[test]
fn a_control_character_in_a_file_name_of_a_cached_index_reaches_no_error() {
    let pieces =
        [r#"["data/train.jsonl"]"#, "{\"weight_map\": {\"a\": \"b\x7f.safetensors\"}}", r#"{"model_type": "llama"}"#];
    read("hub", format!("o!\0{}", pieces.join("\0")).as_bytes());
}

#[test]
fn a_token_cache_whose_footer_names_tokens_before_its_beginning_is_damaged() {
    let whole = token_cache(3);
    let key = b"\"end\":";
    let at = whole.windows(key.len()).position(|bytes| bytes == key).expect("the end of a batch") + key.len();
    let digits = whole[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    for first in [b'1', b'9'] {
        let mut damaged = whole.clone();
        damaged[at..at + digits].fill(b'0');
        damaged[at] = first;
        read("token_cache", &damaged);
    }
}

/// libFuzzer's time limit of 20 seconds.
#[test]
fn a_parquet_footer_with_four_billion_booleans_is_an_error_at_once() {
    let began = std::time::Instant::now();
    read("rows_parquet", b"\x0b4\xff\xff\xff\xff\x01!\xff\xff\xff\xff\xff\xff\x0e\xff\xff\xff\xff\xff\xff\xff\xff&");
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
}
