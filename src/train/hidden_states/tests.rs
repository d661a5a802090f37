use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::layout::{layer_facts, positions_in};
use super::{
    CacheSettings, HiddenStatesError, KeptStates, StatesPlace, StatesReader, at_every_position, file_bytes,
    hidden_states,
};
use crate::data::IGNORE;
use crate::data::loader::{Batch, Loader, TargetTokens};
use crate::data::pack::{PackedSequence, Sequences};
use crate::draft::heads::{Heads, HeadsShape};
use crate::draft::loss::LossConfig;
use crate::draft::trained::Reads;
use crate::files::{write_atomic, write_synced};
use crate::model::attention::RowMask;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::stages::Stages;
use crate::model::taps::Taps;
use crate::torch::TorchPanic;
use crate::train::fed_batch::FedBatch;
use crate::train::feed::BatchMaker;
use crate::train::target_rule::TargetRule;
use crate::train::targets::BatchTargets;

const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": true}"#;
const NUM_HEADS: usize = 2;
const LABELS: TargetRule = TargetRule { reads: reads(NUM_HEADS), soft: false, on_unlabelled: false };
const SOFT: TargetRule = TargetRule { soft: true, ..LABELS };
const EVERYWHERE: TargetRule = TargetRule { on_unlabelled: true, ..SOFT };
const WHOLE_ROWS: TargetRule = TargetRule { reads: Reads { whole_rows: true, ..LABELS.reads }, ..LABELS };

const fn reads(levels: usize) -> Reads {
    Reads { levels, tokens: false, whole_rows: false }
}

/// A folder with a config and dummy weights, and a backbone of that config.
fn backbone(kind: Kind) -> (TempDir, Llama) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("config.json", CONFIG), ("model.safetensors", "weights")] {
        write_atomic(&folder.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
    }
    let config = LlamaConfig::load(folder.path()).unwrap();
    (folder, Llama::random(config, kind, Device::Cpu, 3))
}

/// Seven sequences of two segments; every other one has labels only in its second segment, the last one has none.
fn sequences() -> Vec<PackedSequence> {
    let sequence = |s: usize| {
        let segment_lengths = vec![3 + s % 3, 6 + s];
        let input_ids: Vec<i32> = (0..9 + s % 3 + s).map(|t| ((s * 7 + t * 5) % 40) as i32).collect();
        let labels = input_ids.iter().enumerate().map(|(t, &id)| {
            let has_loss = s < 6 && (s.is_multiple_of(2) || t >= segment_lengths[0]);
            if has_loss { id } else { IGNORE }
        });
        PackedSequence { labels: labels.collect(), input_ids, segment_lengths }
    };
    (0..7).map(sequence).collect()
}

fn open<'r>(folder: &Path, from: &TempDir, backbone: &'r Llama, sequences: &[PackedSequence]) -> KeptStates<'r> {
    opened(folder, from, backbone, sequences, LABELS).unwrap()
}

fn opened<'r>(
    folder: &Path,
    from: &TempDir,
    backbone: &'r Llama,
    sequences: &[PackedSequence],
    rule: TargetRule,
) -> Result<KeptStates<'r>, HiddenStatesError> {
    let settings = CacheSettings { folder, backbone_folder: from.path(), rule, reserved_bytes: 0 };
    StatesPlace::new(&settings, backbone, &in_memory(sequences))?.open(backbone, 0)
}

/// `[N, H]` of the backbone.
fn computed(backbone: &Llama, batch: &Batch) -> Tensor {
    let t = batch.length as i64;
    let rows = RowMask::packed(&batch.segment_lengths, t, &backbone.config, Device::Cpu);
    let tokens_bt = Tensor::from_slice(&batch.input_ids).view([batch.rows as i64, t]);
    hidden_states(backbone, &(tokens_bt, rows), Adapters::Off)
}

