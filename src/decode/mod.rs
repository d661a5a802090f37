//! The decoding loops: plain (the oracle) and Medusa, batch 1, on any device of libtorch.
