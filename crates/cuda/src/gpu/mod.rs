//! The driver of a real GPU: NVIDIA's libraries, found when it is opened, one context, one stream.

mod compile;
pub mod nccl;
mod product;
mod staging;

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use result::DriverError;
use sys::CUdevice_attribute_enum as Attribute;
use tercio_engine::Fault;

use crate::driver::{Address, Argument, Driver, Factors, Launch, Product};
use crate::sources;
use nccl::Communicator;
use product::{Products, WORKSPACE};
use staging::Staging;

/// The least compute capability that kernels are built and checked for: Ampere's.
const LEAST: (i32, i32) = (8, 0);

/// How often a rank that waits with others looks whether they are still there.
const LOOK: Duration = Duration::from_millis(200);
/// How long a rank waits without rest.
const SHORT: Duration = Duration::from_micros(200);

/// A GPU.
pub struct Gpu {
    name: String,
    factors: Factors,
    architecture: String,
    /// Multiprocessors, and the version of cuBLASLt: products are cut up by them.
    processors: i32,
    library: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    kernels: HashMap<&'static str, sys::CUfunction>,
    staging: Mutex<Staging>,
    products: Mutex<Products>,
    workspace: sys::CUdeviceptr,
    /// The ranks that this one sums with, if there are any.
    ranks: Mutex<Option<Communicator>>,
    /// Whether every launch is waited for: an error then names its kernel.
    waits: bool,
}

// SAFETY: contexts, streams and functions may be used by any thread; what may be used by one at a time is behind a lock.
unsafe impl Send for Gpu {}
unsafe impl Sync for Gpu {}

/// Whether there is a GPU that could be opened; if not, why.
///
/// # Errors
/// No driver, a driver that does not work, or no GPU.
pub fn count() -> Result<usize, Fault> {
    // SAFETY: looks for the library only.
    if !unsafe { sys::is_culib_present() } {
        return Err(Fault("no GPU can be used: NVIDIA's driver (libcuda.so) is not found".into()));
    }
    let fault = |e: DriverError| Fault(format!("no GPU can be used: NVIDIA's driver says {}", said(e)));
    result::init().map_err(fault)?;
    match result::device::get_count().map_err(fault)? {
        0 => Err(Fault(
            "no GPU can be used: NVIDIA's driver finds none (CUDA_VISIBLE_DEVICES may hide them)".into(),
        )),
        n => Ok(n as usize),
    }
}

/// An error of the driver, in its own words.
fn said(error: DriverError) -> String {
    let text = |words: Result<&std::ffi::CStr, DriverError>| words.map(|w| w.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Ok(name), Ok(words)) => format!("{name} ({words})"),
        _ => format!("{:?}", error.0),
    }
}

