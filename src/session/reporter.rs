//! Who hears what a session chooses while it is opened, and what takes long.

use std::any::Any;
use std::fmt::Display;

use crate::dtype::{DraftDtype, Dtype};
use crate::torch::DeviceChoice;

/// Hears of choices and of work that takes long; the command line prints them to stderr.
pub trait Reporter {
    /// A line about something that was chosen, or that makes results worse than they could be.
    fn notice(&self, line: &dyn Display);

    /// Work that takes long begins; it ends when the returned value is dropped.
    fn begin(&self, work: String) -> Box<dyn Any>;
}

/// Ignores all notices.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Reporter for Silent {
    fn notice(&self, _: &dyn Display) {}

    fn begin(&self, _: String) -> Box<dyn Any> {
        Box::new(())
    }
}

/// Where a session computes, in which dtype, and who hears of it.
#[derive(Clone, Copy)]
pub struct LoadContext<'r> {
    pub device: DeviceChoice,
    /// By default that of the backbone's weights; on a CPU never float16.
    pub dtype: Option<Dtype>,
    /// Of drafters, on the CPU's kernels.
    pub draft_dtype: DraftDtype,
    pub reporter: &'r dyn Reporter,
}

impl LoadContext<'_> {
    /// The same without notices.
    #[must_use]
    pub fn silent(self) -> LoadContext<'static> {
        LoadContext { device: self.device, dtype: self.dtype, draft_dtype: self.draft_dtype, reporter: &Silent }
    }
}