/// `[N, H]` of the cache, zeros where it keeps none.
fn of(kept: &mut KeptStates, batch: &Batch) -> Tensor {
    let (backbone, kept_m) = (kept.backbone, Tensor::from_slice(&StatesReader::Kept(kept.reader()).positions(batch)));
    let hidden_mh = kept.of(batch, &kept_m, None, || computed(backbone, batch)).unwrap();
    kept.settle().unwrap();
    at_every_position(&hidden_mh, &kept_m, batch.input_ids.len() as i64)
}

fn in_memory(sequences: &[PackedSequence]) -> Sequences {
    Sequences::in_memory(sequences.to_vec())
}

/// The rows that head `head` reads of a batch.
fn read_by(head: usize, batch: &Batch, states_nh: &Tensor) -> Tensor {
    states_nh.index_select(0, &Tensor::from_slice(&batch.targets(head + 2).positions))
}

/// Runs an epoch through `kept` and compares what each head reads with the backbone's output. Returns how often the
/// backbone ran.
fn epoch(kept: &mut KeptStates, loader: &Loader, epoch: usize) -> usize {
    let before = kept.computed_batches();
    let steps = loader.steps_per_epoch();
    for batch in (epoch * steps..(epoch + 1) * steps).flat_map(|step| loader.step(step).unwrap()) {
        let (expected, got) = (computed(kept.backbone, &batch), of(kept, &batch));
        for head in 0..NUM_HEADS {
            let (expected, got) = (read_by(head, &batch, &expected), read_by(head, &batch, &got));
            assert_eq!(got.kind(), expected.kind());
            if batch.rows == 1 {
                assert_eq!(got, expected);
            } else {
                assert!(got.allclose(&expected, 1e-5, 1e-5, false), "more than the last bits differ");
            }
        }
    }
    kept.computed_batches() - before
}

#[test]
fn the_backbone_runs_in_the_first_epoch_of_the_first_run_only() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let (from, backbone) = backbone(kind);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let loader = Loader::new(in_memory(&sequences), 1, 2, Some(5));
        let mut kept = open(&folder.path().join("new/states"), &from, &backbone, &sequences);
        assert_eq!(epoch(&mut kept, &loader, 0), 7);
        assert_eq!(epoch(&mut kept, &loader, 1), 0);
        kept.commit().unwrap();
        drop(kept);
        let mut again = open(&folder.path().join("new/states"), &from, &backbone, &sequences);
        assert_eq!((again.filled(), epoch(&mut again, &loader, 0)), (14, 0));
    }
}

