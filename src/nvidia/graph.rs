//! CUDA graphs: a decoding step of a few hundred kernels is captured once and replayed by one call.

use std::fmt;

use cudarc::driver::{CudaGraph, sys};

use super::device::Gpu;
use super::error::GpuError;

/// Number of graphs kept: requests with different temperatures need different graphs.
const MOST: usize = 8;

/// CUDA graphs by key: steps with equal keys launch the same kernels with the same arguments.
pub struct GraphCache<K> {
    /// `None`: the step ran once, kernel by kernel, so that everything that is created on first use exists.
    steps: Vec<(K, Option<CudaGraph>)>,
}

impl<K> Default for GraphCache<K> {
    fn default() -> Self {
        Self { steps: vec![] }
    }
}

impl<K: fmt::Debug> fmt::Debug for GraphCache<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.steps.iter().map(|(key, graph)| (key, graph.is_some()))).finish()
    }
}

impl<K: PartialEq> GraphCache<K> {
    /// Runs a step: kernel by kernel the first time; the second time it is captured, and from then on its graph is replayed.
    ///
    /// # Errors
    /// An error of the step or of the device.
    pub fn run<E: From<GpuError>>(&mut self, gpu: &Gpu, key: K, step: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let known = self.steps.iter().position(|(other, _)| *other == key);
        let Some(at) = known else {
            step()?;
            self.steps.push((key, None));
            if self.steps.len() > MOST {
                self.steps.remove(0);
            }
            return Ok(());
        };
        if self.steps[at].1.is_none() {
            self.steps[at].1 = Some(record(gpu, step)?);
        }
        let graph = self.steps[at].1.as_ref().expect("just recorded");
        Ok(graph.launch().map_err(GpuError::failed("a step"))?)
    }

    /// Drops all graphs, because addresses have changed; steps are captured again.
    pub fn forget(&mut self) {
        self.steps.iter_mut().for_each(|(_, graph)| *graph = None);
    }
}

/// Captures the kernels that `step` launches, without running them.
///
/// # Errors
/// An error of the step or of the device.
pub(super) fn record<E: From<GpuError>>(gpu: &Gpu, step: impl FnOnce() -> Result<(), E>) -> Result<CudaGraph, E> {
    let failed = || GpuError::failed("recording a step");
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed())?;
    let asked = step();
    let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)); // ends the capture even if a launch failed
    asked?;
    let none = || GpuError::Failed { work: "recording a step", reason: "nothing was recorded".into() };
    Ok(graph.map_err(failed())?.ok_or_else(none)?)
}