impl Gpu {
    /// Opens GPU `ordinal` of those that are visible, with kernels for its architecture.
    ///
    /// # Errors
    /// No such GPU, one that is too old, no cuBLASLt, no NVRTC and nothing kept of it, no memory.
    pub fn open(ordinal: usize, factors: Factors) -> Result<Gpu, Fault> {
        let found = count()?;
        if ordinal >= found {
            let numbers =
                if found == 1 { "number 0 only".into() } else { format!("numbers 0 to {}", found - 1) };
            return Err(Fault(format!(
                "there is no GPU {ordinal}: {numbers} (CUDA_VISIBLE_DEVICES may hide others)"
            )));
        }
        let fault = |e: DriverError| Fault(format!("GPU {ordinal} cannot be used: {}", said(e)));
        let device = result::device::get(ordinal as i32).map_err(fault)?;
        let name = result::device::get_name(device).map_err(fault)?;
        // SAFETY: a device that exists.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) }.map_err(fault);
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < LEAST {
            let (major, minor) = capability;
            return Err(Fault(format!(
                "GPU {ordinal} ({name}) has compute capability {major}.{minor}; {}.{} (A100 and later) is the least that works",
                LEAST.0, LEAST.1
            )));
        }
        // SAFETY: looks for the library only.
        if !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
            return Err(Fault(
                "NVIDIA's library of products (libcublasLt.so) is not found: install the CUDA toolkit, or its package of \
                 cuBLAS, and put its folder on LD_LIBRARY_PATH"
                    .into(),
            ));
        }
        let architecture = format!("sm_{}{}", capability.0, capability.1);
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        // SAFETY: the device exists; the context is released when the Gpu is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(fault)?;
        unsafe { result::ctx::set_current(context) }.map_err(fault)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(fault)?;
        let staging = Mutex::new(Staging::new().map_err(fault)?);
        // SAFETY: the context is current.
        let workspace = unsafe { result::malloc_sync(WORKSPACE) }.map_err(fault)?;
        let products = Products::new(workspace, factors == Factors::Tf32)
            .map_err(|e| Fault(format!("GPU {ordinal} ({name}): cuBLASLt cannot be used: {e:?}")))?;
        let waits = std::env::var_os("TERCIO_CUDA_WAIT").is_some_and(|v| v == "1");
        let mut gpu = Gpu {
            name: format!("GPU {ordinal} ({name})"),
            factors,
            architecture,
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            // SAFETY: asks for a number.
            library: unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() },
            device,
            context,
            stream,
            modules: Vec::new(),
            kernels: HashMap::new(),
            staging,
            products: Mutex::new(products),
            workspace,
            ranks: Mutex::new(None),
            waits,
        };
        gpu.load(shared)?;
        Ok(gpu)
    }
    /// Loads all kernels; each may use as much shared memory as the GPU has for a block.
    fn load(&mut self, shared: i32) -> Result<(), Fault> {
        let cache = compile::cache_folder();
        for &source in sources::KERNELS {
            let code = compile::machine_code(source, &self.architecture, cache.as_deref())?;
            let fault =
                |e: DriverError| Fault(format!("{}: {} cannot be loaded: {}", self.name, source.0, said(e)));
            // SAFETY: machine code that NVRTC made; the driver copies it.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) }.map_err(fault)?;
            self.modules.push(module);
            for name in sources::declared(source.1) {
                let name_of = CString::new(name).expect("a name has no zero");
                // SAFETY: the module is loaded and stays so.
                let kernel = unsafe {
                    let kernel = result::module::get_function(module, name_of).map_err(fault)?;
                    let most =
                        sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    let fixed = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                    let fixed = result::function::get_function_attribute(kernel, fixed).map_err(fault)?;
                    result::function::set_function_attribute(kernel, most, shared - fixed).map_err(fault)?;
                    kernel
                };
                self.kernels.insert(name, kernel);
            }
        }
        Ok(())
    }
    /// What tells this GPU from all others, on whichever host.
    ///
    /// # Errors
    /// What the driver says.
    pub fn identity(&self) -> Result<Vec<u8>, Fault> {
        let identity = result::device::get_uuid(self.device).map_err(|e| self.fault("has no identity", e))?;
        Ok(identity.bytes.iter().map(|b| *b as u8).collect())
    }
    /// Joins the other ranks' GPUs, all at a time: from now on they sum together ([`Driver::sum`]). `lost` is asked while this rank waits.
    ///
    /// # Errors
    /// No NCCL, or what it says.
    pub fn join(
        &self,
        meeting: nccl::Meeting,
        rank: usize,
        ranks: usize,
        lost: nccl::Lost,
    ) -> Result<(), Fault> {
        self.here()?;
        *locked(&self.ranks) = Some(Communicator::new(meeting, rank, ranks, lost)?);
        Ok(())
    }
    /// Waits for the stream; with other ranks not blindly.
    fn settle(&self) -> Result<(), Fault> {
        let ranks = locked(&self.ranks);
        let Some(ranks) = &*ranks else {
            // SAFETY: the stream lives.
            return unsafe { result::stream::synchronize(self.stream) }.map_err(|e| self.fault("failed", e));
        };
        let since = Instant::now();
        let mut looked = since;
        loop {
            // NCCL's stream too: what gives memory back waits for all.
            // SAFETY: the streams live.
            let states = [self.stream, ranks.stream()].map(|stream| unsafe { sys::cuStreamQuery(stream) });
            let (idle, busy) = (sys::CUresult::CUDA_SUCCESS, sys::CUresult::CUDA_ERROR_NOT_READY);
            if let Some(error) = states.into_iter().find(|s| *s != idle && *s != busy) {
                return Err(self.fault("failed", DriverError(error)));
            }
            if states == [idle, idle] {
                return Ok(());
            }
            if looked.elapsed() > LOOK {
                ranks.look_around()?;
                looked = Instant::now();
            }
            // Most waits are short; a long one leaves the core to others.
            if since.elapsed() > SHORT {
                std::thread::sleep(SHORT / 4);
            } else {
                std::hint::spin_loop();
            }
        }
    }
    /// Makes the context that of this thread.
    fn here(&self) -> Result<(), Fault> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| self.fault("could not be reached", e))
    }
    fn fault(&self, what: &str, error: DriverError) -> Fault {
        let hint = if self.waits { "" } else { "; with TERCIO_CUDA_WAIT=1 the error names its kernel" };
        Fault(format!("{} {what}: {}{hint}", self.name, said(error)))
    }
}