#[test]
fn a_tapped_backbone_has_a_file_of_its_own_with_all_states() {
    let (from, mut backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let loader = Loader::new(in_memory(&sequences), 1, 2, Some(5));
    let (path, bytes) = complete(folder.path(), &from, &backbone, &loader);
    backbone.set_taps(Taps::new([0, 1]));
    let (tapped, all_bytes) = complete(folder.path(), &from, &backbone, &loader);
    assert!(tapped != path && all_bytes == 3 * bytes, "{bytes} {all_bytes}");
    assert_eq!(epoch(&mut open(folder.path(), &from, &backbone, &sequences), &loader, 0), 0);
}

/// A complete file of the cache, and how many bytes of it are states.
fn complete(folder: &Path, from: &TempDir, backbone: &Llama, loader: &Loader) -> (PathBuf, usize) {
    let mut kept = open(folder, from, backbone, &sequences());
    epoch(&mut kept, loader, 0);
    kept.commit().unwrap();
    (kept.path().to_owned(), fs::metadata(kept.path()).unwrap().len() as usize - 4 * kept.rows())
}

#[test]
fn a_changed_byte_of_states_or_of_a_checksum_is_reported_and_the_row_is_computed_and_stored_again() {
    let (from, backbone) = backbone(Kind::Float);
    let folder = tempfile::tempdir().unwrap();
    let loader = Loader::new(in_memory(&sequences()), 1, 2, Some(5));
    let (path, states) = complete(folder.path(), &from, &backbone, &loader);
    let whole = fs::read(&path).unwrap();
    for at in [0, states / 2, states - 1, states, states + 5, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        write_synced(&path, |out| out.write_all(&bytes)).unwrap();
        let mut kept = open(folder.path(), &from, &backbone, &sequences());
        assert_eq!(epoch(&mut kept, &loader, 0), 1, "byte {at}: one batch is computed");
        let notice = kept.take_notice().expect("a notice").to_string();
        assert!(
            notice.contains("are damaged (expected CRC-32 ") && notice.contains("they are computed again"),
            "{notice}"
        );
        kept.commit().unwrap();
        drop(kept);
        let mut again = open(folder.path(), &from, &backbone, &sequences());
        assert_eq!((epoch(&mut again, &loader, 0), again.take_notice().is_none()), (0, true), "byte {at}");
    }
}

#[test]
fn a_file_of_an_earlier_version_is_read_without_checksums() {
    let (from, backbone) = backbone(Kind::Float);
    let folder = tempfile::tempdir().unwrap();
    let loader = Loader::new(in_memory(&sequences()), 1, 2, Some(5));
    let (path, states) = complete(folder.path(), &from, &backbone, &loader);
    let rows = open(folder.path(), &from, &backbone, &sequences()).rows();
    let whole = fs::read(&path).unwrap();
    let earlier = [&whole[..states], &vec![1; rows]].concat();
    write_synced(&path, |out| out.write_all(&earlier)).unwrap();
    let mut kept = open(folder.path(), &from, &backbone, &sequences());
    assert!(!kept.has_checksums());
    assert_eq!((kept.filled(), epoch(&mut kept, &loader, 0)), (rows, 0));
}

#[test]
fn states_that_are_kept_do_not_change_in_other_batches() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    let pair = &Loader::new(in_memory(&sequences), 2, 1, None).step(0).unwrap()[0];
    let first = of(&mut kept, pair);
    let threes = Loader::new(in_memory(&sequences), 3, 1, None);
    let three = &threes.step(0).unwrap()[0];
    for _ in 0..2 {
        let later = of(&mut kept, three);
        for head in 0..NUM_HEADS {
            let (first, later) = (read_by(head, pair, &first), read_by(head, three, &later));
            assert_eq!(first, later.narrow(0, 0, first.size()[0]));
        }
    }
    assert_eq!((kept.filled(), kept.computed_batches()), (6, 2));
    assert_eq!(epoch(&mut kept, &threes, 0), 2);
}

#[test]
fn only_what_was_committed_is_there_for_the_next_run() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let loader = Loader::new(in_memory(&sequences), 1, 1, None);
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    for at in 0..4 {
        let _ = of(&mut kept, &loader.step(at).unwrap()[0]);
        if at == 1 {
            kept.commit().unwrap();
        }
    }
    assert_eq!(kept.filled(), 8);
    drop(kept);
    assert_eq!(open(folder.path(), &from, &backbone, &sequences).filled(), 4);
}

/// The positions of a sequence that the losses of a rule's heads read, from the targets of its batch.
fn read_positions(sequence: &PackedSequence, rule: TargetRule) -> Vec<usize> {
    let batch = &Loader::new(in_memory(std::slice::from_ref(sequence)), 1, 1, None).step(0).unwrap()[0];
    let targets = BatchTargets::new(batch, rule, None);
    let head_positions = |(head, targets): (usize, &TargetTokens)| {
        let teachers = targets.positions.iter().filter(|_| rule.soft).map(|t| t + head as i64 + 1);
        targets.positions.iter().copied().chain(teachers).collect::<Vec<_>>()
    };
    let positions: BTreeSet<i64> = targets.by_level.iter().enumerate().flat_map(head_positions).collect();
    positions.into_iter().map(|t| t as usize).collect()
}

