//! Some rows of a file, in their order: a bit a row, and where the k-th of them is.

/// Bits whose ones are counted together.
const BLOCK: usize = 512;

/// Rows of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All of so many.
    All(usize),
    /// Those whose bit is set.
    Some(Marked),
}

/// A bit a row: an eighth of a byte, and a few more to find the k-th in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marked {
    words: Vec<u64>,
    /// Ones before each block.
    before: Vec<u64>,
    ones: usize,
    len: usize,
}

impl Marked {
    /// The next row, whether it belongs to these or not.
    pub fn push(&mut self, marked: bool) {
        if self.len.is_multiple_of(BLOCK) {
            self.before.push(self.ones as u64);
        }
        if self.len.is_multiple_of(64) {
            self.words.push(0);
        }
        if let Some(word) = self.words.last_mut() {
            *word |= u64::from(marked) << (self.len % 64);
        }
        self.ones += usize::from(marked);
        self.len += 1;
    }

    fn is_marked(&self, row: usize) -> bool {
        row < self.len && self.words[row / 64] >> (row % 64) & 1 == 1
    }

    /// The row of one `k`, which is below the number of ones.
    fn select(&self, k: usize) -> usize {
        let block = self.before.partition_point(|&b| b <= k as u64) - 1;
        let mut left = k - self.before[block] as usize;
        for at in block * BLOCK / 64.. {
            let mut word = self.words[at];
            let ones = word.count_ones() as usize;
            if left < ones {
                for _ in 0..left {
                    word &= word - 1; // drops the lowest one
                }
                return at * 64 + word.trailing_zeros() as usize;
            }
            left -= ones;
        }
        unreachable!("there are more than k ones")
    }
}

impl Rows {
    /// These, which are all of the file if none is left out.
    pub fn of(marked: Marked) -> Rows {
        if marked.ones == marked.len { Rows::All(marked.len) } else { Rows::Some(marked) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Some(marked) => marked.ones,
        }
    }

    /// Rows of the file that these are of, as far as they reach.
    pub fn of_file(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Some(marked) => marked.len,
        }
    }

    /// The row of the file at position `k`, which is below `len()`.
    pub fn get(&self, k: usize) -> usize {
        match self {
            Rows::All(_) => k,
            Rows::Some(marked) => marked.select(k),
        }
    }

    /// Whether a row of the file is among them.
    pub fn contains(&self, row: usize) -> bool {
        match self {
            Rows::All(n) => row < *n,
            Rows::Some(marked) => marked.is_marked(row),
        }
    }

    /// Those of these that `other` does not have.
    pub fn without(&self, other: &Rows) -> Rows {
        let mut left = Marked::default();
        (0..self.of_file()).for_each(|row| left.push(self.contains(row) && !other.contains(row)));
        Rows::of(left)
    }

    /// What they are, for a fingerprint.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let words: &[u64] = if let Rows::Some(marked) = self { &marked.words } else { &[] };
        [self.of_file() as u64, self.len() as u64].into_iter().chain(words.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_kth_row_is_found(marks in proptest::collection::vec(any::<bool>(), 0..3000), shift in 0usize..40) {
            let mut marked = Marked::default();
            marks.iter().for_each(|&m| marked.push(m && shift > 0));
            let rows = Rows::of(marked);
            let want: Vec<usize> = (0..marks.len()).filter(|&i| marks[i] && shift > 0).collect();
            prop_assert_eq!(rows.len(), want.len());
            for (k, &row) in want.iter().enumerate() {
                prop_assert_eq!(rows.get(k), row);
            }
            for row in 0..marks.len() + 70 {
                prop_assert_eq!(rows.contains(row), want.binary_search(&row).is_ok());
            }
            let rest = Rows::All(marks.len()).without(&rows);
            prop_assert_eq!(rest.len() + rows.len(), marks.len());
            prop_assert_eq!(rest.without(&rest).len(), 0);
        }
    }
}
