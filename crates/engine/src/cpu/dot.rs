//! Inner products of one vector with stored rows, read as they are stored.
//!
//! The order of the sum is that of `math::sum`, whatever the format, the number of rows or of threads: 32 interleaved
//! chains of multiply-adds, then a tree. A score computed here is the same bits wherever the row lies.

use super::lanes::kernel;
use super::{Cpu, math};

/// Rows of little-endian numbers, one after the other, in one of three formats.
#[derive(Clone, Copy, Debug)]
pub enum StoredRows<'a> {
    /// IEEE 754 single precision.
    F32(&'a [[u8; 4]]),
    /// IEEE 754 half precision.
    F16(&'a [[u8; 2]]),
    /// The upper half of single precision.
    Bf16(&'a [[u8; 2]]),
}

/// A finite half's value; exact. Infinities and NaNs become large finite numbers: who stores rows refuses them before.
#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    // The exponent moves by 112. As a product this is right for the numbers below the normal ones too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[inline(always)]
fn upper(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

kernel! {
    fn dots_f32(query: &[f32], rows: &[[u8; 4]], out: &mut [f32]) {
        for (row, out) in rows.chunks_exact(query.len()).zip(out) {
            *out = math::sum(query.len(), |i, s| super::lanes::fma::<F>(query[i], f32::from_le_bytes(row[i]), s));
        }
    }
}
kernel! {
    fn dots_f16(query: &[f32], rows: &[[u8; 2]], out: &mut [f32]) {
        for (row, out) in rows.chunks_exact(query.len()).zip(out) {
            *out = math::sum(query.len(), |i, s| super::lanes::fma::<F>(query[i], half(row[i]), s));
        }
    }
}
kernel! {
    fn dots_bf16(query: &[f32], rows: &[[u8; 2]], out: &mut [f32]) {
        for (row, out) in rows.chunks_exact(query.len()).zip(out) {
            *out = math::sum(query.len(), |i, s| super::lanes::fma::<F>(query[i], upper(row[i]), s));
        }
    }
}

impl Cpu {
    /// Inner products of `query` with every row, on the calling thread: `out.len()` rows of `query.len()` finite numbers.
    /// Each is 32 interleaved chains of multiply-adds and a tree over them.
    pub fn dots(&self, query: &[f32], rows: StoredRows<'_>, out: &mut [f32]) {
        let (numbers, isa) = (query.len() * out.len(), self.isa());
        if query.is_empty() {
            return out.fill(0.0);
        }
        match rows {
            StoredRows::F32(rows) => dots_f32(isa, query, &rows[..numbers], out),
            StoredRows::F16(rows) => dots_f16(isa, query, &rows[..numbers], out),
            StoredRows::Bf16(rows) => dots_bf16(isa, query, &rows[..numbers], out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::random::{key, uniform};

    /// Numbers that all three formats hold, some below the normal halves, as f32, f16 and bf16 have them.
    fn numbers(seed: u64, count: usize) -> (Vec<f32>, Vec<[u8; 2]>, Vec<[u8; 2]>) {
        let draw = |i: u64| (uniform(key(&[seed]), i) * 255.0) as i32 - 127;
        let halves = |i: u64| {
            let (value, tiny) = (draw(i), i.is_multiple_of(7));
            let scale = if tiny { 1.0 / 16_777_216.0 } else { 1.0 / 64.0 };
            value as f32 * scale
        };
        let values: Vec<f32> = (0..count as u64).map(halves).collect();
        let f16 = values.iter().map(|&v| {
            let (sign, m) = (if v < 0.0 { 0x8000u16 } else { 0 }, v.abs());
            // Seven bits of significand: the halves' form is exact.
            let bits = match m < 6.103_515_6e-5 {
                true => (m * 16_777_216.0) as u16,
                false => ((m.to_bits() - (112 << 23)) >> 13) as u16,
            };
            (sign | bits).to_le_bytes()
        });
        let bf16 = values.iter().map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes());
        (values.clone(), f16.collect(), bf16.collect())
    }

    #[test]
    fn one_score_whatever_the_format_and_the_instructions() {
        for width in [1, 3, 31, 32, 33, 100, 384] {
            let (query, ..) = numbers(1, width);
            let (values, f16, bf16) = numbers(2, 5 * width);
            let bytes: Vec<[u8; 4]> = values.iter().map(|v| v.to_le_bytes()).collect();
            let mut fused: Option<Vec<f32>> = None;
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let cpu = Cpu::with_isa(1, isa).unwrap();
                let of = |rows| {
                    let mut out = vec![f32::NAN; 5];
                    cpu.dots(&query, rows, &mut out);
                    out
                };
                let scores = of(StoredRows::F32(&bytes));
                assert_eq!(scores, of(StoredRows::F16(&f16)), "{width} {isa:?}");
                assert_eq!(scores, of(StoredRows::Bf16(&bf16)), "{width} {isa:?}");
                for (score, row) in scores.iter().zip(values.chunks(width)) {
                    let product = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                    let want: f64 = query.iter().zip(row).map(product).sum();
                    assert!((f64::from(*score) - want).abs() < 1e-5 * want.abs().max(1.0), "{score} {want}");
                }
                if isa.fuses() {
                    assert_eq!(*fused.get_or_insert_with(|| scores.clone()), scores, "{width} {isa:?}");
                }
            }
        }
    }
}
