//! Best-fit packing: each row, in a given order, into the sequence that it fills best.

use std::collections::BTreeMap;

/// The longest row first. For each row the sequence that it goes to, numbered as they were opened.
pub(super) fn decreasing(lengths: &[u32], max_length: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    order.sort_by_key(|&row| std::cmp::Reverse(lengths[row as usize])); // stable: equal rows stay in order
    best_fit(&order, lengths, max_length)
}

/// For each row the sequence that it goes to, numbered as they were opened.
pub(super) fn best_fit(order: &[u32], lengths: &[u32], max_length: usize) -> Vec<u32> {
    let (mut sequence_of, mut opened) = (vec![0; lengths.len()], 0);
    let mut by_room: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for &row in order {
        let length = lengths[row as usize] as usize;
        assert!(length <= max_length, "row {row} has {length} tokens, more than max_length {max_length}");
        let (sequence, room) = take_tightest(&mut by_room, length).unwrap_or_else(|| {
            opened += 1;
            (opened - 1, max_length)
        });
        sequence_of[row as usize] = sequence;
        by_room.entry(room - length).or_default().push(sequence);
    }
    sequence_of
}

/// The sequence with the least room that still takes `length` tokens, and its room.
pub(super) fn take_tightest(by_room: &mut BTreeMap<usize, Vec<u32>>, length: usize) -> Option<(u32, usize)> {
    let (&room, sequences) = by_room.range_mut(length..).next()?;
    let sequence = sequences.pop()?;
    if sequences.is_empty() {
        by_room.remove(&room);
    }
    Some((sequence, room))
}
