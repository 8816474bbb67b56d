//! Panels of an operand as the multiply-add kernels of `product.rs` read them: the vectors of a panel side by side.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m512;

use super::lanes::{Isa, Lanes, kernel};
use super::product::{KC, Operand};

/// What becomes of a factor in its panel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Factors {
    /// f32 as it is.
    Plain,
    /// Rounded to bf16, as f32.
    Rounded,
    /// Rounded to bf16, two steps of the inner dimension in a word: half the panel is used.
    Pairs,
}

/// Packs columns `[j, j + nr)` of `b`, all depth blocks, into their places in the whole packed operand of `np` panels.
pub(super) unsafe fn pack_panel_of(
    isa: Isa,
    b: Operand,
    factors: Factors,
    j: usize,
    nr: usize,
    d: *mut f32,
    np: usize,
) {
    let width = nr.min(b.columns - j);
    for p in (0..b.rows).step_by(KC) {
        let depth = KC.min(b.rows - p);
        unsafe {
            let source = b.data.add(p * b.row + j * b.column);
            let target = d.add(p * np * nr + j * depth);
            pack(isa, factors, source, b.column, b.row, width, depth, target, nr);
        }
    }
}

/// Rows of a known width, so that a copy is a few moves and not a call.
unsafe fn copy_rows<const W: usize>(s: *const f32, along: usize, depth: usize, d: *mut f32) {
    for k in 0..depth {
        unsafe { *(d.add(k * W) as *mut [f32; W]) = *(s.add(k * along) as *const [f32; W]) };
    }
}

kernel! {
    /// Rounds to the nearest bf16, ties to even; what is not a number stays none.
    fn round_to_bf16(x: &mut [f32]) {
        for x in x {
            let bits = x.to_bits();
            let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
            *x = f32::from_bits(if x.is_nan() { bits | 0x0040_0000 } else { near } & 0xffff_0000);
        }
    }
}

kernel! {
    /// Puts lines of `width` bf16 values two and two together in words, where the first half of the lines was.
    fn pair_up(panel: &mut [f32], width: usize) {
        let lines = panel.len() / width;
        for pair in 0..lines.div_ceil(2) {
            let (first, second) = (2 * pair * width, (2 * pair + 1) * width);
            for i in 0..width {
                let high = if second < panel.len() { panel[second + i].to_bits() } else { 0 };
                panel[pair * width + i] = f32::from_bits(panel[first + i].to_bits() >> 16 | high);
            }
        }
    }
}

/// Packs a panel as [`pack_plain`] does, with factors as they are wanted.
pub(super) unsafe fn pack(
    isa: Isa,
    factors: Factors,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    unsafe {
        pack_plain(isa, s, vector, along, vectors, depth, d, width);
        let panel = std::slice::from_raw_parts_mut(d, depth * width);
        if factors != Factors::Plain {
            round_to_bf16(isa, panel);
        }
        if factors == Factors::Pairs {
            pair_up(isa, panel, width);
        }
    }
}

/// `d[k * width + i] = s[i * vector + k * along]` for `vectors` vectors; the rest of `width` is zero.
unsafe fn pack_plain(
    isa: Isa,
    s: *const f32,
    vector: usize,
    along: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn transpose512(s: *const f32, t: usize, v: usize, k: usize, d: *mut f32, w: usize) {
        unsafe { <__m512 as Lanes>::transpose(s, t, v, k, d, w) }
    }
    unsafe {
        if vectors < width {
            for k in 0..depth {
                std::slice::from_raw_parts_mut(d.add(k * width + vectors), width - vectors).fill(0.0);
            }
        }
        if vector == 1 {
            return match (vectors == width, width) {
                (true, 32) => copy_rows::<32>(s, along, depth, d),
                (true, 16) => copy_rows::<16>(s, along, depth, d),
                (true, 14) => copy_rows::<14>(s, along, depth, d),
                (true, 8) => copy_rows::<8>(s, along, depth, d),
                (true, 6) => copy_rows::<6>(s, along, depth, d),
                (true, 4) => copy_rows::<4>(s, along, depth, d),
                _ => {
                    for k in 0..depth {
                        std::ptr::copy_nonoverlapping(s.add(k * along), d.add(k * width), vectors);
                    }
                }
            };
        }
        debug_assert_eq!(along, 1);
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => transpose512(s, vector, vectors, depth, d, width),
            _ => <[f32; 4] as Lanes>::transpose(s, vector, vectors, depth, d, width),
        }
    }
}