#[test]
fn the_file_holds_the_positions_that_eight_heads_read_and_a_checksum_a_sequence() {
    let (from, backbone) = backbone(Kind::BFloat16);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let mut sizes = vec![];
    for rule in [LABELS, SOFT, EVERYWHERE, WHOLE_ROWS] {
        let kept = opened(folder.path(), &from, &backbone, &sequences, rule).unwrap();
        let every = |sequence: &PackedSequence| (0..sequence.input_ids.len()).collect();
        let eight = TargetRule { reads: Reads { levels: 8, ..rule.reads }, ..rule };
        let read_by_rule =
            |sequence| if rule == WHOLE_ROWS { every(sequence) } else { read_positions(sequence, eight) };
        let read: Vec<Vec<usize>> = sequences.iter().map(read_by_rule).collect();
        for (sequence, read) in sequences.iter().zip(&read) {
            assert_eq!(&positions_in(sequence, rule.for_cache()), read, "{rule:?}");
            let run_positions = if rule == WHOLE_ROWS { vec![] } else { read_positions(sequence, rule) };
            assert!(rule == WHOLE_ROWS || positions_in(sequence, rule) == run_positions, "{rule:?}");
            assert!(run_positions.iter().all(|position| read.contains(position)), "{rule:?}");
        }
        let positions = read.concat().len();
        let expected = (positions * 16 * 2 + 4 * 2 * sequences.len()) as u64; // rows of bfloat16, and four bytes for each data row
        assert_eq!(fs::metadata(kept.path()).unwrap().len(), expected);
        let bytes = file_bytes(&in_memory(&sequences), rule, backbone.config.hidden_size, backbone.kind());
        assert_eq!(bytes.unwrap(), expected);
        sizes.push(positions);
    }
    assert!(sizes.is_sorted_by(|a, b| a < b), "{sizes:?}");
}

#[test]
fn runs_with_up_to_eight_heads_share_a_file() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let rule = |levels| TargetRule { reads: reads(levels), ..LABELS };
    let path = |num_heads| {
        let kept = opened(folder.path(), &from, &backbone, &sequences, rule(num_heads)).unwrap();
        kept.path().to_owned()
    };
    assert_eq!([2, 5, 8].map(path), [1, 1, 1].map(path));
    assert_ne!(path(9), path(8));
    let loader = Loader::new(in_memory(&sequences), 1, 1, None);
    let mut five = opened(folder.path(), &from, &backbone, &sequences, rule(5)).unwrap();
    assert_eq!(epoch(&mut five, &loader, 0), 7);
    five.commit().unwrap();
    let mut two = opened(folder.path(), &from, &backbone, &sequences, rule(2)).unwrap();
    assert_eq!(epoch(&mut two, &loader, 0), 0);
}

#[test]
fn another_thread_reads_what_the_run_stored() {
    let (from, backbone) = backbone(Kind::BFloat16);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    let batch = &Loader::new(in_memory(&sequences), 2, 1, None).step(0).unwrap()[0];
    let (reader, row_ids) = (kept.reader(), batch.row_ids.concat());
    assert!(reader.read(&row_ids).is_none(), "nothing is stored");
    let stored_nh = of(&mut kept, batch);
    let ahead = std::thread::spawn(move || reader.read(&row_ids)).join().unwrap();
    let kept_m = Tensor::from_slice(&StatesReader::Kept(kept.reader()).positions(batch));
    let never = || -> Tensor { panic!("the states were read ahead") };
    let hidden_mh = kept.of(batch, &kept_m, ahead, never).unwrap();
    assert_eq!(at_every_position(&hidden_mh, &kept_m, batch.input_ids.len() as i64), stored_nh);
}

