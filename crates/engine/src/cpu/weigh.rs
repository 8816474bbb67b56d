//! Which of many rows may score enough: to scores that are known, weighted sums of columns of bytes are added, which bound what is not.
//! The sums are whole numbers, so every instruction set finds the same.

use super::Isa;
use super::lanes::kernel;

/// Rows of a chunk, whose marks are the bits of a word.
pub const CHUNK: usize = 64;

/// Columns of bytes, each as long as there are rows, and their weights, which add up to 257 at most: so no sum is above 65535.
pub type Columns<'a> = [(&'a [u8], u16)];

/// For up to 64 whole chunks of rows, of which `chunks` has a bit for those that are wanted, on the calling thread: `sums[i]` becomes the sum over the columns of byte `i` times the column's weight, and bit `i % 64`
/// of `marks[i / 64]` tells whether `scores[i] + sums[i] * step` is at least `least`. Scores are not negative. Of other chunks no row is marked.
pub fn weigh(
    isa: Isa,
    columns: &Columns<'_>,
    chunks: u64,
    scores: &[[f32; CHUNK]],
    (step, least): (f32, f32),
    sums: &mut [[u16; CHUNK]],
    marks: &mut [u64],
) {
    assert!(scores.len() <= 64, "a bit for every chunk");
    assert!(columns.iter().map(|(_, weight)| u32::from(*weight)).sum::<u32>() <= 257, "sums have 16 bits");
    assert!(scores.len() == sums.len() && scores.len() == marks.len(), "as many scores as sums");
    assert!(columns.iter().all(|(bytes, _)| bytes.len() == sums.len() * CHUNK), "columns are of one length");
    add_up(isa, columns, chunks, scores, (step, least), sums, marks);
}

kernel! {
    fn add_up(
        columns: &Columns<'_>,
        chunks: u64,
        scores: &[[f32; CHUNK]],
        numbers: (f32, f32),
        sums: &mut [[u16; CHUNK]],
        marks: &mut [u64],
    ) {
        let (step, least) = numbers;
        for (n, ((scores, out), marks)) in scores.iter().zip(sums).zip(marks).enumerate() {
            *marks = 0;
            if chunks >> n & 1 == 0 {
                continue;
            }
            let mut sums = [0u16; CHUNK];
            for &(bytes, weight) in columns {
                if let Some(bytes) = bytes[n * CHUNK..].first_chunk::<CHUNK>() {
                    for i in 0..CHUNK {
                        sums[i] += u16::from(bytes[i]) * weight;
                    }
                }
            }
            *out = sums;
            let mut totals = [0f32; CHUNK];
            for i in 0..CHUNK {
                totals[i] = scores[i] + f32::from(sums[i]) * step;
            }
            // Bits of numbers that are not negative have their order. Most chunks have no row that is marked.
            let most = totals.iter().fold(0, |most, total| total.to_bits().max(most));
            if f32::from_bits(most) >= least {
                for (i, &total) in totals.iter().enumerate() {
                    *marks |= u64::from(total >= least) << i;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{key, uniform};

    #[test]
    fn rows_are_marked_as_by_a_plain_loop_up_to_the_largest_sums() {
        for chunks in [0, 1, 3] {
            for weights in [&[][..], &[257], &[3, 100, 154], &[1; 257]] {
                let rows = chunks * CHUNK as u64;
                let byte = |k: u64, i: u64| match i % 5 {
                    0 => 255,
                    _ => (uniform(key(&[k]), i) * 256.0) as u8,
                };
                let columns: Vec<Vec<u8>> =
                    (0..weights.len() as u64).map(|k| (0..rows).map(|i| byte(k, i)).collect()).collect();
                let columns: Vec<_> =
                    columns.iter().map(Vec::as_slice).zip(weights.iter().copied()).collect();
                let scores: Vec<f32> = (0..rows).map(|i| uniform(key(&[9]), i) as f32 * 10.0).collect();
                let sum = |i: usize| columns.iter().map(|(bytes, w)| u16::from(bytes[i]) * w).sum();
                let want: Vec<u16> = (0..rows as usize).map(sum).collect();
                // In eighths nothing is rounded: fused or not, a total is the same.
                let scores: Vec<f32> = scores.iter().map(|s| (s * 8.0).round() / 8.0).collect();
                let totals: Vec<f32> =
                    scores.iter().zip(&want).map(|(s, &sum)| s + f32::from(sum) * 0.125).collect();
                let middle = totals.get(rows as usize / 2).copied().unwrap_or(0.0);
                for least in [0.0, middle, 1e9] {
                    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                        let mut sums = vec![[7; CHUNK]; chunks as usize];
                        let mut marks = vec![7; chunks as usize];
                        let (wanted, numbers) = (0b1101, (0.125, least));
                        weigh(isa, &columns, wanted, scores.as_chunks().0, numbers, &mut sums, &mut marks);
                        for (i, &total) in totals.iter().enumerate() {
                            let (chunk, place) = (i / CHUNK, i % CHUNK);
                            let here = wanted >> chunk & 1 == 1;
                            let mark = marks[chunk] >> place & 1;
                            assert_eq!(mark == 1, here && total >= least, "row {i}, {least}, {isa:?}");
                            assert_eq!(
                                sums[chunk][place],
                                if here { want[i] } else { 7 },
                                "row {i}, {isa:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
