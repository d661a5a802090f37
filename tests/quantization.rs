//! Fewer bits are those of bitsandbytes, code by code; they cost what is said here, and a run with them is a run like any other.

use std::path::{Path, PathBuf};

use medusa::torch::optim::blockwise::{Blockwise, DynamicMap};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use super::small_run::SmallRun;

fn shared(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(name)
}

/// What bitsandbytes 0.50.2 made on the CPU.
struct Reference(Vec<u8>);

impl Reference {
    fn open() -> Self {
        Self(std::fs::read(shared("reference/quantization.safetensors")).expect("the reference"))
    }

    fn tensor(&self, name: &str) -> Tensor {
        let tensors = SafeTensors::deserialize(&self.0).expect("a whole file");
        let view = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let shape: Vec<i64> = view.shape().iter().map(|&d| i64::try_from(d).expect("a number in range")).collect();
        let kind = match view.dtype() {
            safetensors::Dtype::F32 => Kind::Float,
            safetensors::Dtype::BF16 => Kind::BFloat16,
            safetensors::Dtype::F16 => Kind::Half,
            safetensors::Dtype::U8 => Kind::Uint8,
            other => panic!("{name}: a reference of dtype {other:?}"),
        };
        Tensor::from_data_size(view.data(), &shape, kind)
    }
}

/// Every element equal, or a text that says how many are not, and the first.
fn assert_equal(what: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!((got.size(), got.kind()), (expected.size(), expected.kind()), "{what}");
    let different = got.ne_tensor(expected).nonzero();
    if different.size()[0] == 0 {
        return;
    }
    let first = Vec::<i64>::try_from(different.get(0)).expect("a place");
    panic!(
        "{what}: {} of {} differ, first at {first:?}: got {}, expected {}",
        different.size()[0],
        got.numel(),
        got.double_value(&first),
        expected.double_value(&first)
    );
}

#[test]
#[cfg_attr(not(shared), ignore = "needs ../shared")]
fn blockwise_states_equal_those_of_bitsandbytes() {
    let reference = Reference::open();
    for (name, map) in
        [("blockwise", DynamicMap::signed(Device::Cpu)), ("blockwise_u", DynamicMap::unsigned(Device::Cpu))]
    {
        let expected = |part: &str| reference.tensor(&format!("{name}.{part}"));
        assert_equal(&format!("{name}.code"), map.codes(), &expected("code"));
        let quantized = Blockwise::quantize(&expected("x"), &map);
        assert_equal(&format!("{name}.absmax"), quantized.absmax(), &expected("absmax"));
        assert_equal(&format!("{name}.q"), quantized.codes(), &expected("q"));
        assert_equal(&format!("{name}.dequant"), &quantized.dequantize(), &expected("dequant"));
    }
}

/// A run whose larger tensors, `[48, 96]`, have moments of 8 bits.
fn run_with_8_bit_moments() -> SmallRun {
    let small = SmallRun::with_hidden_size(96);
    small.edit("recipe.toml", "learning_rate", "name = \"adamw8bit\"\nlearning_rate");
    small
}

/// Of the last three steps, and of the first.
fn losses(small: &SmallRun, run: &str) -> (f64, f64) {
    let lines = small.read(&format!("{run}/metrics.jsonl"));
    let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let losses: Vec<f64> =
        lines.filter(|line| line["split"] == "train").map(|line| line["loss"].as_f64().expect("a loss")).collect();
    (losses.iter().rev().take(3).sum::<f64>() / 3.0, losses[0])
}

#[test]
fn a_run_with_8_bit_moments_learns_as_one_of_32_and_goes_on_to_the_same_heads() {
    let small = SmallRun::with_hidden_size(96);
    small.train(&[]).succeeded();
    let (of_32_bits, _) = losses(&small, "run");
    let small = run_with_8_bit_moments();
    small.train(&[]).succeeded();
    let (of_8_bits, first) = losses(&small, "run");
    // Seen: from 5.600 to 1.638 with 32 bits, to 1.679 with 8.
    assert!((of_8_bits - of_32_bits).abs() < 0.03 * (first - of_32_bits), "{first} to {of_32_bits}, {of_8_bits}");
    let finished = small.bytes("run/final/heads.safetensors");
    for later in ["final", "step-000024"] {
        std::fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder");
    }
    let saved = small.bytes("run/step-000021/optimizer.safetensors");
    let names = SafeTensors::deserialize(&saved).expect("a whole file");
    assert!(names.names().contains(&"0.1.weight.exp_avg_sq.codes"), "{:?}", names.names());
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == finished, "heads differ after resuming");
}

#[test]
fn a_state_of_the_other_optimizer_is_refused() {
    for (saved, other) in [("adamw", "adamw8bit"), ("adamw8bit", "adamw")] {
        let small = run_with_8_bit_moments();
        small.edit("recipe.toml", "\"adamw8bit\"", &format!("{saved:?}"));
        small.train(&[]).succeeded();
        std::fs::remove_dir_all(small.path("run/final")).expect("a folder");
        let (before, after) = (format!("name = {saved:?}"), format!("name = {other:?}"));
        small.edit("recipe.toml", &before, &after);
        small.train(&["--resume"]).failed(1, &["holds another run", &before, &after]);
        // Whoever changes the run's own recipe, too, meets the checkpoint.
        small.edit("run/recipe.toml", &before, &after);
        small.train(&["--resume"]).failed(
            1,
            &[
                "run/step-000024 was saved with optimizer.name",
                &format!("{saved:?}, this run has {other:?}"),
                "go on with",
            ],
        );
    }
}
