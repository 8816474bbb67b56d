//! A packed tensor on a device: contiguous rows, no padding, no strides.

use crate::device::{Device, Matrix, View, ViewMut};

/// `rows x columns` values of a device, row-major.
pub struct Tensor<D: Device> {
    storage: D::Storage,
    /// Number of rows (tokens, mostly).
    pub rows: usize,
    /// Elements in a row.
    pub columns: usize,
}

impl<D: Device> Tensor<D> {
    /// All zeros.
    pub fn zeros(device: &D, rows: usize, columns: usize) -> Self {
        Tensor { storage: device.zeros(rows * columns), rows, columns }
    }
    /// Arbitrary content, to be overwritten whole.
    pub fn scratch(device: &D, rows: usize, columns: usize) -> Self {
        Tensor { storage: device.scratch(rows * columns), rows, columns }
    }
    /// A tensor of host values.
    pub fn from_values(device: &D, rows: usize, columns: usize, values: &[f32]) -> Self {
        assert_eq!(
            values.len(),
            rows * columns,
            "a {rows} x {columns} tensor takes {} values",
            rows * columns
        );
        let mut t = Self::scratch(device, rows, columns);
        device.write(t.view_mut(), values);
        t
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.columns
    }
    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All elements.
    pub fn view(&self) -> View<'_, D> {
        View { storage: &self.storage, start: 0, len: self.len() }
    }
    /// All elements, writable.
    pub fn view_mut(&mut self) -> ViewMut<'_, D> {
        let len = self.len();
        ViewMut { storage: &mut self.storage, start: 0, len }
    }
    /// The elements of rows `[start, end)`.
    pub fn rows_view(&self, start: usize, end: usize) -> View<'_, D> {
        assert!(start <= end && end <= self.rows);
        View { storage: &self.storage, start: start * self.columns, len: (end - start) * self.columns }
    }
    /// The elements of rows `[start, end)`, writable.
    pub fn rows_view_mut(&mut self, start: usize, end: usize) -> ViewMut<'_, D> {
        assert!(start <= end && end <= self.rows);
        ViewMut { start: start * self.columns, len: (end - start) * self.columns, storage: &mut self.storage }
    }
    /// As an operand of a product.
    pub fn matrix(&self) -> Matrix<'_, D> {
        Matrix::new(self.view(), self.rows, self.columns)
    }
    /// A copy on the same device.
    pub fn duplicate(&self, device: &D) -> Self {
        let mut t = Self::scratch(device, self.rows, self.columns);
        device.copy(t.view_mut(), self.view());
        t
    }
    /// Host copy, rounded to f32.
    pub fn to_vec(&self, device: &D) -> Vec<f32> {
        device.read(self.view())
    }
}
