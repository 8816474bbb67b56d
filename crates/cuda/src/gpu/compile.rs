//! Kernels to machine code: by NVRTC, once for an architecture and a state of the sources; kept in a folder of the user.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};
use tercio_engine::Fault;

use crate::sources::{HEADERS, Source};

/// Multiply-adds are written in the sources, so that bits do not depend on the compiler.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// The machine code of a file for an architecture (`sm_90`): from `cache`, or compiled and put there. A cache that cannot be written
/// costs the compilation only.
///
/// # Errors
/// No NVRTC, or what it says of the source.
pub fn machine_code(source: Source, architecture: &str, cache: Option<&Path>) -> Result<Vec<u8>, Fault> {
    let kept = cache.map(|folder| folder.join(file_name(source, architecture)));
    if let Some(code) = kept.as_ref().and_then(|path| read(path)) {
        return Ok(code);
    }
    let code = compile(source, architecture)?;
    if let Some(path) = kept {
        let _ = keep(&path, &code);
    }
    Ok(code)
}

/// Where machine code is kept: `TERCIO_CACHE`, or the user's folder for such things; `None` where there is neither.
pub fn cache_folder() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = || of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache"))).map(|c| c.join("tercio"));
    Some(of("TERCIO_CACHE").or_else(user)?.join("cuda"))
}

/// A name that says what the code was made of.
fn file_name((name, text): Source, architecture: &str) -> String {
    let mut hash = Sha256::new();
    let parts = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    for part in [name, text, architecture].into_iter().chain(OPTIONS).chain(parts) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let digest: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("{}-{architecture}-{digest}.cubin", name.trim_end_matches(".cu"))
}

/// A kept file: the code behind its own checksum, so that a file that was cut is compiled again.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (sum, code) = bytes.split_at_checked(32)?;
    (Sha256::digest(code)[..] == *sum).then(|| code.to_vec())
}

fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Several ranks may do this at once: each writes its own file, and one of the names wins.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let mut bytes = Sha256::digest(code).to_vec();
    bytes.extend_from_slice(code);
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}

/// A program of NVRTC, destroyed when it is dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, and not destroyed before.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn compile((name, text): Source, architecture: &str) -> Result<Vec<u8>, Fault> {
    // SAFETY: looks for the library only.
    if !unsafe { sys::is_culib_present() } {
        return Err(Fault(
            "NVIDIA's runtime compiler (libnvrtc.so) is not found: install the CUDA toolkit, or its package of NVRTC, \
             and put its folder on LD_LIBRARY_PATH"
                .into(),
        ));
    }
    let c = |text: &str| CString::new(text).expect("sources and names have no zero");
    let (headers, names): (Vec<CString>, Vec<CString>) = HEADERS.iter().map(|(n, t)| (c(t), c(n))).unzip();
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (source, file) = (c(text), c(name));
    let mut program = std::ptr::null_mut();
    // SAFETY: the strings live until the program is made, which copies them.
    let made = unsafe {
        let (headers, names) = (pointers(&headers), pointers(&names));
        let count = headers.len() as i32;
        sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            file.as_ptr(),
            count,
            headers.as_ptr(),
            names.as_ptr(),
        )
    };
    let fault = |what: &str| Fault(format!("NVRTC {what} {name} for {architecture}"));
    made.result().map_err(|e| fault(&format!("({e}) does not take")))?;
    let program = Program(program);
    let options = OPTIONS.map(String::from).into_iter().chain([format!("--gpu-architecture={architecture}")]);
    let options: Vec<String> = options.collect();
    // SAFETY: a program that was made above.
    unsafe {
        if let Err(error) = result::compile_program(program.0, &options) {
            let log = result::get_program_log(program.0).unwrap_or_default();
            // SAFETY: NVRTC ends its log with a zero.
            let log = if log.is_empty() { c"".into() } else { CStr::from_ptr(log.as_ptr()).to_owned() };
            return Err(fault(&format!("({error}) does not compile {}; it was", log.to_string_lossy())));
        }
        let mut len = 0;
        let sized = sys::nvrtcGetCUBINSize(program.0, &mut len).result();
        sized.map_err(|e| fault(&format!("({e}) gives no code of")))?;
        let mut code = vec![0u8; len];
        let given = sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result();
        given.map_err(|e| fault(&format!("({e}) gives no code of")))?;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_code_was_made_of() {
        let source = ("a.cu", "KERNEL(1, a)");
        let name = file_name(source, "sm_90");
        assert!(name.starts_with("a-sm_90-") && name.ends_with(".cubin"), "{name}");
        assert_ne!(name, file_name(source, "sm_80"));
        assert_ne!(name, file_name(("a.cu", "KERNEL(2, a)"), "sm_90"));
    }

    /// Where NVRTC is; TERCIO_NEEDS_NVRTC says that it must be.
    #[test]
    fn all_kernels_are_compiled_and_kept() {
        // SAFETY: looks for the library only.
        if !unsafe { sys::is_culib_present() } {
            assert!(std::env::var_os("TERCIO_NEEDS_NVRTC").is_none(), "libnvrtc.so is not found");
            println!("not run: libnvrtc.so is not found");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for &source in crate::sources::KERNELS {
            let code = machine_code(source, "sm_90", Some(folder.path())).unwrap();
            assert!(code.starts_with(b"\x7fELF"), "{}", source.0);
            let kept = read(&folder.path().join(file_name(source, "sm_90")));
            assert!(kept == Some(code), "{}", source.0);
        }
        let fault = machine_code(("a.cu", "int a = ;"), "sm_90", None).unwrap_err();
        assert!(fault.0.contains("does not compile") && fault.0.contains("a.cu(1): error"), "{fault}");
    }

    #[test]
    fn what_is_kept_comes_back_and_what_was_cut_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below").join("a.cubin");
        assert_eq!(read(&path), None);
        keep(&path, b"machine code").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"machine code"[..]));
        let kept = machine_code(("a.cu", "no C++ at all"), "sm_90", None);
        assert!(kept.is_err());
        let bytes = fs::read(&path).unwrap();
        for cut in [0, 10, 32, bytes.len() - 1] {
            fs::write(&path, &bytes[..cut]).unwrap();
            assert_eq!(read(&path), None, "{cut}");
        }
    }
}
