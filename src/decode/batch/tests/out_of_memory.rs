//! What becomes of a batch whose memory runs out, or whose step fails for another reason.

use std::rc::Rc;

use super::*;
use crate::draft::heads::HeadsArchitecture;
use crate::draft::hydra::levels::HydraLevels;
use crate::draft::{Proposal, TextSoFar};
use crate::torch::raise;

/// Fails at some of its calls, and where a text is too long.
#[derive(Debug)]
struct Cramped<'a> {
    engine: TchEngine<'a>,
    calls: Rc<Cell<usize>>,
    fails_at: Vec<usize>,
    /// How it fails at these calls.
    failure: Failure,
    /// More tokens of a row do not fit the memory.
    most_tokens: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    OutOfMemory,
    Broken,
}

impl<'a> Cramped<'a> {
    fn new(llama: &'a Llama, fails_at: &[usize]) -> Self {
        let (engine, calls) = (TchEngine::for_batches(llama), Rc::default());
        Self { engine, calls, fails_at: fails_at.to_vec(), failure: Failure::OutOfMemory, most_tokens: i64::MAX }
    }

    fn call(&self) {
        self.calls.set(self.calls.get() + 1);
        if self.fails_at.contains(&self.calls.get()) {
            match self.failure {
                Failure::OutOfMemory => out_of_memory(),
                Failure::Broken => raise("a kernel failed on the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"),
            }
        }
    }

    fn fit(&self, tokens: i64) {
        if tokens > self.most_tokens {
            out_of_memory();
        }
    }
}

/// As libtorch does.
fn out_of_memory() {
    let _ = Tensor::ones([1 << 55], (Kind::Float, Device::Cpu));
}

impl Engine for Cramped<'_> {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn backbone(&self) -> &Llama {
        self.engine.backbone()
    }

    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        self.call();
        batch.iter().for_each(|new| self.fit(cache.len(new.row) + new.nodes.len()));
        self.engine.extend(cache, tokens_n, batch)
    }

    fn extend_each(&self, cache: &mut KvCache, tokens_b: &Tensor, rows: &[usize], token: &NewTokens) -> Tensor {
        self.call();
        rows.iter().for_each(|&row| self.fit(cache.len(row) + 1));
        self.engine.extend_each(cache, tokens_b, rows, token)
    }

    fn prompt_pass(&self) -> PromptPass {
        self.engine.prompt_pass()
    }

    fn logits(&self, hidden_nh: &Tensor) -> Tensor {
        self.call();
        self.engine.logits(hidden_nh)
    }
}

#[test]
fn memory_that_runs_out_halves_the_batch_and_loses_nothing() {
    let llama = backbone(None, vec![11], 3);
    let wanted: Vec<Wanted> = (0..12).map(|key| Wanted::new(key, 40)).collect();
    for temperature in [0.0, 0.8] {
        let whole = decode(&llama, temperature, 8, &wanted);
        // In passes over prompts and their logits, and in steps and theirs.
        for (fails_at, size) in
            [(&[1][..], 4), (&[2], 4), (&[18, 25], 2), (&[19, 40], 2), (&[5, 30, 61], 1), (&[26, 27], 2)]
        {
            for together in [None, NonZeroUsize::new(30)] {
                let mut engine = Cramped::new(&llama, fails_at);
                engine.engine = together.into_iter().fold(engine.engine, TchEngine::with_prompts_together);
                let mut batch = SequenceBatch::new(Box::new(engine), None, NonZeroUsize::new(8).unwrap());
                assert_eq!(facts(&run(&mut batch, temperature, &wanted)), facts(&whole), "{fails_at:?}, {together:?}");
                assert_eq!(batch.size().get(), size, "{fails_at:?}, {together:?}");
                assert_eq!(batch.tokens(), whole.iter().map(|text| text.new_ids.len() + text.end.len()).sum::<usize>());
            }
        }
    }
}

/// Two texts go before, whose beginnings are kept.
fn with_beginnings<'a>(llama: &'a Llama, fails_at: &[usize], size: usize) -> SequenceBatch<'a> {
    let engine = Box::new(Cramped::new(llama, fails_at));
    let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(size).unwrap()).with_prefix_cache(1 << 30);
    let before: Vec<Wanted> = (0..2).map(|key| Wanted::new(key, 40)).collect();
    run(&mut batch, 0.0, &before);
    assert!(batch.prefix_bytes() > 0);
    batch
}

