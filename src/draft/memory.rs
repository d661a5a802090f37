//! What texts have taught a drafter. Where the rule may accept any guess, a text would depend on the texts before it and beside it; there each
//! row learns for itself.

/// Whose texts teach the guesses for a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Those of all rows, and those before them.
    Common,
    /// Only the row's own text, prompt included.
    OfText,
}

/// What is remembered in common, and of each row that remembers for itself.
#[derive(Debug)]
pub struct Remembered<T> {
    empty: T,
    common: T,
    rows: Vec<Option<T>>,
}

impl<T: Clone> Remembered<T> {
    /// Nothing but `empty` yet, and no rows.
    pub fn new(empty: T) -> Self {
        Self { common: empty.clone(), empty, rows: vec![] }
    }

    /// Adds a row.
    pub fn push_row(&mut self) {
        self.rows.push(None);
    }

    /// A text begins in a row.
    pub fn begin_text(&mut self, row: usize, memory: Memory) {
        self.rows[row] = (memory == Memory::OfText).then(|| self.empty.clone());
    }

    /// What is known for a row.
    pub fn of(&mut self, row: usize) -> &mut T {
        self.rows[row].as_mut().unwrap_or(&mut self.common)
    }

    /// Whether a row remembers what all texts taught.
    pub fn is_common(&self, row: usize) -> bool {
        self.rows[row].is_none()
    }

    /// Forgets what is remembered in common.
    pub fn forget(&mut self) {
        self.common = self.empty.clone();
    }

    /// Removes a row; the last row takes its place.
    pub fn swap_remove(&mut self, row: usize) {
        self.rows.swap_remove(row);
    }

    /// Removes all rows; what is remembered in common stays.
    pub fn drop_rows(&mut self) {
        self.rows.clear();
    }
}
