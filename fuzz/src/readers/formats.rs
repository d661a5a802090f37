//! The files that pass between commands.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use medusa::distill::folder::{DistilledFolder, check_journal, check_refused};
use medusa::files::checksums::{Checksums, read_list, verify};
use medusa::files::hex;
use medusa::formats::calibration::Calibration;
use medusa::formats::calibration_share::CalibrationShare;
use medusa::formats::heads_config::PublishedHeadsConfig;
use medusa::formats::latency::{Latency, LatencyConditions};
use medusa::formats::metrics::{MetricsFile, MetricsLine};
use medusa::formats::provenance::{DistillProvenance, Provenance};
use medusa::formats::sealed::{CHECKSUM, sealed};
use medusa::formats::trained_prompts::TrainedPrompts;
use medusa::formats::tree::TreeFile;
use medusa::formats::{bench, load};
use medusa::report::Run;
use medusa::tree::calibration_shares::merge;
use medusa::tree::guess_tree::GuessTree;
use parquet::arrow::ArrowWriter;
use sha2::{Digest, Sha256};

use super::scratch::{checked, choice, file, folder, write};

/// Reads a file as it is, and once more with the right checksum if it has one.
fn resealed(reader: &str, name: &str, input: &[u8], read: impl Fn(&Path)) {
    read(&file(reader, name, input));
    let key = format!("\"{CHECKSUM}\"");
    let body = std::str::from_utf8(input).ok().and_then(|text| text.rsplit_once(&key));
    if let Some(body) = body.and_then(|(body, _)| body.trim_end().strip_suffix(',')) {
        read(&file(reader, name, sealed(&format!("{body}}}")).as_bytes()));
    }
}

pub(super) fn tree(input: &[u8]) {
    resealed("tree", "tree.json", input, |path| {
        let Some((tree, file)) = checked(path, GuessTree::load(path)) else { return };
        let (nodes, depth) = (tree.nodes(), tree.depth());
        let _ = (tree.check_fits(depth, nodes), tree.check_fits(1, 1), tree.as_static().is_some());
        if let Ok(trees) = GuessTree::by_load(tree, &file) {
            assert!(trees.at(1).is_none_or(|tree| tree.nodes() <= nodes.max(tree.nodes())));
        }
        write(path, file.to_json().as_bytes());
        let again = TreeFile::load(path).expect("a tree that was written is read");
        assert_eq!(again.choices, file.choices, "a tree comes back as it was written");
    });
}

/// Counts of more texts take longer to search, not other code.
const SEARCHED: usize = 1 << 12;

pub(super) fn calibration(input: &[u8]) {
    resealed("calibration", "calibration.json", input, |path| {
        let Some(mut calibration) = checked(path, Calibration::load(path)) else { return };
        let heads = calibration.heads.len();
        if input.len() < SEARCHED {
            let tree = calibration.best_tree(4, heads);
            let _ = tree.map(|found| calibration.counts_for(&found.tree));
            let _ = (calibration.dynamic_tree(4, 2), calibration.independent(), calibration.accuracies());
        }
        calibration.save(path).expect("a folder that can be written");
        Calibration::load(path).expect("a calibration that was written is read");
        calibration.keep_first(heads.min(2));
        calibration.export_to("ab".repeat(32), "cd".repeat(32));
        let _ = (calibration.knows_joint(), calibration.measured_sha256().len());
        calibration.forget_joint();
        let _ = calibration.best_tree(4, 2);
    });
}

pub(super) fn calibration_share(input: &[u8]) {
    resealed("calibration_share", "share.json", input, |path| {
        let Some(share) = checked(path, CalibrationShare::load(path)) else { return };
        let [first, second] = ["first.json", "second.json"].map(|name| path.with_file_name(name));
        let _ = merge(vec![(first.clone(), share.clone())]);
        let _ = merge(vec![(first, share.clone()), (second, share)]);
    });
}

pub(super) fn latency(input: &[u8]) {
    resealed("latency", "latency.json", input, |path| {
        let Some(latency) = checked(path, Latency::load(path)) else { return };
        let asked = LatencyConditions { backbone: Some("other".into()), ..LatencyConditions::default() };
        let _ = (
            checked(path, latency.check(&asked, path)),
            checked(path, latency.check(&LatencyConditions::default(), path)),
        );
        let _ = (latency.caveat(), latency.step(false, 3, 2), latency.step(true, usize::MAX, usize::MAX));
        latency.save(path).expect("a folder that can be written");
        Latency::load(path).expect("latencies that were written are read");
    });
}

pub(super) fn metrics(input: &[u8]) {
    let path = file("metrics", "metrics.jsonl", input);
    let whole = MetricsFile::read_what_is_whole(&path);
    let read = checked(&path, MetricsFile::read(&path));
    assert!(read.is_none_or(|read| read.lines.len() <= whole.lines.len()), "what is whole is all of a good file");
    if let Ok(line) = MetricsLine::parse(input) {
        let _ = line.losses();
        let mut out = Vec::new();
        line.append_to(&mut out).expect("a vector takes everything");
        MetricsLine::parse(&out).expect("a line that was written is read");
    }
}

/// A run's folder, as `medusa report` reads it, around its provenance.
pub(super) fn provenance(input: &[u8]) {
    resealed("provenance", "provenance.json", input, |path| {
        let _ = checked(path, Provenance::entries(path));
        let _ = checked(path, DistillProvenance::entries(path));
        let _ = (Provenance::backbone_of(path), Provenance::recipe_of(path.parent().expect("a folder")));
        if let Some(provenance) = checked(path, Provenance::load(path)) {
            write(path, provenance.to_json().as_bytes());
            Provenance::load(path).expect("what was written is read");
        }
        let _ = Run::read(path.parent().expect("a folder"));
    });
}

