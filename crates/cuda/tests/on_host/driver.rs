//! A driver whose GPU is the host: the kernels' sources run there ([`super::library`]), products are plain loops, and every
//! allocation lies between guards that nobody may write.
//!
//! Memory is f32 on the device's side. With [`Storage::Bf16`] it is rounded to bf16 on the way into a kernel and out of it,
//! where the kernel takes the storage type.

use std::collections::HashMap;
use std::sync::Mutex;

use tercio_cuda::driver::{Address, Driver, Factor, Factors, Launch, Product};
use tercio_cuda::{Cuda, Pool};
use tercio_engine::Fault;

use super::library::{Library, Storage};

/// Bytes of a guard.
const GUARD: usize = 256;
/// A guard's bytes: as f32 and f64 so great that who reads it gives infinities, as a number far beyond every list.
const BYTE: u8 = 0x7e;

/// The driver; `descending`: blocks and threads run in the other order, which may not change a bit.
pub struct OnHost {
    pub library: &'static Library,
    descending: bool,
    factors: Factors,
    memory: Mutex<HashMap<Address, Box<[u64]>>>,
}

impl OnHost {
    pub fn with_factors(storage: Storage, descending: bool, factors: Factors) -> Cuda<OnHost> {
        let library = Library::of(storage);
        let driver = OnHost { library, descending, factors, memory: Mutex::default() };
        Cuda::new(Pool::exact(driver, u64::MAX))
    }
    /// A device whose buffers are blocks of their own, so that guards are at their very ends.
    pub fn device(storage: Storage, descending: bool) -> Cuda<OnHost> {
        Self::with_factors(storage, descending, Factors::F32)
    }
}

/// The guards of a block of so many bytes.
fn check(block: &[u64], bytes: usize) {
    // SAFETY: the bytes of numbers.
    let all = unsafe { std::slice::from_raw_parts(block.as_ptr().cast::<u8>(), size_of_val(block)) };
    let whole = all[..GUARD].iter().chain(&all[GUARD + bytes..]).all(|b| *b == BYTE);
    if !std::thread::panicking() {
        assert!(whole, "something wrote beyond a buffer of {bytes} bytes");
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        let left = self.memory.get_mut().map_or(0, |m| m.len());
        if !std::thread::panicking() {
            assert_eq!(left, 0, "buffers were not given back");
        }
    }
}

impl Driver for OnHost {
    fn name(&self) -> String {
        "the host".into()
    }
    fn arithmetic(&self) -> String {
        "f32".into()
    }
    fn factors(&self) -> Factors {
        self.factors
    }
    fn allocate(&self, bytes: u64) -> Result<Option<Address>, Fault> {
        assert!(bytes > 0, "nothing was asked for");
        let bytes = bytes as usize;
        let words = (2 * GUARD + bytes).div_ceil(8);
        let mut block = vec![u64::from_ne_bytes([BYTE; 8]); words].into_boxed_slice();
        let at = block.as_mut_ptr() as Address + GUARD as Address;
        // SAFETY: within the block. Fresh memory is NaN in every type of float.
        unsafe { (at as *mut u8).write_bytes(0xff, bytes) };
        self.memory.lock().unwrap().insert(at, block);
        Ok(Some(at))
    }
    fn release(&self, at: Address, bytes: u64) -> Result<(), Fault> {
        let block = self.memory.lock().unwrap().remove(&at).expect("memory that was given");
        check(&block, bytes as usize);
        Ok(())
    }
    fn room(&self) -> Option<u64> {
        None
    }
    fn zero(&self, at: Address, bytes: u64) -> Result<(), Fault> {
        // SAFETY: memory of `allocate`; guards tell if not.
        unsafe { (at as *mut u8).write_bytes(0, bytes as usize) };
        Ok(())
    }
    fn upload(&self, to: Address, from: &[u8]) -> Result<(), Fault> {
        // SAFETY: as in `zero`.
        unsafe { (to as *mut u8).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }
    fn download(&self, from: Address, to: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: as in `zero`.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from as *const u8, to.len()) };
        Ok(())
    }
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), Fault> {
        // SAFETY: as in `zero`.
        unsafe { (to as *mut u8).copy_from_nonoverlapping(from as *const u8, bytes as usize) };
        Ok(())
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        self.library.launch(launch, self.descending).map_err(Fault)
    }
    fn product(&self, p: &Product) -> Result<(), Fault> {
        let at = |f: &Factor, batch: usize, i: usize, j: usize| {
            let (i, j) = if f.transposed { (j, i) } else { (i, j) };
            let element = batch * f.step + i * f.stride + j;
            // SAFETY: as in `zero`.
            unsafe {
                match p.bf16 {
                    false => (f.at as *const f32).add(element).read(),
                    true => f32::from_bits((*(f.at as *const u16).add(element) as u32) << 16),
                }
            }
        };
        for batch in 0..p.batch {
            for i in 0..p.rows {
                for j in 0..p.columns {
                    let term = |k| at(&p.a, batch, i, k) as f64 * at(&p.b, batch, k, j) as f64;
                    let sum = (0..p.depth).map(term).sum::<f64>() as f32;
                    let element = batch * p.c.step + i * p.c.stride + j;
                    // SAFETY: as in `zero`.
                    let target = unsafe { &mut *(p.c.at as *mut f32).add(element) };
                    *target = if p.accumulate { *target + sum } else { sum };
                }
            }
        }
        Ok(())
    }
    fn wait(&self) -> Result<(), Fault> {
        Ok(())
    }
}
