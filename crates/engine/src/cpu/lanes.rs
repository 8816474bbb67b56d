//! Instruction sets: which there are, how a kernel is compiled once for each, and the vector type of the product kernel.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 and, for products, AMX tiles of bf16: three parts to an f32 (`product_amx.rs`).
    Amx,
    /// AVX-512 and, for products in bf16, its multiply-add of pairs.
    Avx512Bf16,
    /// AVX-512 F, DQ, BW, VL.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// What the compilation target has: SSE2 on x86-64, NEON on AArch64.
    Portable,
}

impl Isa {
    /// All, best first.
    pub const ALL: [Isa; 5] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The instruction set of this name.
    pub fn named(name: &str) -> Option<Isa> {
        Self::ALL.into_iter().find(|i| i.name() == name)
    }
    /// `amx`, `avx512bf16`, `avx512`, `avx2`, `portable`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
    /// Whether this processor has it.
    pub fn available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.available() && super::product_amx::available(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.available()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 | Isa::Avx2 => false,
            Isa::Portable => true,
        }
    }
    /// The best that this processor has.
    pub fn best() -> Isa {
        Self::ALL.into_iter().find(|i| i.available()).unwrap_or(Isa::Portable)
    }
    /// Whether multiply-add rounds once.
    pub fn fuses(self) -> bool {
        self != Isa::Portable || PORTABLE_FUSES
    }
}

/// How the CPU computes: the instruction set of all kernels, and the precision of the factors of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arithmetic {
    pub isa: Isa,
    pub precision: Precision,
}

/// What the factors of a product are rounded to; sums are f32 always, and so is everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32: not rounded.
    #[default]
    F32,
    /// bf16: eight bits of significand, the range of f32.
    Bf16,
}

/// Whether the baseline of the compilation target has fused multiply-add.
pub(super) const PORTABLE_FUSES: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// `a * b + c`, rounded once where the instruction set has that (`F`).
#[inline(always)]
pub(super) fn fma<const F: bool>(a: f32, b: f32, c: f32) -> f32 {
    if F { a.mul_add(b, c) } else { a * b + c }
}

/// Defines `fn name(isa, args)` whose body is compiled for every instruction set and chosen at run time;
/// inside, `F` says whether multiply-add fuses.
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<const F: bool>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body::<true>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body::<true>($($arg),*) }
            match isa {
                // SAFETY: a device holds only an instruction set that the processor has.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Amx | $crate::cpu::Isa::Avx512Bf16 | $crate::cpu::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body::<{ $crate::cpu::lanes::PORTABLE_FUSES }>($($arg),*),
            }
        }
    };
}
pub(super) use kernel;

/// A vector register of f32 as the product kernel uses it.
pub(super) trait Lanes: Copy {
    /// Elements.
    const N: usize;
    /// Whether an element of a factor is a pair of bf16: two steps of the inner dimension.
    const PAIRS: bool = false;
    /// SAFETY (all): the pointers hold `N` (or one, for `splat`) elements; the processor has the instruction set.
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn splat(p: *const f32) -> Self;
    unsafe fn zero() -> Self;
    /// `self + a * b`
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// Copies `d[k * width + i] = s[i * stride + k]` for i < vectors, k < depth. Up to `N` elements behind a row's valid
    /// ones may be written, in the order of rows.
    #[inline(always)]
    unsafe fn transpose(
        s: *const f32,
        stride: usize,
        vectors: usize,
        depth: usize,
        d: *mut f32,
        width: usize,
    ) {
        unsafe { transpose_plain(s, stride, vectors, depth, d, width) }
    }
}