/// `bench.json` and `load.json`.
pub(super) fn results(input: &[u8]) {
    let path = file("results", "results.json", input);
    for result in checked(&path, bench::load::<bench::BenchResult>(&path)).unwrap_or_default() {
        let _ = (result.groups().count(), result.is_of_heads(), result.guesses().len(), result.is_plain());
    }
    for result in checked(&path, load::load(&path)).unwrap_or_default() {
        let _ = (result.source.name(), result.source.conditions());
    }
}

/// config.json beside heads.
pub(super) fn heads_config(input: &[u8]) {
    let path = file("heads_config", "config.json", input);
    let Some(Some(config)) =
        checked(&path, PublishedHeadsConfig::load_beside(&path.with_file_name("heads.safetensors")))
    else {
        return;
    };
    let _ = (config.base(), config.architecture(), config.backbone_fingerprint(), config.backbone_dtype());
    let _ = (config.quantization(), config.chat_template(), config.rope_context(), config.best(), config.is_of_a_run());
    let _ = (config.recorded(), config.vocab_size(), config.logit_scale(), config.count(&["medusa_num_heads"]));
}

/// prompts.hashes as it is, and once more with the right hash behind it.
pub(super) fn trained_prompts(input: &[u8]) {
    let sum = Sha256::digest(input);
    for content in [input, &[input, &sum[..]].concat()] {
        let path = file("trained_prompts", "prompts.hashes", content);
        let Some(trained) = checked(&path, TrainedPrompts::load(&path)) else { continue };
        assert!(!trained.have(&[]), "a prompt without tokens begins with none");
        trained.save(&path).expect("a file of ours");
        assert_eq!(TrainedPrompts::load(&path).expect("a file that was written is read"), trained);
    }
}

/// A list of checksums beside the files that it names.
pub(super) fn checksums(input: &[u8]) {
    let path = file("checksums", "medusa.sha256", input);
    let folder = path.parent().expect("a folder");
    write(&folder.join("a"), b"a");
    let _ = checked(&path, read_list(&path));
    let _ = checked(folder, verify(folder));
    let Some(Some(sums)) = checked(folder, Checksums::read(folder)) else { return };
    for name in sums.names() {
        let _ = sums.verify_file(name);
        let _ = sums.compare(name, "ab");
    }
}

/// Lines with their checksums, as journal.jsonl and refused.jsonl of distill have them.
pub(super) fn journal(input: &[u8]) {
    let path = file("journal", "journal.jsonl", input);
    let _ = check_journal(&path);
    let _ = check_journal(&file("journal", "journal.jsonl", &with_checksums(input)));
    let path = file("journal", "refused.jsonl", input);
    let _ = checked(&path, check_refused(&path));
    if let Ok(text) = std::str::from_utf8(input) {
        let sealed: String = text.lines().map(|line| sealed(line) + "\n").collect();
        let path = file("journal", "refused.jsonl", sealed.as_bytes());
        let _ = checked(&path, check_refused(&path));
    }
}

/// A shard with the numbers of a text as its indices; without numbers, with another column.
fn shard(text: &[u8]) -> Vec<u8> {
    let numbers = String::from_utf8_lossy(text);
    let numbers: Vec<i64> = numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let name = if numbers.is_empty() { "other" } else { "index" };
    let column: ArrayRef = Arc::new(Int64Array::from(numbers));
    let batch = RecordBatch::try_from_iter([(name, column)]).expect("a batch");
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).expect("a writer");
    writer.write(&batch).expect("a batch");
    writer.into_inner().expect("a file")
}

fn with_checksums(lines: &[u8]) -> Vec<u8> {
    let lines = lines.split_inclusive(|&byte| byte == b'\n');
    lines.flat_map(|line| [checksum(line).into_bytes(), line.to_vec()].concat()).collect()
}

fn checksum(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    format!("{} ", hex(&Sha256::digest(line)[..8]))
}

/// A folder of distill: distill.json, and behind NULs the lines of its journal without their checksums, the indices of its shard, and the
/// distill.json of a second share.
pub(super) fn distill_folder(input: &[u8]) {
    let mut parts = input.split(|&byte| byte == 0);
    let [provenance, lines, indices, second] = std::array::from_fn(|_| parts.next().unwrap_or_default());
    let of_shares = if second.is_empty() { ["", "-2-of-2"] } else { ["-1-of-2", "-2-of-2"] };
    let folder = folder("distill_folder");
    fs::remove_dir_all(&folder).and_then(|()| fs::create_dir(&folder)).expect("a folder of ours");
    write(&folder.join(format!("journal{}.jsonl", of_shares[0])), &with_checksums(lines));
    write(&folder.join(format!("distill{}.json", of_shares[0])), provenance);
    if !second.is_empty() {
        write(&folder.join("distill-2-of-2.json"), second);
    }
    if !indices.is_empty() {
        write(&folder.join(format!("shard{}-00000.parquet", of_shares[0])), &shard(indices));
    }
    let _ = checked(&folder, DistilledFolder::read(&folder));
    let (choice, _) = choice(input);
    let _ = medusa::distill::folder::is_next_shard(&folder, &format!("part-{choice:05}.parquet"));
}
