//! How numbers of vectors are stored: 32 bits, or 16 in one of two ways, rounded to nearest, ties to even.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Format of a stored number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VectorDtype {
    /// IEEE 754 single precision.
    #[default]
    F32,
    /// IEEE 754 half precision: 11 bits of precision, at most 65504.
    F16,
    /// The upper half of single precision: 8 bits of precision, its whole range.
    Bf16,
}

impl VectorDtype {
    /// Its name as a setting.
    pub fn name(self) -> &'static str {
        match self {
            VectorDtype::F32 => "f32",
            VectorDtype::F16 => "f16",
            VectorDtype::Bf16 => "bf16",
        }
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            VectorDtype::F32 => 4,
            VectorDtype::F16 | VectorDtype::Bf16 => 2,
        }
    }

    /// Appends a row's bytes, little-endian.
    ///
    /// # Errors
    /// A sentence on a number that is none, or that the format cannot hold.
    pub fn encode(self, row: &[f32], out: &mut Vec<u8>) -> Result<(), String> {
        if let Some(k) = row.iter().position(|v| !v.is_finite()) {
            return Err(format!("number {k} of the vector is {}", row[k]));
        }
        match self {
            VectorDtype::F32 => row.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes())),
            VectorDtype::F16 => {
                for &v in row {
                    let half = f32_to_f16(v);
                    if half & 0x7fff == 0x7c00 {
                        return Err(format!("the number {v} is too large for f16; use bf16 or f32"));
                    }
                    out.extend_from_slice(&half.to_le_bytes());
                }
            }
            VectorDtype::Bf16 => {
                for &v in row {
                    let bits = v.to_bits();
                    let half = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
                    if half & 0x7fff == 0x7f80 {
                        return Err(format!("the number {v} is too large for bf16; use f32"));
                    }
                    out.extend_from_slice(&half.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Numbers from their bytes; as many of either.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(bytes.len(), out.len() * self.bytes());
        match self {
            VectorDtype::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            VectorDtype::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f16_to_f32(u16::from_le_bytes(*b));
                }
            }
            VectorDtype::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
        }
    }
}

impl FromStr for VectorDtype {
    type Err = DataError;

    fn from_str(name: &str) -> Result<VectorDtype, DataError> {
        [VectorDtype::F32, VectorDtype::F16, VectorDtype::Bf16]
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| DataError::Setting(format!("expected f32, f16 or bf16, found {name:?}")))
    }
}

/// The nearest half, ties to even; what is beyond 65519.99 becomes infinite.
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
    let half = if magnitude < 0x3880_0000 {
        // Below 2^-14 halves are multiples of 2^-24; scaling by a power of two is exact.
        (f32::from_bits(magnitude) * 16_777_216.0).round_ties_even() as u32
    } else {
        // The exponent moves by 112; adding just under half of the last place rounds, with a carry into the exponent.
        let rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        ((rounded - (112 << 23)) >> 13).min(0x7c00)
    };
    sign | half as u16
}

/// A half's value; exact.
#[inline]
fn f16_to_f32(half: u16) -> f32 {
    let (sign, magnitude) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7fff));
    // The exponent moves by 112. As a product this is right below the normal halves too, and a loop over it vectorises.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let bits = if magnitude < 0x7c00 { finite } else { 0x7f80_0000 | magnitude << 13 };
    f32::from_bits(sign | bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_halves_come_back_and_neighbours_round_to_even() {
        for half in 0..0x7c00u16 {
            let value = f16_to_f32(half);
            // By the definition of the format.
            let (exponent, fraction) = (i32::from(half >> 10), f64::from(half & 0x3ff));
            let want = match exponent {
                0 => fraction * 2f64.powi(-24),
                e => (1.0 + fraction / 1024.0) * 2f64.powi(e - 15),
            };
            assert_eq!(f64::from(value), want, "{half:#x}");
            assert_eq!((f32_to_f16(value), f32_to_f16(-value)), (half, half | 0x8000));
            let next = if half == 0x7bff { 65536.0 } else { f16_to_f32(half + 1) };
            let middle = (value + next) / 2.0;
            assert_eq!(f32_to_f16(middle), half + (half & 1), "{half:#x}");
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() - 1)), half, "{half:#x}");
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() + 1)), half + 1, "{half:#x}");
        }
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert!(f16_to_f32(0x7c00).is_infinite() && f16_to_f32(0x7e00).is_nan());
    }

    #[test]
    fn rows_come_back_as_near_as_the_format_allows() {
        let row = [0.0, -1.5, 3.125_1, 1e-7, 60000.0, -0.1];
        for (dtype, error) in
            [(VectorDtype::F32, 0.0), (VectorDtype::F16, 4.9e-4), (VectorDtype::Bf16, 3.95e-3)]
        {
            let mut bytes = Vec::new();
            dtype.encode(&row, &mut bytes).unwrap();
            assert_eq!(bytes.len(), row.len() * dtype.bytes());
            let mut back = [0.0; 6];
            dtype.decode(&bytes, &mut back);
            for (a, b) in row.iter().zip(back) {
                assert!(
                    (a - b).abs() <= error * a.abs() + if dtype == VectorDtype::F16 { 3e-8 } else { 0.0 },
                    "{a} {b}"
                );
            }
            assert_eq!(dtype.name().parse::<VectorDtype>().unwrap(), dtype);
        }
        assert!("f8".parse::<VectorDtype>().is_err());
    }

    #[test]
    fn what_cannot_be_held_is_refused() {
        let refused =
            |dtype: VectorDtype, value: f32| dtype.encode(&[0.5, value], &mut Vec::new()).unwrap_err();
        assert!(refused(VectorDtype::F16, 65520.0).contains("too large for f16"));
        assert!(refused(VectorDtype::Bf16, f32::MAX).contains("too large for bf16"));
        for dtype in [VectorDtype::F32, VectorDtype::F16, VectorDtype::Bf16] {
            assert!(refused(dtype, f32::NAN).contains("number 1 of the vector is NaN"));
            assert!(refused(dtype, f32::NEG_INFINITY).contains("-inf"));
        }
    }
}
