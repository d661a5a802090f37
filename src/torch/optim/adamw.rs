//! AdamW (Loshchilov & Hutter, 2019).
