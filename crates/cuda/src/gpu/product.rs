//! Products by cuBLASLt. Its matrices are column by column, ours row by row: it is asked for `c^T = b^T a^T`.

use std::collections::HashMap;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use result::CublasError;

use crate::driver::{Address, Factor, Product};

/// Bytes that products may use beside their matrices. The same on every GPU, for algorithms are chosen by it.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Algorithms that are kept.
const MOST_CHOSEN: usize = 4096;

/// The library, and the algorithms that it chose so far.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    tf32: bool,
    chosen: HashMap<Key, Chosen>,
}

// SAFETY: a handle may be used by any thread, by one at a time.
unsafe impl Send for Products {}

/// What an algorithm is chosen by: everything of a product but where its matrices are, and how these are aligned.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 4],
    strides: [usize; 6],
    transposed: [bool; 2],
    bf16: bool,
    alignments: [u32; 3],
}

/// A description of a product with its algorithm.
struct Chosen {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Bytes that an address is a multiple of, 256 at most.
fn alignment(at: Address) -> u32 {
    1 << at.trailing_zeros().min(8)
}

impl Products {
    /// Opens the library. `workspace` has [`WORKSPACE`] bytes.
    pub(super) fn new(workspace: CUdeviceptr, tf32: bool) -> Result<Products, CublasError> {
        let handle = result::create_handle()?;
        Ok(Products { handle, workspace, tf32, chosen: HashMap::new() })
    }
    /// Multiplies, in the order of the stream.
    pub(super) fn multiply(&mut self, p: &Product, stream: CUstream) -> Result<(), CublasError> {
        let key = Key {
            sizes: [p.rows, p.columns, p.depth, p.batch],
            strides: [p.a.stride, p.b.stride, p.c.stride, p.a.step, p.b.step, p.c.step],
            transposed: [p.a.transposed, p.b.transposed],
            bf16: p.bf16,
            alignments: [alignment(p.a.at), alignment(p.b.at), alignment(p.c.at)],
        };
        if !self.chosen.contains_key(&key) {
            // Shapes of questions and pairs are without end.
            if self.chosen.len() >= MOST_CHOSEN {
                self.forget();
            }
            let chosen = self.choose(p, &key.alignments)?;
            self.chosen.insert(key, chosen);
            return self.multiply(p, stream);
        }
        let Chosen { operation, layouts: [left, right, to], algorithm } = &self.chosen[&key];
        let (one, zero) = (1f32, 0f32);
        let beta = if p.accumulate { &one } else { &zero };
        let pointer = |at: Address| at as *mut std::ffi::c_void;
        // SAFETY: descriptions live as long as the handle; who asks for a product answers for its matrices.
        unsafe {
            result::matmul(
                self.handle,
                *operation,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(beta).cast(),
                pointer(p.b.at),
                *left,
                pointer(p.a.at),
                *right,
                pointer(p.c.at),
                *to,
                pointer(p.c.at),
                *to,
                algorithm,
                self.workspace as *mut std::ffi::c_void,
                WORKSPACE,
                stream.cast(),
            )
        }
    }
    fn choose(&self, p: &Product, [a, b, c]: &[u32; 3]) -> Result<Chosen, CublasError> {
        use sys::cublasComputeType_t as Compute;
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let factors = if p.bf16 { CUDA_R_16BF } else { CUDA_R_32F };
        let tf32 = self.tf32 && !p.bf16;
        let compute = if tf32 { Compute::CUBLAS_COMPUTE_32F_FAST_TF32 } else { Compute::CUBLAS_COMPUTE_32F };
        let operation = result::create_matmul_desc(compute, CUDA_R_32F)?;
        use sys::cublasLtMatmulDescAttributes_t as Of;
        let sides = [
            (Of::CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed),
            (Of::CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed),
        ];
        for (side, transposed) in sides {
            // cublasOperation_t: N is 0, T is 1.
            let turned = i32::from(transposed);
            // SAFETY: an attribute of four bytes.
            unsafe { result::set_matmul_desc_attribute(operation, side, (&raw const turned).cast(), 4)? };
        }
        // As multiplied, row by row: b is depth x columns, a rows x depth, c rows x columns.
        let layouts = [
            layout(factors, &p.b, [p.depth, p.columns], p.batch)?,
            layout(factors, &p.a, [p.rows, p.depth], p.batch)?,
            layout(CUDA_R_32F, &p.c, [p.rows, p.columns], p.batch)?,
        ];
        let preference = result::create_matmul_pref()?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Prefer;
        let aligned = [
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ];
        let [left, right, to] = layouts;
        // SAFETY: attributes of the sizes that the library's documentation gives; all descriptions are alive.
        let found = unsafe {
            let most = Prefer::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(
                preference,
                most,
                std::ptr::from_ref(&WORKSPACE).cast(),
                size_of::<usize>(),
            )?;
            for (side, bytes) in aligned {
                result::set_matmul_pref_attribute(preference, side, std::ptr::from_ref(bytes).cast(), 4)?;
            }
            let found =
                result::get_matmul_algo_heuristic(self.handle, operation, left, right, to, to, preference);
            result::destroy_matmul_pref(preference)?;
            found?
        };
        Ok(Chosen { operation, layouts, algorithm: found.algo })
    }
    /// Closes the library; all work is done.
    pub(super) fn release(&mut self) {
        self.forget();
        // SAFETY: made by this, and not used after it.
        unsafe {
            let _ = result::destroy_handle(self.handle);
        }
    }
    /// Forgets what was chosen: descriptions are needed during a call only.
    fn forget(&mut self) {
        // SAFETY: made by `choose`, and taken out here.
        unsafe {
            for (_, chosen) in self.chosen.drain() {
                let _ = result::destroy_matmul_desc(chosen.operation);
                for layout in chosen.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
        }
    }
}

/// The layout of a factor that is multiplied as `rows x columns`: as it is stored, with rows for columns.
fn layout(
    kind: sys::cudaDataType_t,
    factor: &Factor,
    [rows, columns]: [usize; 2],
    batch: usize,
) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let (rows, columns) = if factor.transposed { (columns, rows) } else { (rows, columns) };
    let layout = result::create_matrix_layout(kind, columns as u64, rows as u64, factor.stride as i64)?;
    if batch > 1 {
        use sys::cublasLtMatrixLayoutAttribute_t as Of;
        let (count, step) = (batch as i32, factor.step as i64);
        // SAFETY: attributes of four and eight bytes.
        unsafe {
            let attribute = Of::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            result::set_matrix_layout_attribute(layout, attribute, (&raw const count).cast(), 4)?;
            let attribute = Of::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            result::set_matrix_layout_attribute(layout, attribute, (&raw const step).cast(), 8)?;
        }
    }
    Ok(layout)
}
