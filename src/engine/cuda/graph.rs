//! Steps recorded once as CUDA graphs: a step is some hundred kernels, and one call to replay them.

use std::fmt;

use cudarc::driver::{CudaGraph, sys};

use super::error::CudaError;
use super::step::Rule;
use crate::nvidia::device::{Gpu, NoGpu};

/// Steps that are kept: requests of one temperature after the other have steps of their own.
const MOST: usize = 8;

/// What makes one step another than the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key {
    /// Nodes of a tree, or one node.
    pub has_tree: bool,
    /// What follows them, too.
    pub then_tree: bool,
    /// Its numbers are written into the kernels' arguments.
    pub rule: Rule,
}

/// The steps that were run, and their graphs.
#[derive(Default)]
pub struct Graphs {
    /// Without a graph: run once, kernel by kernel, so that everything that is made on first use is there.
    steps: Vec<(Key, Option<CudaGraph>)>,
}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.steps.iter().map(|(key, graph)| (key, graph.is_some()))).finish()
    }
}

impl Graphs {
    /// Runs a step: the first time as it is, the second time while it is recorded, from then on from the record.
    ///
    /// # Errors
    /// What the device says.
    pub fn run(&mut self, gpu: &Gpu, key: Key, step: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
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
        Ok(graph.launch().map_err(NoGpu::failed("a step"))?)
    }

    /// Addresses have changed: everything is to be recorded again.
    pub fn forget(&mut self) {
        self.steps.iter_mut().for_each(|(_, graph)| *graph = None);
    }
}

/// The kernels that `step` asks for, not run.
///
/// # Errors
/// What the device says.
pub(super) fn record(gpu: &Gpu, step: impl FnOnce() -> Result<(), CudaError>) -> Result<CudaGraph, CudaError> {
    let failed = || NoGpu::failed("recording a step");
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed())?;
    let asked = step();
    let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)); // ends it also where a kernel was refused
    asked?;
    let none = || NoGpu::Failed { work: "recording a step", reason: "nothing was recorded".into() };
    Ok(graph.map_err(failed())?.ok_or_else(none)?)
}