/// Calls of the engine for the texts of [`with_beginnings`].
fn calls_before(llama: &Llama) -> usize {
    let engine = Cramped::new(llama, &[]);
    let calls = engine.calls.clone();
    let mut batch = SequenceBatch::new(Box::new(engine), None, NonZeroUsize::new(4).unwrap());
    run(&mut batch, 0.0, &(0..2).map(|key| Wanted::new(key, 40)).collect::<Vec<_>>());
    calls.get()
}

#[test]
fn beginnings_of_earlier_texts_go_before_the_batch_is_halved() {
    let llama = backbone(None, vec![], 3);
    let before = calls_before(&llama);
    let wanted: Vec<Wanted> = (0..4).map(|key| Wanted::new(key, 30)).collect();
    let whole = decode(&llama, 0.8, 4, &wanted);
    // In a pass over a prompt, and in a step; then once more before a step has succeeded, and later.
    for (fails_at, size) in [(vec![1], 4), (vec![15], 4), (vec![15, 16], 2), (vec![15, 23], 2), (vec![15, 40], 2)] {
        let fails_at: Vec<usize> = fails_at.into_iter().map(|call| before + call).collect();
        let mut batch = with_beginnings(&llama, &fails_at, 4);
        wanted.iter().for_each(|text| batch.enter(text.key, &text.request(0.8)).unwrap());
        let mut texts = vec![];
        while batch.stepper.prefix_bytes() > 0 {
            texts.extend(batch.step().unwrap());
        }
        assert_eq!((batch.size().get(), batch.running_and_waiting()), (4, (0, 4)), "{fails_at:?}");
        while !batch.is_idle() {
            texts.extend(batch.step().unwrap());
        }
        texts.sort_by_key(|(key, _)| *key);
        let texts: Vec<Generation> = texts.into_iter().map(|(_, text)| text.unwrap()).collect();
        assert_eq!((facts(&texts), batch.size().get()), (facts(&whole), size), "{fails_at:?}");
        assert!(batch.prefix_bytes() > 0, "kept again once steps succeed");
    }
}

#[test]
fn a_single_text_is_tried_again_without_all_else_and_ends_if_that_fails() {
    let llama = backbone(None, vec![], 3);
    let before = calls_before(&llama);
    let wanted = Wanted::new(3, 30);
    let whole = decode(&llama, 0.8, 1, std::slice::from_ref(&wanted)).remove(0);
    let cases = [(vec![1], true), (vec![4], true), (vec![4, 20], true), (vec![1, 2], false), (vec![4, 7], false)];
    for ((fails_at, fits), before) in cases.iter().flat_map(|case| [(case, 0), (case, before)]) {
        let fails_at: Vec<usize> = fails_at.iter().map(|call| before + call).collect();
        let mut batch = match before {
            0 => SequenceBatch::new(Box::new(Cramped::new(&llama, &fails_at)), None, NonZeroUsize::new(4).unwrap()),
            _ => with_beginnings(&llama, &fails_at, 4),
        };
        batch.enter(3, &wanted.request(0.8)).unwrap();
        let (key, text) = (0..60).find_map(|_| batch.step().unwrap().pop()).expect("it ends");
        match text {
            Ok(text) => {
                assert_eq!((facts(&[text]), *fits), (facts(std::slice::from_ref(&whole)), true), "{fails_at:?}")
            }
            Err(error) => {
                let DecodeError::OutOfMemory { tokens, source } = &error else { panic!("{error}") };
                assert!(source.out_of_memory && *tokens >= wanted.prompt.len() && !*fits, "{fails_at:?}: {error}");
            }
        }
        assert_eq!((key, batch.is_idle(), batch.size().get()), (3, true, 4), "{fails_at:?}");
    }
}

