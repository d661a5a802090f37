//! Greedy search of the sparse tree with the largest expected acceptance length (paper section 2.3.3). No tensors here.
