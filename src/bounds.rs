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

    /// Bytes of a text that is tokenised, or of a conversation that is rendered: more tokens than any context. A byte takes some
    /// hundred bytes of memory while it is tokenised.
    TEXT_BYTES: usize = 4 << 20;
    /// Of plain text: a document ends with the line that makes it longer.
    DOCUMENT_BYTES: usize = 2 << 20;
    /// How many times as long a tokenizer's rules may make a text. Of those that may make it more than four times as long, shorter texts are
    /// taken. Also the most bytes or tokens that they may add to every text.
    TOKENIZER_GROWTH: usize = 256;

    /// Bytes of a chat template; the longest ones in use have some 30 KiB.
    TEMPLATE_BYTES: usize = 1 << 20;
    /// Steps that a rendering of a chat template may take: a thousand turns of a long template take some 100,000.
    TEMPLATE_STEPS: u64 = 10_000_000;
    /// Bytes that a chat template may write of one conversation.
    TEMPLATE_OUTPUT_BYTES: usize = 64 << 20;

    /// Bytes of the header of a page in a Parquet file. Two texts of the page may stand in it.
    PARQUET_PAGE_HEADER_BYTES: u64 = 16 << 20;
    /// Bytes that the columns of a block of an Arrow file have when they are unpacked. A column of strings has at most twice as many.
    ARROW_BLOCK_BYTES: i64 = 1 << 30;
    /// Rows of a block of an Arrow file: as many as 32-bit offsets reach.
    ARROW_BLOCK_ROWS: i64 = i32::MAX as i64;

    /// Bytes of a JSON file of a model or a data set other than tokenizer.json: the longest index of weights has 9 MB.
    JSON_FILE_BYTES: u64 = 16 << 20;

    /// Metadata keys of a GGUF file, and its tensors.
    GGUF_ENTRIES: u64 = 1 << 16;
    /// Bytes of the name of a key or a tensor of a GGUF file.
    GGUF_NAME_BYTES: u64 = 1 << 10;
    /// Bytes of a text among the metadata of a GGUF file.
    GGUF_TEXT_BYTES: u64 = 4 << 20;
    /// Elements of an array among the metadata of a GGUF file.
    GGUF_ELEMENTS: u64 = 1 << 22;
    /// Shards of a GGUF file.
    GGUF_SHARDS: u64 = 1 << 10;

    /// `hidden_size`, `intermediate_size` and `vocab_size` of a backbone: far above every published one, and small enough that weights can be
    /// counted in 64 bits.
    BACKBONE_SIZE: i64 = 1 << 24;
    BACKBONE_LAYERS: i64 = 1 << 10;
    /// Attention heads of a backbone, and numbers of a head.
    BACKBONE_HEADS: i64 = 1 << 12;
    /// `medusa_num_heads`.
    MEDUSA_HEADS: usize = 128;
    /// `medusa_num_layers`.
    MEDUSA_LAYERS: usize = 128;
    /// `train.micro_batch_size`.
    BATCH_ROWS: usize = 1 << 20;
    /// Nodes of a tree. One verification pass computes all of them, and gains vanish long before this.
    TREE_NODES: usize = 1024;
    /// Axes of a tensor in a pickle. A shape may be used by many tensors: without a bound, a short file would claim much memory.
    PICKLE_AXES: usize = 8;

    /// Pages of a list of the Hub's files. A page has a thousand, and the Hub advises against more than a hundred thousand in a repository.
    LIST_PAGES: usize = 1000;
    /// Bytes of a JSON answer of the Hub or of a server; a page of the Hub lists a thousand files.
    RESPONSE_BYTES: u64 = 64 << 20;
    /// Bytes of all answers of a server that are read at the same time.
    ANSWERS_BYTES: u64 = 256 << 20;
    /// Bytes of an answer beside those of its tokens.
    ANSWER_BYTES: u64 = 256 << 10;
    /// Bytes of an answer for each of its tokens and each of the prompt's.
    ANSWER_TOKEN_BYTES: u64 = 1 << 10;
    /// Bytes that are read of an answer with an error.
    ERROR_RESPONSE_BYTES: u64 = 16 << 10;
    /// Characters of a server's or a template's message that an error quotes.
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
