//! The thin layer between the device and a GPU: memory, copies, launches and products, on one stream, in the order of the calls.
//!
//! [`crate::Gpu`] calls NVIDIA's libraries. The tests have two others: one that runs the kernels' sources on the host, and
//! one that only writes down what it is asked for. So nothing above this trait knows whether there is a GPU.

use tercio_engine::{Dropout, Fault};

/// A place in the device's memory.
pub type Address = u64;

/// Most bytes of a value that a kernel takes.
const MOST: usize = 96;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// So many elements of the type that activations are stored in, which the kernel reads; `const real *`.
    Real(Address, usize),
    /// The same, which the kernel writes; `real *`.
    RealMut(Address, usize),
    /// Any other pointer; 0 where there is nothing.
    Pointer(Address),
    /// A value, by its bytes.
    Value(Value),
}

/// The bytes of a plain value, laid out as in C.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value {
    words: [u64; MOST / 8],
    len: usize,
}

impl Value {
    /// Where the bytes lie.
    pub fn pointer(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Argument {
    /// A value that is laid out as in C.
    pub fn value<T: Copy + 'static>(value: T) -> Argument {
        const { assert!(size_of::<T>() <= MOST && align_of::<T>() <= 8, "a value of a kernel is too large") };
        let mut words = [0u64; MOST / 8];
        // SAFETY: the value fits, and is aligned, as asserted above; bytes between its fields are not looked at by a kernel.
        unsafe { words.as_mut_ptr().cast::<T>().write(value) };
        Argument::Value(Value { words, len: size_of::<T>() })
    }
    /// A pointer to nothing.
    pub const NOTHING: Argument = Argument::Pointer(0);
}
impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Argument::value(value)
    }
}
impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Argument::value(value)
    }
}
impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Argument::value(value)
    }
}

/// What kernels take of a dropout; `Dropout` of `kernels/random.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DropoutArgument {
    key: u64,
    threshold: u32,
    scale: f32,
    on: u32,
    unused: u32,
}
impl From<Option<Dropout>> for DropoutArgument {
    fn from(dropout: Option<Dropout>) -> Self {
        let (key, threshold, scale) = dropout.map_or((0, 0, 1.0), |d| (d.key(), d.threshold, d.scale));
        DropoutArgument { key, threshold, scale, on: dropout.is_some() as u32, unused: 0 }
    }
}
impl From<Option<Dropout>> for Argument {
    fn from(value: Option<Dropout>) -> Self {
        Argument::value(DropoutArgument::from(value))
    }
}

/// One launch of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// Blocks; none is 0.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory beside what the kernel declares.
    pub shared: u32,
    /// What it is given.
    pub arguments: &'a [Argument],
}

/// How the factors of products are rounded. Sums are of f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// Not.
    F32,
    /// To TF32: ten bits behind the point, by the GPU's tensor cores.
    Tf32,
    /// To bf16: seven bits.
    Bf16,
}

/// A row-major factor of a product, as it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// First element: f32, or bf16 where the product says so.
    pub at: Address,
    /// Distance of two stored rows, in elements.
    pub stride: usize,
    /// Distance of the factors of two products of a batch, in elements.
    pub step: usize,
    /// Whether the stored matrix is used transposed.
    pub transposed: bool,
}

/// A batch of products `c = a b`, or `c += a b`: `a` of `rows x depth`, `b` of `depth x columns`, both after transposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Rows of `a` and `c`.
    pub rows: usize,
    /// Columns of `b` and `c`.
    pub columns: usize,
    /// Columns of `a`, rows of `b`.
    pub depth: usize,
    /// How many products.
    pub batch: usize,
    /// The left factor.
    pub a: Factor,
    /// The right factor.
    pub b: Factor,
    /// Whether the factors are bf16.
    pub bf16: bool,
    /// Where the result goes; f32, not transposed.
    pub c: Factor,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
}

/// A GPU, or what stands for one. All work is done in the order of the calls; calls that give nothing back need not wait for it.
pub trait Driver: Send + Sync + 'static {
    /// What it is, for people: the GPU's name.
    fn name(&self) -> String;
    /// What the bits of a result depend on beside the inputs.
    fn arithmetic(&self) -> String;
    /// How factors of products are rounded. To bf16 the device does it, in its own kernel.
    fn factors(&self) -> Factors;
    /// So many bytes, more than 0; `None`: there is no room.
    ///
    /// # Errors
    /// A GPU that does not answer.
    fn allocate(&self, bytes: u64) -> Result<Option<Address>, Fault>;
    /// Gives memory back, once all work so far is done.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn release(&self, at: Address, bytes: u64) -> Result<(), Fault>;
    /// Bytes that can still be had, if that is known.
    fn room(&self) -> Option<u64>;
    /// `bytes` zeros.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn zero(&self, at: Address, bytes: u64) -> Result<(), Fault>;
    /// From the host; `from` may change as soon as the call is back.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn upload(&self, to: Address, from: &[u8]) -> Result<(), Fault>;
    /// To the host, once all work so far is done.
    ///
    /// # Errors
    /// As [`Driver::allocate`]; what an earlier launch did wrong.
    fn download(&self, from: Address, to: &mut [u8]) -> Result<(), Fault>;
    /// Within the device's memory; the two do not overlap.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), Fault>;
    /// Runs a kernel.
    ///
    /// # Errors
    /// A kernel, or a grid, that the GPU does not take.
    fn launch(&self, launch: &Launch<'_>) -> Result<(), Fault>;
    /// Multiplies.
    ///
    /// # Errors
    /// Products that the library does not take.
    fn product(&self, product: &Product) -> Result<(), Fault>;
    /// Waits until all work so far is done.
    ///
    /// # Errors
    /// What an earlier launch did wrong; a rank that this one sums with was lost.
    fn wait(&self) -> Result<(), Fault>;
    /// Whether there are other ranks to sum with ([`Driver::sum`]).
    fn sums(&self) -> bool {
        false
    }
    /// Begins to sum so many f32 over all ranks, in place, after all work so far and beside what comes next, in the order of the calls, which
    /// is the same on all ranks.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn sum(&self, _at: Address, _len: usize) -> Result<(), Fault> {
        Err(Fault("there is no rank to sum with".into()))
    }
    /// What is asked for from now on comes after all sums so far.
    ///
    /// # Errors
    /// As [`Driver::allocate`].
    fn end_sums(&self) -> Result<(), Fault> {
        Ok(())
    }
}
