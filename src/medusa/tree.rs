//! The sparse tree of candidates (paper section 2.1.2). No tensors here.
