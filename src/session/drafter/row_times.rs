//! Measures once how long steps take by their tokens on this machine, and sizes the drafters without weights by that.

use std::path::PathBuf;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tch::Device;

use super::loaded::LoadedDrafter;
use super::sizes::{most_guesses, window_tokens};
use crate::cpu::team::Team;
use crate::decode::host_loop::HostLoop;
use crate::dtype::Dtype;
use crate::engine::Engine;
use crate::files::{self, user_cache};
use crate::formats::latency::Latency;
use crate::hub;
use crate::latency::busy_cores::{CoreWatch, cores, disturb};
use crate::latency::processors::processors;
use crate::latency::{self, ROWS_CONTEXT, Times};
use crate::plural::counted;
use crate::session::decoder::Decoder;
use crate::session::error::SessionError;
use crate::session::opened::OpenedBackbone;
use crate::session::reporter::Reporter;
use crate::torch::device_name;
use crate::tree::accept::Acceptance;
use crate::tree::row_times::RowTimes;

/// Makes the engine that decodes one text.
pub type EngineOfDecoder<'n> = dyn for<'a> Fn(&'a Decoder) -> Result<Box<dyn Engine + 'a>, SessionError> + 'n;

/// Gives the step times of this machine to the drafters with a part without weights, if they have no number of nodes.
///
/// # Errors
/// A backbone that cannot decode.
pub fn set_row_times(
    (engine_flag, new_engine): (String, &EngineOfDecoder<'_>),
    decoder: &mut Decoder,
    backbone: &OpenedBackbone,
    reporter: &dyn Reporter,
) -> Result<(), SessionError> {
    let is_sized = |drafter: &LoadedDrafter| drafter.nodes.is_none() && drafter.spec.is_sized_by_times();
    let room = usize::try_from(decoder.backbone.config.max_position_embeddings)?;
    // Too short a context to time a step in, and to gain time in.
    if room < 2 * ROWS_CONTEXT || !decoder.drafters.iter().any(is_sized) {
        return Ok(());
    }
    let conditions = conditions(engine_flag, decoder, backbone)?;
    let latency = found_or_measured(conditions, new_engine, decoder, reporter)?;
    let times = Arc::new(RowTimes::of(&latency));
    for drafter in decoder.drafters.iter_mut().filter(|drafter| is_sized(drafter)) {
        drafter.row_times = Some(times.clone());
        reporter.notice(&in_words(drafter, &times));
    }
    Ok(())
}

/// The times of an earlier run on this machine, else those of now, which later runs find.
fn found_or_measured(
    conditions: Latency,
    new_engine: &EngineOfDecoder<'_>,
    decoder: &Decoder,
    reporter: &dyn Reporter,
) -> Result<Latency, SessionError> {
    let cached = cache_file(&conditions);
    if let Some(path) = cached.as_ref().filter(|path| path.exists()) {
        match Latency::load(path) {
            Ok(latency) => return Ok(latency),
            Err(error) => {
                reporter.notice(&format_args!("the cached step times cannot be used and are measured again: {error}"))
            }
        }
    }
    let on_cpu = decoder.backbone.device() == Device::Cpu;
    let watch = CoreWatch::start().filter(|_| on_cpu);
    let times = latency::measure_rows(&decoder.backbone, |drafter| {
        let drafter = Some((drafter, Acceptance::Greedy));
        Ok::<_, SessionError>(Box::new(HostLoop::new(new_engine(decoder)?, drafter)) as Box<_>)
    });
    let Times { engine, plain_step_ms, steps, .. } = times.map_err(|why| SessionError::StepTimes(why.into()))?;
    let busy_cores = watch.and_then(|watch| watch.others());
    let busy_cores = busy_cores.filter(|&busy| disturb(busy, Team::shared().size(), cores()));
    let latency = Latency { engine: engine.to_owned(), plain_step_ms, steps, busy_cores, ..conditions };
    // Times of a busy machine hold for this run only.
    if let Some(path) = cached.filter(|_| busy_cores.is_none())
        && let Err(error) = latency.save(&path)
    {
        reporter.notice(&format_args!("{error}; the next run measures step times anew"));
    }
    Ok(latency)
}

/// What the times depend on, without times.
fn conditions(engine_flag: String, decoder: &Decoder, opened: &OpenedBackbone) -> Result<Latency, SessionError> {
    let backbone = &decoder.backbone;
    Ok(Latency {
        device: device_name(backbone.device()),
        engine: String::new(),
        engine_flag,
        dtype: Dtype::of(backbone.kind()),
        quantization: backbone.quantization().map(|quantization| quantization.to_string()),
        threads: Team::shared().size(),
        context: ROWS_CONTEXT,
        backbone: hub::name_of(&opened.folder),
        backbone_sha256: Some(latency::backbone_sha256(&opened.folder, &opened.config)?),
        heads_sha256: None,
        busy_cores: None,
        slowdown: None,
        plain_step_ms: 0.0,
        steps: vec![],
        by_sequences: vec![],
    })
}

/// The file of these conditions on this processor or GPU with this version; `None` for a user without a home.
fn cache_file(conditions: &Latency) -> Option<PathBuf> {
    let any_path = Latency { backbone: String::new(), ..conditions.clone() };
    let key = (env!("CARGO_PKG_VERSION"), env!("MEDUSA_GIT_REVISION"), processors(), any_path);
    let hash = files::hex(&Sha256::digest(serde_json::to_vec(&key).expect("texts and numbers are JSON")));
    Some(user_cache()?.join("latency").join(format!("{}.json", &hash[..32])))
}

/// How a drafter is sized, and why.
fn in_words(drafter: &LoadedDrafter, times: &RowTimes) -> String {
    let parts = drafter.spec.parts().iter().map(|part| part.name);
    let part_sizes = parts.map(|name| (most_guesses(name, times), window_tokens(name, times)));
    let (most, window) = part_sizes.max().unwrap_or_default();
    let (spec, rows) = (&drafter.spec, 1 + most.max(1) + window);
    let longer = times.ms(rows) / times.ms(1);
    let tree = match most {
        _ if !spec.is_without_weights() => "as many guesses as are worth their time".to_owned(),
        0 => "no guesses".to_owned(),
        _ => format!("a tree of at most {}", counted(most, "node")),
    };
    format!(
        "--drafter {spec}: {tree}, because on this machine a step of {rows} tokens takes {longer:.2} times as long as one of 1 token \
         ({:.1} ms)",
        times.ms(1)
    )
}
