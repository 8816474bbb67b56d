//! How operations launch kernels: arguments of views, lists of the host, grids.

use tercio_engine::{Activation, Span, View, ViewMut};

use crate::device::Cuda;
use crate::driver::{Address, Argument, Driver, Factor, Factors, Launch, Product};
use crate::memory::Buffer;

/// Rows of a partial sum, as `kernels/rows.h` has it.
const PARTIAL_ROWS: usize = 128;

/// A `u64` argument.
pub(crate) fn size(n: usize) -> Argument {
    Argument::from(n as u64)
}
/// A `u32` argument.
pub(crate) fn number(n: usize) -> Argument {
    Argument::from(u32::try_from(n).expect("a width, or a number of texts, fits 32 bits"))
}
/// An f32 argument.
pub(crate) fn float(x: f64) -> Argument {
    Argument::from(x as f32)
}
/// The kernels' number of an activation.
pub(crate) fn kind_of(kind: Activation) -> Argument {
    Argument::from(match kind {
        Activation::Relu => 0u32,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Silu => 3,
        Activation::Tanh => 4,
    })
}

/// Plain values that a list for a kernel holds.
pub(crate) trait Word: Copy {}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}
impl Word for f32 {}

/// The bytes of plain values.
pub(crate) fn bytes_of<T: Word>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no bytes between them, and any bytes may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// A stretch of memory as an argument: of the type that activations are stored in, or f32 in any case.
pub(crate) trait Operand: Sized {
    fn real(&self) -> Argument;
    fn pointer(&self) -> Argument {
        Argument::Pointer(self.at())
    }
    /// First element.
    fn at(&self) -> Address;
}
impl<R: Driver> Operand for View<'_, Cuda<R>> {
    fn real(&self) -> Argument {
        Argument::Real(self.at(), self.len)
    }
    fn at(&self) -> Address {
        place(self.storage, self.start, self.len)
    }
}
impl<R: Driver> Operand for ViewMut<'_, Cuda<R>> {
    fn real(&self) -> Argument {
        Argument::RealMut(self.at(), self.len)
    }
    fn at(&self) -> Address {
        place(self.storage, self.start, self.len)
    }
}
impl<R: Driver> Operand for Buffer<R> {
    fn real(&self) -> Argument {
        Argument::RealMut(self.at(), self.floats())
    }
    fn at(&self) -> Address {
        Buffer::at(self)
    }
}

fn place<R: Driver>(storage: &Buffer<R>, start: usize, len: usize) -> Address {
    assert!(start + len <= storage.floats(), "a view is beyond its buffer");
    storage.at() + 4 * start as u64
}

/// An optional f32 array.
pub(crate) fn optional<R: Driver>(view: Option<View<'_, Cuda<R>>>) -> Argument {
    view.map_or(Argument::NOTHING, |v| v.pointer())
}

/// A contiguous row-major factor of rows of `stride` elements.
pub(crate) fn rows_of(at: Address, stride: usize) -> Factor {
    Factor { at, stride, step: 0, transposed: false }
}
/// The same factor, used transposed.
pub(crate) fn turned(factor: Factor) -> Factor {
    Factor { transposed: !factor.transposed, ..factor }
}

impl<R: Driver> Buffer<R> {
    /// Number of f32 elements.
    pub(crate) fn floats(&self) -> usize {
        (self.bytes() / 4) as usize
    }
}

