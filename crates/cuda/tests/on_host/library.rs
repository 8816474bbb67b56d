//! The kernels of `kernels/` compiled for the host: built once for a state of the sources, loaded, launched.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tercio_cuda::driver::{Argument, Launch};

use super::memory::Guarded;

/// How activations are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    F32,
    Bf16,
}

type HostLaunch = unsafe extern "C" fn(
    *const c_char,
    *const c_uint,
    c_uint,
    u64,
    *mut *mut c_void,
    *const u64,
    c_uint,
    c_int,
) -> *const c_char;
type Names = unsafe extern "C" fn() -> *const c_char;

/// The kernels with one type of storage.
pub struct Library {
    storage: Storage,
    library: libloading::Library,
}

impl Library {
    /// The library for a storage type, compiled if the sources have changed.
    pub fn of(storage: Storage) -> &'static Library {
        static LIBRARIES: [OnceLock<Library>; 2] = [OnceLock::new(), OnceLock::new()];
        LIBRARIES[(storage == Storage::Bf16) as usize].get_or_init(|| {
            let path = compiled(storage);
            // SAFETY: a library that was made by `compiled`; what it runs at loading only fills its table of kernels.
            let library = unsafe { libloading::Library::new(&path) };
            let library = library.unwrap_or_else(|e| panic!("{}: cannot be loaded: {e}", path.display()));
            Library { storage, library }
        })
    }
    /// The names of all kernels.
    pub fn kernels(&self) -> Vec<String> {
        // SAFETY: the function's own signature; the text lives until this thread calls again.
        let text = unsafe {
            let names = self.library.get::<Names>(b"host_kernels").expect("the library has it");
            CStr::from_ptr(names()).to_string_lossy().into_owned()
        };
        text.lines().map(str::to_owned).collect()
    }
    /// Runs a kernel over a grid. The error is the shim's sentence.
    pub fn launch(&self, launch: &Launch<'_>, descending: bool) -> Result<(), String> {
        assert!(!launch.grid.contains(&0), "as on a GPU, an empty grid cannot be launched");
        let converted: Vec<Option<Guarded<u16>>> =
            launch.arguments.iter().map(|a| self.converted(a)).collect();
        let mut pointers: Vec<u64> = (launch.arguments.iter().zip(&converted))
            .map(|(a, c)| match (a, c) {
                (_, Some(c)) => c.pointer() as u64,
                (Argument::Real(at, _) | Argument::RealMut(at, _) | Argument::Pointer(at), _) => *at,
                (Argument::Value(_), _) => 0,
            })
            .collect();
        let mut places: Vec<*mut c_void> = Vec::new();
        let mut sizes: Vec<u64> = Vec::new();
        for (a, pointer) in launch.arguments.iter().zip(&mut pointers) {
            let (place, size) = match a {
                Argument::Value(value) => (value.pointer().cast_mut().cast(), value.len()),
                _ => (std::ptr::from_mut(pointer).cast(), size_of::<u64>()),
            };
            places.push(place);
            sizes.push(size as u64);
        }
        let name = CString::new(launch.kernel).expect("a name has no zero");
        let count = places.len() as c_uint;
        // SAFETY: number and sizes of the arguments are compared with the kernel's; what lies behind pointers is the test's.
        let error = unsafe {
            let run = self.library.get::<HostLaunch>(b"host_launch").expect("the library has it");
            let error = run(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared.into(),
                places.as_mut_ptr(),
                sizes.as_ptr(),
                count,
                descending as c_int,
            );
            (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
        };
        for (a, c) in launch.arguments.iter().zip(&converted) {
            if let (Argument::RealMut(at, len), Some(c)) = (a, c) {
                for i in 0..*len {
                    // SAFETY: the caller's memory of `len` elements.
                    unsafe { (*at as *mut f32).add(i).write(f32::from_bits((c.values()[i] as u32) << 16)) };
                }
            }
        }
        error.map_or(Ok(()), Err)
    }
    /// Memory in bf16 for an argument of the storage type, where that is not f32.
    fn converted(&self, argument: &Argument) -> Option<Guarded<u16>> {
        let (Argument::Real(at, len) | Argument::RealMut(at, len)) = *argument else {
            return None;
        };
        if self.storage == Storage::F32 || at == 0 {
            return None;
        }
        // SAFETY: the caller's memory of `len` elements.
        let values = (0..len).map(|i| to_bf16(unsafe { (at as *const f32).add(i).read() }));
        Some(Guarded::new(values.collect(), 0x7f7f))
    }
}

