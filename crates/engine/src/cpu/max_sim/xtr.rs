//! XTR's scores: a task is a query. Its rows meet all their documents, and the greatest products of a row say how good a product must be
//! to count at all.

use std::cmp::Ordering;

use rayon::prelude::*;

use super::{Cells, greatest, operand};
use crate::cpu::lanes::Arithmetic;
use crate::cpu::product::product_raw;
use crate::device::{MaxSimShape, MaxSimSide, NO_ROW};

/// The worst product that counts: its value, and how many equal to it do, from the first.
#[derive(Clone, Copy)]
struct Bar {
    value: f32,
    equal: usize,
}

/// The bar of the `count` greatest of some products; `None` where all of them count.
fn bar(products: &mut [f32], count: usize) -> Option<Bar> {
    if products.len() <= count {
        return None;
    }
    let (greater, value, _) = products.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    let value = *value;
    Some(Bar { value, equal: 1 + equals(greater, value) })
}

fn equals(products: &[f32], value: f32) -> usize {
    products.iter().filter(|v| v.total_cmp(&value).is_eq()).count()
}

pub fn forward(
    how: Arithmetic,
    queries: &[f32],
    documents: &[f32],
    width: usize,
    shape: &MaxSimShape,
    (scores, best): (&mut [f32], &mut [u32]),
) {
    let places = shape.places();
    let (best_rows, sums) = (Cells(best.as_mut_ptr()), Cells(scores.as_mut_ptr()));
    let groups = shape.grouped(MaxSimSide::Queries);
    groups.par_iter().enumerate().for_each(|(query, pairs)| {
        let own = shape.queries[query];
        let lengths: Vec<usize> =
            pairs.iter().map(|&p| shape.documents[shape.pairs[p as usize].1 as usize].len()).collect();
        // Of a pair after the other: the products of each row of the query with the document's rows.
        let mut products = vec![0.0; own.len() * lengths.iter().sum::<usize>()];
        let mut rest = &mut products[..];
        for (&pair, &columns) in pairs.iter().zip(&lengths) {
            let (block, others) = rest.split_at_mut(own.len() * columns);
            rest = others;
            if !block.is_empty() {
                let rows = shape.documents[shape.pairs[pair as usize].1 as usize];
                let (a, b) = (operand(queries, own, width), operand(documents, rows, width).t());
                // SAFETY: the operands are slices; `block` is as large as their product.
                unsafe { product_raw(how, a, b, block.as_mut_ptr(), columns, false) };
                // 0 for -0: they are equal products, whichever a sum of no size came out as.
                block.iter_mut().for_each(|v| *v += 0.0);
            }
        }
        let mut of_pairs = vec![(0f64, 0usize); pairs.len()];
        let mut of_row = Vec::new();
        for i in 0..own.len() {
            let mut blocks = Vec::with_capacity(pairs.len());
            let mut start = 0;
            for &columns in &lengths {
                blocks.push(&products[start + i * columns..][..columns]);
                start += own.len() * columns;
            }
            of_row.clear();
            blocks.iter().for_each(|block| of_row.extend_from_slice(block));
            let bar = bar(&mut of_row, shape.retrieved);
            let mut equal = bar.map_or(usize::MAX, |bar| bar.equal);
            for ((block, &pair), (sum, count)) in blocks.iter().zip(pairs).zip(&mut of_pairs) {
                let mut row = NO_ROW;
                if !block.is_empty() {
                    let (most, place) = greatest(how.isa, block);
                    let counts = bar.is_none_or(|bar| match most.total_cmp(&bar.value) {
                        Ordering::Less => false,
                        Ordering::Equal => equal > 0,
                        Ordering::Greater => true,
                    });
                    if counts {
                        (*sum, *count, row) = (*sum + f64::from(most), *count + 1, place);
                    }
                    if let Some(bar) = bar {
                        equal = equal.saturating_sub(equals(block, bar.value));
                    }
                }
                // SAFETY: a pair is in one group, so its places are this task's.
                unsafe { best_rows.set(places[pair as usize] + i, row) };
            }
        }
        for (&pair, (sum, count)) in pairs.iter().zip(of_pairs) {
            // SAFETY: likewise.
            unsafe { sums.set(pair as usize, (sum / count.max(1) as f64) as f32) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::bar;
    use crate::device::MaxSimShape;
    use crate::{Cpu, Device, EncoderKernels, Reference, Span, Tensor};

    #[test]
    fn zeros_are_equal_whatever_their_signs() {
        fn best<D: Device>(d: &D) -> Vec<u32> {
            let of = |n| vec![Span { start: 0, end: n }];
            let shape = MaxSimShape { retrieved: 1, ..MaxSimShape::all(of(1), of(4)) };
            let query = Tensor::from_values(d, 1, 1, &[1.0]);
            let document = Tensor::from_values(d, 4, 1, &[-1.0, -0.0, 0.0, -0.0]);
            let mut scores = Tensor::zeros(d, 1, 1);
            EncoderKernels::max_sim(d, query.view(), document.view(), 1, &shape, scores.view_mut())
        }
        assert_eq!((best(&Cpu::new(1).unwrap()), best(&Reference)), (vec![1], vec![1]));
    }

    #[test]
    fn the_bar_is_the_last_that_counts() {
        let of = |values: &[f32], count| bar(&mut values.to_vec(), count).map(|b| (b.value, b.equal));
        assert_eq!(of(&[1.0, 3.0, 2.0], 3), None);
        assert_eq!(of(&[1.0, 3.0, 2.0], 2), Some((2.0, 1)));
        assert_eq!(of(&[2.0, 3.0, 2.0, 2.0, 5.0], 4), Some((2.0, 2)));
        assert_eq!(of(&[-1.0, -1.0], 1), Some((-1.0, 1)));
    }
}
