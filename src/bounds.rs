//! Bounds of input that somebody else may have written: files, texts, templates, requests and answers. What lies beyond one ends as
//! one error that names the file and the bound, before it takes memory or time. docs/limits.md says what each does (checked by
//! `tests/limits.rs`).

/// Constants, and [`ALL`] of them by name.
macro_rules! bounds {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $kind = $value;)*

        /// Every bound with its name.
        pub const ALL: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),*];
    };
}

bounds! {
    /// Bytes of a row of data: a longer one means that a newline or a quote is missing.
    ROW_BYTES: usize = 100 << 20;

    /// Steps that a rendering of a chat template may take: a thousand turns of a long template take some 100,000.
    TEMPLATE_STEPS: u64 = 10_000_000;
    /// Columns that a chat template may indent or pad by.
    TEMPLATE_WIDTH: usize = 1000;

    /// Nodes of a tree. One verification pass computes all of them, and gains vanish long before this.
    TREE_NODES: usize = 1024;
    /// Axes of a tensor in a pickle. A shape may be used by many tensors: without a bound, a short file would claim much memory.
    PICKLE_AXES: usize = 8;

    /// Bytes of a JSON answer of the Hub or of a server; a page of the Hub lists a thousand files.
    RESPONSE_BYTES: u64 = 64 << 20;
    /// Bytes that are read of an answer with an error.
    ERROR_RESPONSE_BYTES: u64 = 16 << 10;
    /// Characters of a server's message that an error quotes.
    QUOTED_CHARACTERS: usize = 300;
    /// Bytes of a streamed answer; a chunk of one token has some 300.
    STREAM_BYTES: u64 = 256 << 20;

    /// Bytes of a request's line and headers.
    REQUEST_HEADER_BYTES: usize = 64 << 10;
    /// Answers to one prompt of a request.
    REQUEST_SAMPLES: usize = 16;
    /// Answers to all prompts of a request.
    REQUEST_TEXTS: usize = 128;
    /// Stop strings of a request.
    REQUEST_STOPS: usize = 16;
    /// Bytes of a stop string. Each text holds its stop strings, and looks for them at each step.
    REQUEST_STOP_BYTES: usize = 1000;
    /// Most probable tokens that a request may ask for at a place.
    REQUEST_LOGPROBS: usize = 20;
    /// New tokens that a request may ask for: more than any context; a sum with a prompt's length cannot overflow.
    REQUEST_TOKENS: usize = 1 << 31;
}