/// The nearest bf16, ties to even.
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits as u64 + 0x7fff + (bits >> 16 & 1) as u64) >> 16) as u16
}

/// Where the kernels' sources are.
pub fn sources() -> PathBuf {
    // By the folder's name, for tests of other crates include this file too.
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/kernels")
}

/// Kernels, and headers, by name.
pub fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("a readable folder").path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == ending));
    files.sort();
    files
}

/// The kernels for the host as a library of their own.
fn compiled(storage: Storage) -> PathBuf {
    let mut units = files(&sources().join("../tests/on_host"), "cu");
    units.extend(files(&sources(), "cu"));
    let define: &[&str] = if storage == Storage::Bf16 { &["-DTERCIO_BF16"] } else { &[] };
    compile(&format!("cuda-kernels-{storage:?}"), units, define)
}

/// A folder of NVIDIA's libraries, which are a GPU that is the host (`tests/fake_gpu/fake_gpu.cpp`).
pub fn fake_gpu() -> PathBuf {
    let mut units = files(&sources().join("../tests/fake_gpu"), "cpp");
    units.extend(files(&sources(), "cu"));
    // Its own functions first: what the program has of the same names is another library's.
    let library = compile("fake-gpu", units, &["-Wl,-Bsymbolic"]);
    let folder = library.with_extension("");
    if !folder.join("libnvrtc.so").exists() {
        let part = folder.with_extension(format!("{}.part", std::process::id()));
        std::fs::create_dir_all(&part).expect("a folder of the build");
        for name in ["libcuda.so", "libcublasLt.so", "libnvrtc.so", "libnccl.so.2"] {
            std::os::unix::fs::symlink(&library, part.join(name)).expect("a link");
        }
        // Another process may have been first.
        if std::fs::rename(&part, &folder).is_err() {
            std::fs::remove_dir_all(&part).expect("a folder of the build");
        }
    }
    folder
}

/// Compiles C++ into the build's temporary folder, under a name that says what it was made of.
fn compile(name: &str, mut units: Vec<PathBuf>, more: &[&str]) -> PathBuf {
    units.extend(files(&sources(), "cpp"));
    // -ffp-contract=off: multiply-adds are those of the sources alone, as --fmad=false has it for a GPU.
    let mut flags = vec!["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared"];
    // -U_FORTIFY_SOURCE: it takes a jump between the shim's fibers for a mistake.
    flags.extend(["-fPIC", "-U_FORTIFY_SOURCE", "-DTERCIO_HOST"]);
    flags.extend(more);
    let mut state = DefaultHasher::new();
    flags.hash(&mut state);
    for file in units.iter().chain(&files(&sources(), "h")) {
        file.hash(&mut state);
        std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display())).hash(&mut state);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("{name}-{:016x}.so", state.finish()));
    // Tests run in processes beside each other: one compiles, the others wait.
    let lock = std::fs::File::create(folder.join(format!("{name}.lock"))).expect("a lock");
    lock.lock().expect("the lock of the build folder");
    if !path.exists() {
        let part = folder.join(format!("{name}-{}.part", std::process::id()));
        let mut command = Command::new("c++");
        command.args(&flags).arg("-I").arg(sources()).arg("-o").arg(&part).args(["-x", "c++"]).args(&units);
        let output = command.output().unwrap_or_else(|e| {
            panic!("c++ cannot be run ({e}): the CUDA kernels are tested on the host by a C++ compiler; install g++")
        });
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "c++ does not compile {name}:\n{log}");
        let older = |f: &PathBuf| {
            let file = f.file_name().unwrap_or_default().to_string_lossy();
            file.starts_with(&format!("{name}-"))
        };
        for file in files(folder, "so").iter().filter(|f| older(f)) {
            std::fs::remove_file(file).expect("a file of the build folder");
        }
        std::fs::rename(&part, &path).expect("a file of the build folder");
    }
    path
}
