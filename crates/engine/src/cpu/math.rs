//! exp, tanh and their kin in f32, made of multiplications and additions only, so that every host computes the same
//! bits and loops over them vectorise. Relative error below 3e-7 where not said otherwise.

use super::lanes::fma;

/// exp(x); 0 below -87.3, saturates above 88. Cody-Waite reduction, degree-6 polynomial (Moshier's Cephes).
#[inline(always)]
pub(super) fn exp<const F: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let c = if x > 88.0 { 88.0 } else { x };
    let c = if c < -87.3 { -87.3 } else { c };
    let rounded = fma::<F>(c, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma::<F>(n, -0.693_359_4, c);
    let r = fma::<F>(n, 2.121_944_4e-4, r);
    let p = fma::<F>(1.987_569_1e-4, r, 1.398_199_9e-3);
    let p = fma::<F>(p, r, 8.333_452e-3);
    let p = fma::<F>(p, r, 4.166_579_6e-2);
    let p = fma::<F>(p, r, 1.666_666_5e-1);
    let p = fma::<F>(p, r, 0.5);
    let y = fma::<F>(p, r * r, r + 1.0);
    // The last bits of `rounded` are n: a conversion, which must mind numbers beyond every integer, would not be vectorised.
    let y = f32::from_bits(y.to_bits().wrapping_add(rounded.to_bits() << 23));
    let y = if x < -87.3 { 0.0 } else { y };
    if x.is_nan() { x } else { y }
}

/// tanh(x) = 1 - 2 / (exp(2x) + 1) away from zero, an odd polynomial near it. Absolute error below 2e-7.
#[inline(always)]
pub(super) fn tanh<const F: bool>(x: f32) -> f32 {
    let a = x.abs();
    let far = 1.0 - 2.0 / (exp::<F>(2.0 * a) + 1.0);
    let z = x * x;
    let p = fma::<F>(-5.704_988e-3, z, 2.063_909e-2);
    let p = fma::<F>(p, z, -5.373_971e-2);
    let p = fma::<F>(p, z, 1.333_144_2e-1);
    let p = fma::<F>(p, z, -3.333_328e-1);
    let near = fma::<F>(p * z, a, a);
    let t = if a < 0.625 { near } else { far };
    t.copysign(x)
}

/// erf(x) after Abramowitz and Stegun 7.1.26 would be 1.5e-7 absolute; this is its f32 form, and exp(-x^2) beside it.
#[inline(always)]
pub(super) fn erf_and_gauss<const F: bool>(x: f32) -> (f32, f32) {
    let z = x.abs();
    let t = 1.0 / fma::<F>(0.327_591_1, z, 1.0);
    let e = exp::<F>(-z * z);
    let p = fma::<F>(1.061_405_4, t, -1.453_152);
    let p = fma::<F>(p, t, 1.421_413_7);
    let p = fma::<F>(p, t, -0.284_496_74);
    let p = fma::<F>(p, t, 0.254_829_6);
    (fma::<F>(-p * t, e, 1.0).copysign(x), e)
}

/// Sum of 32 partial sums, pairwise in a fixed tree.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; 32]) -> f32 {
    let mut width = 16;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of `f(i)` over `0..len`: 32 interleaved partial sums, then the tree.
#[inline(always)]
pub(super) fn sum(len: usize, f: impl Fn(usize, f32) -> f32) -> f32 {
    let mut lanes = [0f32; 32];
    let full = len / 32 * 32;
    let mut i = 0;
    while i < full {
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane = f(i + j, *lane);
        }
        i += 32;
    }
    for (j, lane) in lanes.iter_mut().enumerate().take(len - full) {
        *lane = f(full + j, *lane);
    }
    tree(lanes)
}

/// Greatest of a non-empty slice, NaN ignored unless all are.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 32];
    let (chunks, rest) = x.as_chunks::<32>();
    for c in chunks {
        for j in 0..32 {
            lanes[j] = if c[j] > lanes[j] { c[j] } else { lanes[j] };
        }
    }
    let m = lanes.into_iter().fold(f32::NEG_INFINITY, |m, v| if v > m { v } else { m });
    rest.iter().fold(m, |m, &v| if v > m { v } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_close_to_libm() {
        for i in -9000..9000 {
            let x = i as f32 * 0.01;
            let e = exp::<true>(x) as f64;
            let want = libm::exp(x as f64);
            if x > -87.0 && x < 87.9 {
                assert!((e - want).abs() <= 3e-7 * want, "exp({x}) = {e}, not {want}");
            }
            let (t, want) = (tanh::<true>(x / 8.0) as f64, libm::tanh((x / 8.0) as f64));
            assert!((t - want).abs() < 2e-7, "tanh({}) = {t}, not {want}", x / 8.0);
            let ((f, _), want) = (erf_and_gauss::<true>(x / 16.0), libm::erf((x / 16.0) as f64));
            assert!((f as f64 - want).abs() < 4e-7, "erf({}) = {f}, not {want}", x / 16.0);
        }
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert!(exp::<true>(f32::NAN).is_nan());
    }
}
