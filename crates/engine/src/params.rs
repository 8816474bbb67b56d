//! Parameters in one arena: a name and a shape per parameter, values and gradients contiguous in order of registration.
//!
//! A layer's parameters lie together, so that its gradients can travel as one bucket and the optimizer is one pass.

use std::ops::Range;

use crate::device::{Device, Matrix, View, ViewMut};

/// A parameter's place in the arena: a `rows x columns` matrix (a vector has one row).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// First element in the arena.
    pub start: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl Param {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.columns
    }
    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Parameters that lie one after the other, with as many columns, as one matrix of all their rows:
    /// query, key and value weights are one product.
    ///
    /// # Panics
    /// When they are not adjacent (an error of the model's code).
    pub fn adjacent(parts: &[Param]) -> Param {
        for w in parts.windows(2) {
            assert_eq!(w[0].start + w[0].len(), w[1].start, "parameters are not adjacent");
            assert_eq!(w[0].columns, w[1].columns, "adjacent parameters differ in width");
        }
        Param { rows: parts.iter().map(|p| p.rows).sum(), ..parts[0] }
    }
}

/// Name, shape and place of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name, as in the model's file.
    pub name: String,
    /// Shape, as in the model's file.
    pub shape: Vec<usize>,
    /// Place in the arena.
    pub place: Param,
}

/// The list of a model's parameters; gives each its place.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    specs: Vec<ParamSpec>,
    len: usize,
}

impl Layout {
    /// Registers the next parameter.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize]) -> Param {
        let (rows, columns) = match *shape {
            [n] => (1, n),
            [r, c] => (r, c),
            _ => panic!("parameters have one or two dimensions"),
        };
        let place = Param { start: self.len, rows, columns };
        self.len += place.len();
        self.specs.push(ParamSpec { name: name.into(), shape: shape.to_vec(), place });
        place
    }
    /// All parameters in order.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }
    /// Number of elements of all parameters.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether no parameter is registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The arena in buckets of about `least` to `most` elements, from its end to its start: models register parameters in the
    /// order of their use, so backward is done with the last ones first. All cuts but the end lie at multiples of `grain`.
    pub fn buckets(&self, grain: usize, least: usize, most: usize) -> Vec<Range<usize>> {
        let (grain, most) = (grain.max(1), most.max(grain.max(1)));
        let mut buckets = Vec::new();
        let mut end = self.len;
        for spec in self.specs.iter().rev() {
            // A block that two parameters share goes with the one that is ready later.
            let start = match spec.place.start {
                0 => 0,
                start => start.next_multiple_of(grain),
            };
            if start >= end || (end - start < least && start > 0) {
                continue;
            }
            while end - start > most {
                let cut = ((end - 1) / grain * grain + grain).saturating_sub(most / grain * grain).max(start);
                buckets.push(cut..end);
                end = cut;
            }
            buckets.push(start..end);
            end = start;
        }
        buckets
    }
}

/// One value per element of a [`Layout`]: parameters, gradients or moments.
pub struct Arena<D: Device> {
    storage: D::Storage,
    len: usize,
}

impl<D: Device> Arena<D> {
    /// All zeros.
    pub fn zeros(device: &D, layout: &Layout) -> Self {
        Arena { storage: device.zeros(layout.len()), len: layout.len() }
    }
    /// `len` zeros: moments of a part of a layout.
    pub fn of_len(device: &D, len: usize) -> Self {
        Arena { storage: device.zeros(len), len }
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// A stretch of the arena.
    ///
    /// # Panics
    /// When it is used and lies beyond the arena.
    pub fn range(&self, range: Range<usize>) -> View<'_, D> {
        View { storage: &self.storage, start: range.start, len: range.len() }
    }
    /// As [`Arena::range`], writable.
    pub fn range_mut(&mut self, range: Range<usize>) -> ViewMut<'_, D> {
        ViewMut { storage: &mut self.storage, start: range.start, len: range.len() }
    }
    /// The whole arena.
    pub fn all(&self) -> View<'_, D> {
        View { storage: &self.storage, start: 0, len: self.len }
    }
    /// The whole arena, writable.
    pub fn all_mut(&mut self) -> ViewMut<'_, D> {
        ViewMut { storage: &mut self.storage, start: 0, len: self.len }
    }
    /// One parameter.
    pub fn view(&self, p: Param) -> View<'_, D> {
        View { storage: &self.storage, start: p.start, len: p.len() }
    }
    /// One parameter, writable.
    pub fn view_mut(&mut self, p: Param) -> ViewMut<'_, D> {
        ViewMut { storage: &mut self.storage, start: p.start, len: p.len() }
    }
    /// One parameter as an operand of a product.
    pub fn matrix(&self, p: Param) -> Matrix<'_, D> {
        Matrix::new(self.view(p), p.rows, p.columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_the_arena_from_its_end() {
        let mut layout = Layout::default();
        for (i, n) in [5000, 3, 90, 200, 1, 64, 64, 7].into_iter().enumerate() {
            layout.add(format!("p{i}"), &[n]);
        }
        for (grain, least, most) in
            [(16, 100, 500), (1, 1, 1), (64, 1, 64), (16, 1 << 20, 1 << 20), (1 << 14, 1, 1)]
        {
            let buckets = layout.buckets(grain, least, most);
            let mut end = layout.len();
            for bucket in &buckets {
                assert!(
                    !bucket.is_empty() && bucket.end == end && bucket.start.is_multiple_of(grain),
                    "{buckets:?}"
                );
                assert!(bucket.len() <= most.max(least + 5000).max(grain), "{buckets:?}");
                end = bucket.start;
            }
            assert_eq!(end, 0, "{buckets:?}");
        }
        assert_eq!(layout.buckets(16, 100, 2000).len(), 5);
        assert!(Layout::default().buckets(16, 1, 1).is_empty());
    }
}