/// The content of a lock: a panic while it was held ended the work that it belonged to.
fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver for Gpu {
    fn name(&self) -> String {
        self.name.clone()
    }
    fn arithmetic(&self) -> String {
        let factors = match self.factors {
            Factors::F32 => "f32",
            Factors::Tf32 => "tf32",
            Factors::Bf16 => "bf16",
        };
        let Gpu { architecture, processors, library, .. } = self;
        format!("f32 on {architecture} of {processors}, products of {factors} by cuBLASLt {library}")
    }
    fn factors(&self) -> Factors {
        self.factors
    }
    fn allocate(&self, bytes: u64) -> Result<Option<Address>, Fault> {
        self.here()?;
        // SAFETY: more than 0 bytes; the context is current.
        match unsafe { result::malloc_sync(bytes as usize) } {
            Ok(at) => Ok(Some(at)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(self.fault("gave no memory", error)),
        }
    }
    fn release(&self, at: Address, _bytes: u64) -> Result<(), Fault> {
        self.here()?;
        // The call below waits for all work, and would wait for a lost rank for ever.
        if self.sums() {
            self.settle()?;
        }
        // SAFETY: from `allocate`.
        unsafe { result::free_sync(at) }.map_err(|e| self.fault("took no memory back", e))
    }
    fn room(&self) -> Option<u64> {
        self.here().ok()?;
        result::mem_get_info().ok().map(|(free, _)| free as u64)
    }
    fn zero(&self, at: Address, bytes: u64) -> Result<(), Fault> {
        self.here()?;
        // SAFETY: the caller's memory.
        unsafe { result::memset_d8_async(at, 0, bytes as usize, self.stream) }
            .map_err(|e| self.fault("could not clear memory", e))
    }
    fn upload(&self, to: Address, from: &[u8]) -> Result<(), Fault> {
        self.here()?;
        // As in `release`: where pinned memory has to be waited for, it is done with an eye on the other ranks.
        if self.sums() && locked(&self.staging).must_wait(from.len()) {
            self.settle()?;
        }
        locked(&self.staging)
            .upload(to, from, self.stream)
            .map_err(|e| self.fault("could not be given memory's content", e))
    }
    fn download(&self, from: Address, to: &mut [u8]) -> Result<(), Fault> {
        self.here()?;
        // A copy into memory that is not pinned comes back when it is done: with other ranks the waiting is done before, not blindly.
        if self.sums() {
            self.settle()?;
        }
        // SAFETY: the caller's memory; it is waited for.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }
            .map_err(|e| self.fault("could not give memory's content", e))?;
        self.wait()
    }
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), Fault> {
        self.here()?;
        // SAFETY: the caller's memory.
        unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.stream) }
            .map_err(|e| self.fault("could not copy memory", e))
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        self.here()?;
        let Some(&kernel) = self.kernels.get(launch.kernel) else {
            return Err(Fault(format!("there is no kernel {}", launch.kernel)));
        };
        let mut places: Vec<*mut std::ffi::c_void> = Vec::with_capacity(launch.arguments.len());
        for argument in launch.arguments {
            places.push(match argument {
                Argument::Real(at, _) | Argument::RealMut(at, _) | Argument::Pointer(at) => {
                    std::ptr::from_ref(at).cast_mut().cast()
                }
                Argument::Value(value) => value.pointer().cast_mut().cast(),
            });
        }
        let ([x, y, z], threads, shared) = (launch.grid, launch.threads, launch.shared);
        // SAFETY: the driver copies the arguments during the call; the caller answers for what they point to.
        let done = unsafe {
            result::launch_kernel(kernel, (x, y, z), (threads, 1, 1), shared, self.stream, &mut places)
        };
        let what = || format!("did not launch {} over {:?} blocks of {threads}", launch.kernel, launch.grid);
        done.map_err(|e| self.fault(&what(), e))?;
        if self.waits {
            // SAFETY: the stream lives.
            let ended = unsafe { result::stream::synchronize(self.stream) };
            ended.map_err(|e| self.fault(&format!("failed in {}", launch.kernel), e))?;
        }
        Ok(())
    }
    fn product(&self, product: &Product) -> Result<(), Fault> {
        self.here()?;
        locked(&self.products).multiply(product, self.stream).map_err(|e| {
            let Product { rows, depth, columns, batch, .. } = product;
            let sizes = format!("{batch} products of {rows} x {depth} and {depth} x {columns}");
            Fault(format!("{}: cuBLASLt did not multiply ({sizes}): {:?}", self.name, e.0))
        })
    }
    fn wait(&self) -> Result<(), Fault> {
        self.here()?;
        self.settle()
    }
    fn sums(&self) -> bool {
        locked(&self.ranks).is_some()
    }
    fn sum(&self, at: Address, len: usize) -> Result<(), Fault> {
        self.here()?;
        locked(&self.ranks).as_ref().map_or(Ok(()), |ranks| ranks.sum(at, len, self.stream))
    }
    fn end_sums(&self) -> Result<(), Fault> {
        self.here()?;
        locked(&self.ranks).as_ref().map_or(Ok(()), |ranks| ranks.end(self.stream))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.here().is_err() {
            return;
        }
        // A GPU that does not answer any more has nothing to close. SAFETY: nothing is used after this.
        unsafe {
            let settled = self.settle();
            if let Some(ranks) = &mut *locked(&self.ranks) {
                ranks.release(settled.is_ok());
            }
            locked(&self.products).release();
            locked(&self.staging).release();
            let _ = result::free_sync(self.workspace);
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A GPU as it is seen without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of its memory.
    pub memory: u64,
}

impl Card {
    /// Whether kernels are built for it.
    pub fn works(&self) -> bool {
        self.capability >= LEAST
    }
}

/// What this host has of GPUs and of NVIDIA's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The GPUs that are visible, in their order; or why there is none.
    pub cards: Result<Vec<Card>, Fault>,
    /// Whether the library of products is found.
    pub products: bool,
    /// Whether the runtime compiler is found.
    pub compiler: bool,
}

/// Looks for GPUs and for NVIDIA's libraries; opens none.
pub fn survey() -> Survey {
    let card = |ordinal: usize| {
        let device = result::device::get(ordinal as i32)?;
        // SAFETY: a device that exists.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) };
        Ok(Card {
            name: result::device::get_name(device)?,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: a device that exists.
            memory: unsafe { result::device::total_mem(device)? } as u64,
        })
    };
    let fault = |e: DriverError| Fault(format!("NVIDIA's driver tells nothing of a GPU: {}", said(e)));
    let all = |n: usize| (0..n).map(card).collect::<Result<_, _>>().map_err(fault);
    // SAFETY: looks for the libraries only.
    let (products, compiler) =
        unsafe { (cudarc::cublaslt::sys::is_culib_present(), cudarc::nvrtc::sys::is_culib_present()) };
    Survey { cards: count().and_then(all), products, compiler }
}
