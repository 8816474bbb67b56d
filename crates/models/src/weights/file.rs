//! A file read at offsets, and its number formats turned into f32.
//!
//! Positioned reads instead of a memory map: pages of the file do not count as memory of the process, and a file that
//! shrinks while it is read is an error instead of a signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::{Result, WeightsError};

/// Number format of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dtype {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper 16 bits of a 32-bit float.
    BF16,
    /// A format that is listed but not read: integers, booleans, 8-bit floats. Name as the file gives it, and bytes of
    /// one element where that is known.
    Other(String, Option<usize>),
}

impl Dtype {
    /// The format that safetensors calls `name`.
    pub(crate) fn from_safetensors(name: &str) -> Self {
        match name {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "I64" | "U64" | "C64" => Self::Other(name.to_owned(), Some(8)),
            "I32" | "U32" => Self::Other(name.to_owned(), Some(4)),
            "I16" | "U16" => Self::Other(name.to_owned(), Some(2)),
            "I8" | "U8" | "BOOL" => Self::Other(name.to_owned(), Some(1)),
            _ => Self::Other(name.to_owned(), None),
        }
    }

    /// Bytes of one element, where known.
    pub fn size(&self) -> Option<usize> {
        match self {
            Self::F64 => Some(8),
            Self::F32 => Some(4),
            Self::F16 | Self::BF16 => Some(2),
            Self::Other(_, size) => *size,
        }
    }

    /// Name for messages.
    pub fn name(&self) -> &str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Other(name, _) => name,
        }
    }

    /// Turns little-endian elements into f32, rounding F64 to nearest. `bytes` holds exactly `out.len()` elements.
    ///
    /// # Errors
    /// A sentence on a format that is not a float, or on a finite F64 that f32 cannot hold.
    pub(crate) fn decode(&self, bytes: &[u8], out: &mut [f32]) -> std::result::Result<(), String> {
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f16_to_f32(u16::from_le_bytes(*b));
                }
            }
            Self::BF16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
            Self::F64 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
                    let wide = f64::from_le_bytes(*b);
                    *o = wide as f32;
                    if wide.is_finite() && !o.is_finite() {
                        return Err(format!("the value {wide:e} does not fit into 32-bit floats"));
                    }
                }
            }
            Self::Other(name, _) => {
                return Err(format!("it is stored as {name}; expected F32, F16, BF16 or F64"));
            }
        }
        Ok(())
    }
}

/// IEEE 754 half to single precision: exact, subnormals included; a NaN keeps its payload.
fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let exponent = u32::from(half >> 10) & 0x1f;
    let fraction = u32::from(half & 0x3ff);
    let magnitude = match exponent {
        // 2^-24 is the unit of subnormals; the product is exact.
        0 => (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits(),
        0x1f => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + 112) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

/// An open file of known length.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub path: PathBuf,
    pub file: File,
    pub len: u64,
}

impl DataFile {
    /// Opens a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        // Asked before opening: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(|e| WeightsError::io(path, "open", e))?;
        if !metadata.is_file() {
            return Err(WeightsError::invalid(
                path,
                "expected a regular file, found a folder, pipe or device",
            ));
        }
        let file = File::open(path).map_err(|e| WeightsError::io(path, "open", e))?;
        let len = metadata.len();
        Ok(Self { path: path.to_owned(), file, len })
    }

    /// Fills `buffer` from `offset` on.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| WeightsError::io(&self.path, "read", e))
    }

    /// At most the first `limit` bytes.
    pub fn head(&self, limit: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len.min(limit) as usize];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// A hint for files that are known by their first bytes and are no weights.
    pub fn refuse_pointer_files(&self) -> Result<()> {
        if self.head(40)?.starts_with(b"version https://git-lfs.github.com/spec") {
            return Err(WeightsError::invalid(
                &self.path,
                "this is a Git LFS pointer and not the weights; run `git lfs pull` where it was cloned",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_floats_are_exact() {
        // Every half value against its definition, computed in f64.
        for half in 0..=u16::MAX {
            let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 0x3ff));
            let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
            let found = f64::from(f16_to_f32(half));
            if exponent == 31 {
                assert_eq!(found.is_nan(), fraction != 0.0);
                assert!(found.is_nan() || found == sign * f64::INFINITY);
                continue;
            }
            let (lead, power) = if exponent == 0 { (0.0, -14) } else { (1.0, exponent - 15) };
            let expected = sign * (lead + fraction / 1024.0) * 2f64.powi(power);
            assert_eq!(found.to_bits(), expected.to_bits(), "{half:#x}");
        }
    }

    #[test]
    fn each_float_format_decodes_and_others_are_named() {
        let mut out = [0.0; 2];
        Dtype::BF16.decode(&[0x80, 0x3f, 0x20, 0xc0], &mut out).unwrap();
        assert_eq!(out, [1.0, -2.5]);
        let wide: Vec<u8> = [0.1f64, -3.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        Dtype::F64.decode(&wide, &mut out).unwrap();
        assert_eq!(out, [0.1, -3.0]);
        assert!(Dtype::F64.decode(&1e300f64.to_le_bytes(), &mut out[..1]).unwrap_err().contains("1e300"));
        assert!(Dtype::from_safetensors("I64").decode(&[0; 8], &mut out[..1]).unwrap_err().contains("I64"));
    }
}