/// Alone or in a batch, with a drafter or without.
#[test]
fn a_text_that_does_not_fit_ends_and_the_others_go_on() {
    let (llama, draft) = (backbone(None, vec![], 5), backbone(None, vec![], 25));
    let tree = SparseTree::cartesian(&[3, 2]).unwrap();
    let shape = HeadsShape {
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: 32,
        vocab_size: 50,
        ..HeadsShape::default()
    };
    let shape = HeadsShape { architecture: HeadsArchitecture::HydraPlusPlus, ..shape };
    let heads = Heads::random(shape, Kind::Double, Device::Cpu, 5).with_new_prefix(&llama, 5);
    let mut wanted: Vec<Wanted> = (0..9).map(|key| Wanted::new(key, 12)).collect();
    // Too long while the others are still decoded.
    (wanted[4].prompt, wanted[4].max_new_tokens) = ((0..46).map(|at| at * at % 50).collect(), 18);
    let drafter = |name: &str| -> Option<Box<dyn Drafter>> {
        let guesser = || ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, Guessing::Best);
        Some(match name {
            "nothing" => return None,
            "a draft model" => Box::new(LevelDrafter::for_tree(&llama, Box::new(guesser()), &tree)),
            "a prefix layer" => {
                let levels = HydraLevels::new(&llama, &heads, 2);
                Box::new(LevelDrafter::for_tree(&llama, Box::new(levels), &tree))
            }
            _ => {
                let recycling: Box<dyn Drafter> = Box::new(RecyclingDrafter::new(&llama));
                let lookahead =
                    Box::new(LookaheadDrafter::new(&llama, LookaheadSize { columns: 2, ngram: 3, guesses: 2 }));
                let model = Box::new(LevelDrafter::for_tree(&llama, Box::new(guesser()), &tree));
                Box::new(JoinedDrafter::new(&llama, vec![recycling, lookahead, model], 8))
            }
        })
    };
    for name in ["nothing", "a draft model", "a prefix layer", "several joined"] {
        for temperature in [0.0, 0.8] {
            let whole = decode(&llama, temperature, 1, &wanted);
            for (size, room) in [(1, None), (4, None), (9, NonZeroUsize::new(64))] {
                let engine = Cramped { most_tokens: 55, ..Cramped::new(&llama, &[]) };
                let drafts = drafter(name).map(|drafter| (drafter, Acceptance::Rejection));
                let batch = SequenceBatch::new(Box::new(engine), drafts, NonZeroUsize::new(size).unwrap());
                let mut batch = room.into_iter().fold(batch, SequenceBatch::with_room);
                wanted.iter().for_each(|text| batch.enter(text.key, &text.request(temperature)).unwrap());
                let (mut ended, mut smallest) = (vec![], size);
                while !batch.is_idle() {
                    ended.extend(batch.step().unwrap());
                    smallest = smallest.min(batch.size().get());
                }
                ended.sort_by_key(|(key, _)| *key);
                assert_eq!((ended.len(), batch.size().get()), (9, size), "{name}, {size} texts");
                assert!(smallest < size || size == 1, "{name}, {size} texts: others were decoded beside it");
                for (key, text) in ended {
                    match text {
                        Ok(text) => assert_eq!(facts(&[text]), facts(&whole[key..=key]), "{name}, {key} of {size}"),
                        Err(error) => assert!(
                            key == 4 && matches!(error, DecodeError::OutOfMemory { tokens: 40.., .. }),
                            "{name}, text {key} of {size}: {error}"
                        ),
                    }
                }
            }
        }
    }
}

/// Prompt lookup that runs out of memory where it gets a row, and refuses rows that it does not have.
#[derive(Debug)]
struct LacksRow<'a> {
    guesses: NgramDrafter<'a>,
    rows: usize,
    pushes: usize,
    fails_at: usize,
}

impl Drafter for LacksRow<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        assert!(batch.iter().all(|text| text.row < self.rows));
        self.guesses.propose(batch)
    }

    fn push_row(&mut self) {
        self.pushes += 1;
        if self.pushes == self.fails_at {
            out_of_memory();
        }
        self.rows += 1;
    }

    fn truncate(&mut self, row: usize, _tokens: usize) {
        assert!(row < self.rows);
    }

    fn swap_remove(&mut self, row: usize) {
        assert!(row < self.rows);
        self.rows -= 1;
    }

    fn drop_rows(&mut self) {
        self.rows = 0;
    }
}