#[test]
fn a_disk_without_space_for_the_file_is_reported_and_left_as_it_was() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let settings =
        CacheSettings { folder: folder.path(), backbone_folder: from.path(), rule: LABELS, reserved_bytes: 1 << 60 };
    let full = || StatesPlace::new(&settings, &backbone, &in_memory(&sequences))?.open(&backbone, 0);
    let error = full().unwrap_err();
    assert!(error.is_full_disk(), "{error}");
    assert!(error.to_string().contains("1099511627776.0 MiB are left to checkpoints"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let beside_another =
        StatesPlace::new(&CacheSettings { reserved_bytes: 0, ..settings }, &backbone, &in_memory(&sequences));
    assert!(beside_another.unwrap().open(&backbone, 1 << 60).unwrap_err().is_full_disk());
    // A file that has some rows is read on.
    let loader = Loader::new(in_memory(&sequences), 1, 1, None);
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    let _ = of(&mut kept, &loader.step(0).unwrap()[0]);
    kept.commit().unwrap();
    drop(kept);
    let mut kept = full().unwrap();
    assert!(kept.take_notice().is_some() && kept.take_notice().is_none());
    assert_eq!((kept.filled(), epoch(&mut kept, &loader, 0), epoch(&mut kept, &loader, 1)), (2, 6, 6));
}

#[test]
fn a_disk_that_becomes_full_keeps_what_it_has_and_computes_the_rest() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let loader = Loader::new(in_memory(&sequences), 1, 1, None);
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    for at in 0..3 {
        let _ = of(&mut kept, &loader.step(at).unwrap()[0]);
    }
    kept.reserved_bytes = 1 << 60;
    assert_eq!((epoch(&mut kept, &loader, 1), kept.filled()), (4, 6));
    assert!(kept.take_notice().is_some());
    // A batch of stored rows and others.
    let pairs = Loader::new(in_memory(&sequences), 2, 1, None);
    assert_eq!(epoch(&mut kept, &pairs, 0), 3);
    kept.commit().unwrap();
    drop(kept);
    assert_eq!(open(folder.path(), &from, &backbone, &sequences).filled(), 6);
}

#[test]
fn whatever_decides_a_state_decides_the_file() {
    let (from, float) = backbone(Kind::Float);
    let (_, half) = backbone(Kind::BFloat16);
    let folder = tempfile::tempdir().unwrap();
    let name = |backbone: &Llama, sequences: &[PackedSequence], rule| {
        opened(folder.path(), &from, backbone, sequences, rule).unwrap().path().to_owned()
    };
    let mut names = vec![name(&float, &sequences(), LABELS), name(&half, &sequences(), LABELS)];
    for rule in [TargetRule { reads: reads(9), ..LABELS }, SOFT, EVERYWHERE, WHOLE_ROWS] {
        names.push(name(&float, &sequences(), rule));
    }
    let changes: [fn(&mut PackedSequence); 3] =
        [|s| s.input_ids[0] += 1, |s| s.labels[2] = IGNORE, |s| s.segment_lengths = vec![2, s.input_ids.len() - 2]];
    for change in changes {
        let mut other = sequences();
        change(&mut other[0]);
        names.push(name(&float, &other, LABELS));
    }
    let weights = File::options().append(true).open(from.path().join("model.safetensors")).unwrap();
    weights.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1))).unwrap();
    names.push(name(&float, &sequences(), LABELS));
    (&weights).write_all(b"!").unwrap();
    names.push(name(&float, &sequences(), LABELS));
    write_atomic(&from.path().join("training_args.bin"), |out| out.write_all(b"not read")).unwrap();
    let distinct: BTreeSet<_> = names.iter().collect();
    assert_eq!(distinct.len(), names.len(), "{names:?}");
    assert_eq!(name(&float, &sequences(), LABELS), names[10]);
}

#[test]
fn two_runs_never_fill_one_file() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let mut first = open(folder.path(), &from, &backbone, &sequences);
    let second = |rule| opened(folder.path(), &from, &backbone, &sequences, rule).map(drop);
    let error = second(LABELS).unwrap_err();
    assert!(error.to_string().contains("is in use by another run"), "{error}");
    second(SOFT).unwrap(); // a different file
    epoch(&mut first, &Loader::new(in_memory(&sequences), 1, 1, None), 0);
    assert!(second(LABELS).is_err(), "not on the disk yet");
    first.commit().unwrap();
    second(LABELS).unwrap();
    drop(first);
    second(LABELS).unwrap();
}

