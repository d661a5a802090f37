//! `medusa export`: trained heads in other programs' layouts.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::downloads::{self, HubArgument};
use super::numbers::above_zero;
use super::progress::Progress;
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::export::eagle::{self, EagleFormat, EagleRequest};
use crate::export::gguf::{self, GgufRequest, GgufType};
use crate::export::{self, ExportError, ExportFormat, ExportRequest, Exported};
use crate::files::checksums;
use crate::gguf::file::is_gguf;
use crate::hub::{self, Wanted};
use crate::plural::counted;

const EXAMPLE: &str = "Example:\n  medusa export --heads checkpoints/first --format vllm --out first-vllm";

/// Export heads or merged models in other programs' layouts, with a model card.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub struct ExportArgs {
    /// Heads: a run's final/, any supported layout, or a Hub id. With --format gguf they are optional: the adapter that was
    /// trained with them is merged into the backbone.
    #[arg(long, value_name = "PATH")]
    pub heads: Option<PathBuf>,
    /// Layout to write.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Layout,
    /// With --format gguf: how matrices are stored [default: --dtype, else as in the backbone; BF16 for a GGUF file in blocks].
    #[arg(long, value_enum, value_name = "TYPE")]
    pub gguf_type: Option<GgufType>,
    /// Output folder: a new or an empty one.
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// Backbone of the heads [default: the one named in their config.json].
    #[arg(long, value_name = "FOLDER")]
    pub backbone: Option<PathBuf>,
    /// Export only the first K heads.
    #[arg(long, value_name = "K", value_parser = above_zero::<NonZeroUsize>)]
    pub medusa_num_heads: Option<NonZeroUsize>,
    /// Write medusa_lm_head.pt instead of safetensors (formats heads, tensorrt-llm; hydra is always pickled).
    #[arg(long)]
    pub pickle: bool,
    /// Accuracies for the model card [default: the run's calibration.json].
    #[arg(long, help_heading = "Model card", value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Tree to export with the heads [default: the run's tree.json].
    #[arg(long, value_name = "FILE")]
    pub tree: Option<PathBuf>,
    /// Benchmark results for the model card [default: the run's bench.json].
    #[arg(long, help_heading = "Model card", value_name = "FILE")]
    pub bench: Option<PathBuf>,
}

#[derive(Serialize)]
struct Printed<'e> {
    out: &'e PathBuf,
    format: &'static str,
    #[serde(flatten)]
    exported: &'e Exported,
}

/// A layout of heads or of an EAGLE-3 drafter, or llama.cpp's file of a backbone.
#[derive(Debug, Clone, Copy)]
pub enum Layout {
    Heads(ExportFormat),
    Eagle(EagleFormat),
    Gguf,
}