#[inline(always)]
unsafe fn transpose_plain(
    s: *const f32,
    stride: usize,
    vectors: usize,
    depth: usize,
    d: *mut f32,
    width: usize,
) {
    for k in 0..depth {
        for i in 0..vectors {
            unsafe { *d.add(k * width + i) = *s.add(i * stride + k) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for __m512 {
    const N: usize = 16;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        unsafe { _mm512_set1_ps(*p) }
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe { _mm512_fmadd_ps(a, b, self) }
    }
    #[inline(always)]
    unsafe fn transpose(
        s: *const f32,
        stride: usize,
        vectors: usize,
        depth: usize,
        d: *mut f32,
        width: usize,
    ) {
        // Tiles of 16 x 16 through registers, borders masked.
        unsafe {
            for k in (0..depth).step_by(16) {
                let rows = (depth - k).min(16);
                for i in (0..vectors).step_by(16) {
                    let source = s.add(i * stride + k);
                    transpose16(source, stride, (vectors - i).min(16), rows, d.add(k * width + i), width);
                }
            }
        }
    }
}

/// As `__m512`, with factors that are pairs of bf16. Products of a pair are added one after the other, each rounded.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Pairs(pub __m512);

#[cfg(target_arch = "x86_64")]
impl Lanes for Pairs {
    const N: usize = 16;
    const PAIRS: bool = true;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Pairs(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        unsafe { Pairs(_mm512_castsi512_ps(_mm512_set1_epi32(*(p as *const i32)))) }
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Pairs(_mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe {
            let pairs = |x: Self| std::mem::transmute::<__m512, __m512bh>(x.0);
            Pairs(_mm512_dpbf16_ps(self.0, pairs(a), pairs(b)))
        }
    }
}

/// `rows` rows of 16 elements, the first `vectors` of them from `s`; rows are written in their order, so that what one
/// spills over a narrow width the next one covers.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn transpose16(
    s: *const f32,
    stride: usize,
    vectors: usize,
    rows: usize,
    d: *mut f32,
    width: usize,
) {
    unsafe {
        let mask = (0xffff_u32 >> (16 - rows)) as u16;
        let mut r = [_mm512_setzero_ps(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            if i < vectors {
                *r = _mm512_maskz_loadu_ps(mask, s.add(i * stride));
            }
        }
        let mut t = [_mm512_setzero_ps(); 16];
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..4 {
            let q: [__m512d; 4] = std::array::from_fn(|j| _mm512_castps_pd(t[4 * i + j]));
            r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(q[0], q[2]));
            r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(q[0], q[2]));
            r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(q[1], q[3]));
            r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(q[1], q[3]));
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_f32x4::<0x88>(r[i], r[i + 4]);
            t[i + 4] = _mm512_shuffle_f32x4::<0xdd>(r[i], r[i + 4]);
            t[i + 8] = _mm512_shuffle_f32x4::<0x88>(r[i + 8], r[i + 12]);
            t[i + 12] = _mm512_shuffle_f32x4::<0xdd>(r[i + 8], r[i + 12]);
        }
        for i in 0..4 {
            r[i] = _mm512_shuffle_f32x4::<0x88>(t[i], t[i + 8]);
            r[i + 8] = _mm512_shuffle_f32x4::<0xdd>(t[i], t[i + 8]);
            r[i + 4] = _mm512_shuffle_f32x4::<0x88>(t[i + 4], t[i + 12]);
            r[i + 12] = _mm512_shuffle_f32x4::<0xdd>(t[i + 4], t[i + 12]);
        }
        for (i, r) in r.iter().enumerate() {
            if i < rows {
                _mm512_storeu_ps(d.add(i * width), *r);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for __m256 {
    const N: usize = 8;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm256_storeu_ps(p, self) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        unsafe { _mm256_broadcast_ss(&*p) }
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        unsafe { _mm256_fmadd_ps(a, b, self) }
    }
}

impl Lanes for [f32; 4] {
    const N: usize = 4;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { *(p as *const [f32; 4]) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { *(p as *mut [f32; 4]) = self }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        unsafe { [*p; 4] }
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| fma::<PORTABLE_FUSES>(a[i], b[i], self[i]))
    }
}
