//! All rows that were read. Tokens stay in the cache files; 12 bytes per row are in memory.

use std::sync::Arc;

use super::cache::{self, CacheError};
use super::rows::TokenRow;
use super::token_file::{OpenedTokenFile, RowPlace, TokenFile};

/// Rows in some order. Clones and subsets share the files.
#[derive(Debug, Clone, Default)]
pub struct RowStore {
    files: Arc<Vec<TokenFile>>,
    /// Where each row stands; batches are counted over all files.
    rows: Vec<RowPlace>,
}

impl RowStore {
    /// The rows of files, in their order.
    pub(super) fn of(files: Vec<(TokenFile, Vec<RowPlace>)>) -> Self {
        let (mut rows, mut kept, mut before) = (Vec::new(), Vec::new(), 0);
        for (file, places) in files {
            let place = |place: RowPlace| place.behind(before);
            match before {
                0 => rows = places, // one file: no second copy of millions of places
                _ => rows.extend(places.into_iter().map(place)),
            }
            before += file.batches() as u32;
            kept.push(file);
        }
        Self { files: Arc::new(kept), rows }
    }

    /// Rows that are in memory, encoded as they are on disk.
    pub fn in_memory(rows: impl IntoIterator<Item = TokenRow>) -> Self {
        let OpenedTokenFile { file, rows, .. } =
            super::reading::encode(rows).expect("memory takes all rows of 32 bits");
        Self::of(vec![(file, rows)])
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Tokens of a row, without reading it.
    pub fn length(&self, row: usize) -> usize {
        self.rows[row].length as usize
    }

    /// A row, read from its file.
    ///
    /// # Errors
    /// [`CacheError::Damaged`]; the file is removed then, so that the next start makes it anew. [`CacheError::Unreadable`]; it stays then.
    pub fn row(&self, row: usize) -> Result<TokenRow, CacheError> {
        let mut place = self.rows[row];
        let mut files = self.files.iter();
        let file = files.find(|file| {
            let is_here = place.batch < file.batches() as u32;
            if !is_here {
                place.batch -= file.batches() as u32;
            }
            is_here
        });
        let file = file.expect("places of these files");
        file.row(place).map_err(|fault| cache::unread(file.path(), fault))
    }

    /// All rows, one read after the other.
    pub fn iter(&self) -> impl Iterator<Item = Result<TokenRow, CacheError>> + '_ {
        (0..self.len()).map(|row| self.row(row))
    }

    /// For each row the number of the source row that it comes from, from 0: the pieces of a long row have the same.
    pub(super) fn sources(&self) -> Vec<usize> {
        let number = |count: &mut usize, row: &RowPlace| {
            *count += usize::from(!row.goes_on());
            Some(count.saturating_sub(1))
        };
        self.rows.iter().scan(0, number).collect()
    }

    /// Those rows for which `is_apart` is true, and the others, each in the order they have here.
    pub(super) fn partition(self, is_apart: &[bool]) -> (Self, Self) {
        let (apart, rest): (Vec<_>, Vec<_>) = self.rows.into_iter().zip(is_apart).partition(|(_, apart)| **apart);
        let part = |rows: Vec<(RowPlace, &bool)>| Self {
            files: self.files.clone(),
            rows: rows.into_iter().map(|(place, _)| place).collect(),
        };
        (part(apart), part(rest))
    }

    /// Batches of all files that were read: what was never asked for was never looked at.
    #[cfg(test)]
    pub(super) fn batches_read(&self) -> (usize, usize) {
        let sum = |count: fn(&TokenFile) -> usize| self.files.iter().map(count).sum();
        (sum(TokenFile::checked), sum(TokenFile::batches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::token_file::Storage;

    #[test]
    fn a_file_that_the_disk_does_not_give_stays() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.arrow");
        let bytes = super::super::token_file::tests::written(&super::super::token_file::tests::rows(60));
        crate::files::write_atomic(&path, |out| out.write_all(&bytes)).unwrap();
        let OpenedTokenFile { file, rows, .. } =
            TokenFile::open(Storage::new(std::fs::File::open(&path).unwrap()), &path, None).unwrap();
        let for_writing = std::fs::File::options().write(true).open(&path).unwrap();
        let store = RowStore::of(vec![(file.on(Storage::new(for_writing)), rows)]);
        assert!(matches!(store.row(9), Err(CacheError::Unreadable { .. })));
        assert!(path.exists());
    }

    #[test]
    fn rows_of_several_files_follow_each_other_and_are_read_when_asked_for() {
        let row = |n: i32| TokenRow { input_ids: vec![n; 100], labels: vec![-n; 100] };
        let whole = |from: i32, count: i32| {
            let whole = super::super::reading::encode((from..from + count).map(row)).unwrap();
            (whole.file, whole.rows)
        };
        let store = RowStore::of(vec![whole(0, 3000), whole(3000, 0), whole(3000, 5000)]);
        assert_eq!((store.len(), store.length(7), store.batches_read().0), (8000, 100, 0));
        for at in [7999, 2999, 3000, 0] {
            assert_eq!(store.row(at).unwrap(), row(at as i32));
        }
        let (read, batches) = store.batches_read();
        assert!(read <= 4 && batches > 4, "{read} of {batches}");
        let every_third: Vec<bool> = (0..8000).map(|n| n % 3 == 0).collect();
        let (thirds, rest) = store.partition(&every_third);
        assert_eq!((thirds.len(), thirds.row(1000).unwrap()), (2667, row(3000)));
        assert_eq!((rest.len(), rest.row(1).unwrap()), (5333, row(2)));
    }
}