impl ValueEnum for Layout {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Layout>> = LazyLock::new(|| {
            let heads = ExportFormat::value_variants().iter().copied().map(Layout::Heads);
            let eagle = [EagleFormat::Eagle3, EagleFormat::Speculators].map(Layout::Eagle);
            heads.chain(eagle).chain([Layout::Gguf]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Heads(format) => format.to_possible_value(),
            Self::Eagle(format) => Some(PossibleValue::new(format.name()).help(format.help())),
            Self::Gguf => {
                Some(PossibleValue::new("gguf").help("The backbone, adapters merged, without heads, for llama.cpp"))
            }
        }
    }
}

/// Writes the folder, reads it back, and prints its path, or that of the GGUF file in it.
///
/// # Errors
/// A missing file, or parts that do not fit; nothing is left then.
pub fn run(args: &ExportArgs, common: &CommonFlags) -> anyhow::Result<()> {
    match args.format {
        Layout::Heads(format) => heads(args, format, common),
        Layout::Eagle(format) => eagle(args, format, common),
        Layout::Gguf => backbone(args, common),
    }
}

fn heads(args: &ExportArgs, format: ExportFormat, common: &CommonFlags) -> anyhow::Result<()> {
    let name = format.name;
    let given = args.heads.clone();
    let heads =
        given.ok_or_else(|| UsageError(format!("--format {name} needs --heads: the heads that are exported")))?;
    if args.gguf_type.is_some() {
        return Err(UsageError(format!("--gguf-type is for --format gguf; --format {name} has --dtype")).into());
    }
    let mut request = ExportRequest {
        heads,
        backbone: args.backbone.clone(),
        backbone_name: None,
        format,
        out: args.out.clone(),
        dtype: common.dtype,
        medusa_num_heads: args.medusa_num_heads,
        pickle: args.pickle,
        calibration: args.calibration.clone(),
        tree: args.tree.clone(),
        bench: args.bench.clone(),
    };
    bring_backbone(&mut request, common)?;
    let progress = Progress::waiting(format!("writing {}", args.out.display()), common);
    let exported = export::export(&request).map_err(as_usage)?;
    drop(progress);
    exported.notices.iter().for_each(|notice| common.say(notice));
    common.say(checked(&exported));
    match common.json {
        true => print_json(&Printed { out: &args.out, format: name, exported: &exported }),
        false => print_line(args.out.display()),
    }
}

/// Writes an EAGLE-3 drafter.
fn eagle(args: &ExportArgs, format: EagleFormat, common: &CommonFlags) -> anyhow::Result<()> {
    let name = format.name();
    let heads = args
        .heads
        .clone()
        .ok_or_else(|| UsageError(format!("--format {name} needs --heads: the drafter that is exported")))?;
    if args.gguf_type.is_some() {
        return Err(UsageError(format!("--gguf-type is for --format gguf; --format {name} has --dtype")).into());
    }
    refuse(&flags_of_heads(args), &format!("with --format {name}"))?;
    let mut request = EagleRequest {
        heads,
        backbone: args.backbone.clone(),
        backbone_name: None,
        format,
        out: args.out.clone(),
        dtype: common.dtype,
    };
    let mut base = eagle::backbone_needed(&request).map_err(as_usage)?;
    let wanted = if format == EagleFormat::Speculators { Wanted::Backbone } else { Wanted::BackboneWithoutWeights };
    downloads::fetch(vec![HubArgument::Model(&mut base, wanted)], common)?;
    request.backbone_name = hub::origin(&base).map(|snapshot| snapshot.id);
    request.backbone = Some(base);
    let progress = Progress::waiting(format!("writing {}", args.out.display()), common);
    let exported = eagle::export(&request).map_err(as_usage)?;
    drop(progress);
    exported.notices.iter().for_each(|notice| common.say(notice));
    common.say(format!(
        "verified: {} in {}, read back as written",
        counted(exported.tensors, "tensor"),
        exported.dtype
    ));
    match common.json {
        true => print_json(&exported),
        false => print_line(args.out.display()),
    }
}

/// Writes the backbone alone.
fn backbone(args: &ExportArgs, common: &CommonFlags) -> anyhow::Result<()> {
    refuse_flags_of_heads(args, common)?;
    let mut request = GgufRequest {
        backbone: args.backbone.clone(),
        name: None,
        heads: args.heads.clone(),
        out: args.out.clone(),
        kind: args.gguf_type.or(common.dtype.and_then(GgufType::from_dtype)),
    };
    let mut base = gguf::backbone_needed(&request).map_err(as_usage)?;
    if base.is_dir() {
        checksums::verify(&base)?;
    }
    downloads::fetch(vec![HubArgument::Model(&mut base, Wanted::Backbone)], common)?;
    request.name = hub::origin(&base).filter(|_| !is_gguf(&base)).map(|snapshot| snapshot.id);
    request.backbone = Some(base);
    let progress = Progress::waiting(format!("writing {}", args.out.display()), common);
    let exported = gguf::export(&request).map_err(as_usage)?;
    drop(progress);
    exported.notices.iter().for_each(|notice| common.say(notice));
    let tensors = counted(exported.tensors, "tensor");
    common.say(format!("verified: {tensors}, matrices in {}, read back as written", exported.kind));
    match common.json {
        true => print_json(&exported),
        false => print_line(exported.file.display()),
    }
}

/// Flags that say something of heads, of which the file has none.
fn refuse_flags_of_heads(args: &ExportArgs, common: &CommonFlags) -> Result<(), UsageError> {
    if args.gguf_type.is_some() && common.dtype.is_some() {
        return Err(UsageError("--dtype and --gguf-type both say how matrices are stored; remove one".into()));
    }
    refuse(&flags_of_heads(args), "with --format gguf: no heads are in the file")
}

/// Flags for heads alone, and whether they are given.
fn flags_of_heads(args: &ExportArgs) -> [(&'static str, bool); 5] {
    [
        ("--medusa-num-heads", args.medusa_num_heads.is_some()),
        ("--pickle", args.pickle),
        ("--calibration", args.calibration.is_some()),
        ("--tree", args.tree.is_some()),
        ("--bench", args.bench.is_some()),
    ]
}

fn refuse(flags: &[(&'static str, bool)], why: &str) -> Result<(), UsageError> {
    match flags.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(UsageError(format!("{flag} does nothing {why}; remove it"))),
        None => Ok(()),
    }
}

/// Downloads the backbone if `--backbone`, or else the config.json of the heads, is a Hub id: with its weights if the
/// export needs them; otherwise, for `--backbone`, the files that the heads are checked against.
fn bring_backbone(request: &mut ExportRequest, common: &CommonFlags) -> anyhow::Result<()> {
    let needed = export::backbone_needed(request).map_err(as_usage)?;
    let wanted = if needed.is_some() { Wanted::Backbone } else { Wanted::BackboneWithoutWeights };
    if let Some(folder) = request.backbone.as_deref().filter(|folder| folder.is_dir()) {
        checksums::verify(folder)?;
    }
    if let Some(mut base) = needed.or_else(|| request.backbone.clone()) {
        downloads::fetch(vec![HubArgument::Model(&mut base, wanted)], common)?;
        if let Some(origin) = hub::origin(&base) {
            request.backbone_name = Some(origin.id);
            request.backbone = Some(base);
        }
    }
    Ok(())
}

/// An unsupported combination of flags: exit status 2.
fn as_usage(error: ExportError) -> anyhow::Error {
    match error {
        ExportError::NoBackbone { .. }
        | ExportError::TooManyHeads { .. }
        | ExportError::TgiLayers { .. }
        | ExportError::NoAdapter { .. }
        | ExportError::HydraHeads { .. }
        | ExportError::TruncatedVocabulary { .. }
        | ExportError::HydraLayers { .. }
        | ExportError::Pickle { .. } => UsageError(error.to_string()).into(),
        other => other.into(),
    }
}

/// One line about the verification.
fn checked(exported: &Exported) -> String {
    let (shape, difference) = (exported.shape, exported.difference_to_trained);
    let heads = counted(shape.medusa_num_heads, shape.architecture.noun());
    let blocks = counted(shape.medusa_num_layers, "ResBlock");
    let rounding = match difference.largest {
        0.0 => "logits identical to the trained heads'".to_owned(),
        largest => format!("rounding changes logits of up to {:.1e} by at most {largest:.1e}", difference.of),
    };
    format!("verified: {heads} of {blocks} in {}, {rounding}", exported.dtype)
}