#[test]
fn a_file_of_another_size_is_refused() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let path = open(folder.path(), &from, &backbone, &sequences).path().to_owned();
    let bytes = fs::metadata(&path).unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(bytes - 1).unwrap();
    let error = opened(folder.path(), &from, &backbone, &sequences, LABELS).unwrap_err();
    let expected = format!("has {} bytes, expected {bytes}", bytes - 1);
    assert!(error.to_string().contains(&expected), "{error}");
}

/// Makes batches for heads of [`LABELS`].
fn maker(reader: Option<StatesReader>) -> BatchMaker {
    let shape = HeadsShape { medusa_num_heads: NUM_HEADS, hidden_size: 16, vocab_size: 40, ..HeadsShape::default() };
    let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
    BatchMaker::new(&LossConfig::default(), &heads, &Stages::one(Device::Cpu), true, reader)
}

#[test]
fn batches_that_nobody_takes_end_the_threads_that_make_and_read_them() {
    let (from, backbone) = backbone(Kind::Float);
    let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
    let mut kept = open(folder.path(), &from, &backbone, &sequences);
    let loader = Loader::new(in_memory(&sequences), 1, 2, None);
    epoch(&mut kept, &loader, 0);
    for taken in 0..3 {
        let groups = (0..loader.steps_per_epoch()).map(|step| Ok::<_, TorchPanic>(loader.step(step).unwrap()));
        thread::scope(|scope| {
            for group in maker(Some(StatesReader::Kept(kept.reader()))).feed(scope, groups).take(taken) {
                let first = &group.unwrap()[0]; // the states of the second are not taken
                let ahead = first.on_device().read_ahead().expect("no error").expect("all rows are stored").on_device();
                let positions = Tensor::from_slice(&StatesReader::Kept(kept.reader()).positions(&first.batch));
                assert_eq!(ahead, computed(&backbone, &first.batch).index_select(0, &positions));
            }
        }); // waits for the threads
    }
}

/// An error of a reader of rows.
#[derive(Debug, PartialEq)]
struct Unreadable;

impl From<TorchPanic> for Unreadable {
    fn from(panic: TorchPanic) -> Self {
        panic!("{panic}")
    }
}

#[test]
fn an_error_comes_in_the_place_of_its_group() {
    let loader = Loader::new(in_memory(&sequences()), 2, 1, None);
    let groups = (0..3).map(|step| if step == 1 { Err(Unreadable) } else { Ok(loader.step(step).unwrap()) });
    let taken: Vec<_> = thread::scope(|scope| {
        let ids = |group: Vec<_>| group.iter().map(|fed: &FedBatch| fed.batch.row_ids.concat()).collect();
        maker(None).feed(scope, groups).map(|group| group.map(ids)).collect()
    });
    let ids = |step| loader.step(step).unwrap().iter().map(|batch| batch.row_ids.concat()).collect::<Vec<_>>();
    assert_eq!(taken, [Ok(ids(0)), Err(Unreadable), Ok(ids(2))]);
}

/// A field of [`LayerKinds`](crate::model::block_spec::LayerKinds) was renamed, and every cache of hidden states had to be computed again.
#[test]
fn the_keys_of_caches_do_not_depend_on_the_names_of_fields() {
    let config = LlamaConfig::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")).unwrap();
    let facts = layer_facts(&config.block().layers, config.num_hidden_layers);
    let expected = "LayerKinds { kinds: [LayerKind { window: None, rotary: Some(RotarySpec { size: 32, theta: 10000.0, \
                    scaling: Default, context: 512 }) }], of_layer: [0, 0, 0, 0] }";
    assert_eq!(facts, expected);
}