impl<R: Driver> Cuda<R> {
    /// Values of the host, on the device.
    pub(crate) fn list<T: Word>(&self, values: &[T]) -> Buffer<R> {
        let buffer = self.pool.take(size_of_val(values) as u64);
        if !values.is_empty() {
            self.done(self.pool.driver.upload(buffer.at(), bytes_of(values)));
        }
        buffer
    }
    /// Starts and ends, as the kernels' `Span`.
    pub(crate) fn spans(&self, spans: &[Span]) -> Buffer<R> {
        self.list(&spans.iter().flat_map(|s| [s.start, s.end]).collect::<Vec<u32>>())
    }
    /// Room for `len` f32 values.
    pub(crate) fn scratch_of(&self, len: usize) -> Buffer<R> {
        self.pool.take(4 * len as u64)
    }
    /// Room for `len` f64 values.
    pub(crate) fn doubles(&self, len: usize) -> Buffer<R> {
        self.pool.take(8 * len as u64)
    }
    /// The content of a buffer.
    pub(crate) fn content<T: Word + Default>(&self, buffer: &Buffer<R>, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        self.fetch(buffer.at(), &mut values);
        values
    }
    pub(crate) fn fetch<T: Word>(&self, at: Address, values: &mut [T]) {
        if values.is_empty() {
            return;
        }
        let len = size_of_val(values);
        // SAFETY: any bytes are numbers, and these are held alone.
        let bytes = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) };
        self.done(self.pool.driver.download(at, bytes));
    }
    /// What a call gave; a fault travels up the stack.
    pub(crate) fn done<T>(&self, result: Result<T, tercio_engine::Fault>) -> T {
        result.unwrap_or_else(|fault| fault.raise())
    }

    /// Launches a kernel over a grid; an empty one has nothing to do.
    pub(crate) fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        arguments: &[Argument],
    ) {
        if grid.contains(&0) {
            return;
        }
        let grid = grid.map(|n| u32::try_from(n).expect("a grid fits 32 bits"));
        let launch = Launch { kernel, grid, threads, shared: shared as u32, arguments };
        self.done(self.pool.driver.launch(&launch));
    }
    /// One block of 256 threads for each of `blocks`.
    pub(crate) fn rows(&self, kernel: &str, blocks: usize, arguments: &[Argument]) {
        self.launch(kernel, [blocks, 1, 1], 256, 0, arguments);
    }
    /// A thread for each of `n` elements.
    pub(crate) fn flat(&self, kernel: &str, n: usize, arguments: &[Argument]) {
        self.rows(kernel, n.div_ceil(256), arguments);
    }
    /// A warp for each of `n` rows.
    pub(crate) fn warps(&self, kernel: &str, n: usize, arguments: &[Argument]) {
        self.launch(kernel, [n.div_ceil(4), 1, 1], 128, 0, arguments);
    }
    /// Scratch for the partial sums of the columns of `rows` rows, and the grid that fills it.
    pub(crate) fn partial(&self, rows: usize, width: usize, columns: usize) -> (Buffer<R>, [usize; 3]) {
        let blocks = rows.div_ceil(PARTIAL_ROWS);
        (self.scratch_of(blocks * width), [columns.div_ceil(32), blocks, 1])
    }
    /// `total += ` the rows of `part`.
    pub(crate) fn fold(&self, part: &Buffer<R>, total: &ViewMut<'_, Self>) {
        let width = total.len;
        let parts = part.floats().checked_div(width).unwrap_or(0);
        let arguments = [part.pointer(), size(parts), number(width), total.pointer()];
        self.rows("fold_rows", width.div_ceil(32), &arguments);
    }
    /// Multiplies; `c` without elements is left alone, and a sum of no terms is zero.
    pub(crate) fn multiply(&self, product: Product) {
        let Product { rows, columns, depth, batch, c, accumulate, .. } = product;
        if rows == 0 || columns == 0 || batch == 0 {
            return;
        }
        if depth == 0 {
            if !accumulate {
                assert!(batch == 1 && c.stride == columns, "a product of no terms has no gaps");
                self.done(self.pool.driver.zero(c.at, 4 * (rows * columns) as u64));
            }
            return;
        }
        if self.pool.driver.factors() != Factors::Bf16 {
            return self.done(self.pool.driver.product(&product));
        }
        let (a, left) = self.in_bf16(product.a, [rows, depth], batch);
        let (b, right) = self.in_bf16(product.b, [depth, columns], batch);
        self.done(self.pool.driver.product(&Product { a, b, bf16: true, ..product }));
        // The memory goes back when the product is on its way: what comes next comes after it.
        drop((left, right));
    }
    /// A factor, multiplied as `rows x columns`, rounded to bf16: with the same strides, in memory of its own.
    fn in_bf16(&self, factor: Factor, [rows, columns]: [usize; 2], batch: usize) -> (Factor, Buffer<R>) {
        let (rows, columns) = if factor.transposed { (columns, rows) } else { (rows, columns) };
        let n = (batch - 1) * factor.step + (rows - 1) * factor.stride + columns;
        let memory = self.pool.take(2 * n as u64);
        self.flat("to_bf16", n, &[Argument::Pointer(factor.at), Argument::Pointer(memory.at()), size(n)]);
        (Factor { at: memory.at(), ..factor }, memory)
    }
}