#[test]
fn a_drafter_without_memory_for_a_row_stays_in_step_with_the_cache() {
    let llama = backbone(None, vec![11], 5);
    let wanted: Vec<Wanted> = (0..9).map(|key| Wanted::new(key, 20)).collect();
    let whole = decode(&llama, 0.0, 1, &wanted);
    // At the first text, in the middle of a batch, and where a text takes the place of another; alone in a batch.
    for (fails_at, size) in [(1, 4), (3, 4), (6, 4), (1, 1), (2, 1)] {
        for is_joined in [false, true] {
            let lacks: Box<dyn Drafter> =
                Box::new(LacksRow { guesses: NgramDrafter::new(&llama), rows: 0, pushes: 0, fails_at });
            let recycling = || -> Box<dyn Drafter> { Box::new(RecyclingDrafter::new(&llama)) };
            let drafter = if is_joined {
                Box::new(JoinedDrafter::new(&llama, vec![recycling(), lacks, Box::new(NgramDrafter::new(&llama))], 12))
            } else {
                lacks
            };
            let texts = drafted(&llama, Some((drafter, Acceptance::Greedy)), 0.0, size, &wanted);
            assert_eq!(facts(&texts), facts(&whole), "row {fails_at} of {size}, {is_joined}");
        }
    }
}

/// Wherever the error came: in a pass over a prompt, in its logits, in a step or its logits.
#[test]
fn after_an_error_the_next_step_goes_on() {
    let llama = backbone(None, vec![], 3);
    let wanted = Wanted::new(3, 20);
    for temperature in [0.0, 0.8] {
        let whole = decode(&llama, temperature, 1, std::slice::from_ref(&wanted));
        for (fails_at, failure) in (1..=4).flat_map(|at| [(at, Failure::OutOfMemory), (at, Failure::Broken)]) {
            for follows in [false, true] {
                let engine = Cramped { failure, ..Cramped::new(&llama, &[fails_at]) };
                let recycling: Box<dyn Drafter> = Box::new(RecyclingDrafter::new(&llama));
                let drafter = follows.then_some((recycling, Acceptance::Rejection));
                let mut batch = SequenceBatch::new(Box::new(engine), drafter, NonZeroUsize::MIN);
                batch.enter(0, &wanted.request(temperature)).unwrap();
                let (mut texts, mut errors) = (vec![], 0);
                for _ in 0..30 {
                    match batch.step() {
                        Ok(ended) => texts.extend(ended.into_iter().map(|(_, text)| text.unwrap())),
                        Err(_) => errors += 1,
                    }
                }
                let expected = usize::from(failure == Failure::Broken);
                assert_eq!(
                    (facts(&texts), errors),
                    (facts(&whole), expected),
                    "call {fails_at:?}, {failure:?}, {follows}"
                );
            }
        }
    }
}

/// As a server does.
#[test]
fn a_batch_that_is_cleared_after_an_error_takes_other_texts() {
    let llama = backbone(None, vec![], 3);
    let wanted: Vec<Wanted> = (0..6).map(|key| Wanted::new(key, 20)).collect();
    let whole = decode(&llama, 0.8, 1, &wanted);
    for fails_at in [1, 2, 4, 9, 12, 20] {
        let engine = Cramped { failure: Failure::Broken, ..Cramped::new(&llama, &[fails_at]) };
        let recycling: Box<dyn Drafter> = Box::new(RecyclingDrafter::new(&llama));
        let drafter = Some((recycling, Acceptance::Rejection));
        let mut batch = SequenceBatch::new(Box::new(engine), drafter, NonZeroUsize::new(3).unwrap());
        wanted[..4].iter().for_each(|text| batch.enter(text.key, &text.request(0.8)).unwrap());
        let error = (0..30).find_map(|_| batch.step().err()).expect("the engine fails");
        assert!(matches!(&error, DecodeError::Torch(panic) if !panic.out_of_memory), "{error}");
        batch.clear();
        assert!(batch.is_idle() && batch.has_room() && batch.prefix_bytes() == 0);
        assert_eq!(facts(&run(&mut batch, 0.8, &wanted)), facts(&whole), "call {fails_at}");
    }
}
