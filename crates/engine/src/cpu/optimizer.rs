//! Adam and AdamW over a stretch of the arenas, one fused pass.

use rayon::prelude::*;

use super::BLOCK;
use super::lanes::{Isa, fma, kernel};
use crate::device::AdamStep;

/// The constants of a step, in f32, computed once in f64.
#[derive(Clone, Copy)]
struct Constants {
    decay: f32,
    beta1: f32,
    beta2: f32,
    // 1 - beta in f64 first: 1 - 0.999f32 is wrong in the fifth digit.
    rest1: f32,
    rest2: f32,
    rate: f32,
    root: f32,
    eps: f32,
    gradient_scale: f32,
}

kernel! {
    fn adam_block(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: Constants) {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = *g * c.gradient_scale;
            *m = fma::<F>(*m, c.beta1, c.rest1 * g);
            *v = fma::<F>(*v, c.beta2, c.rest2 * g * g);
            let denominator = fma::<F>(v.sqrt(), c.root, c.eps);
            *p = fma::<F>(-c.rate, *m / denominator, *p * c.decay);
        }
    }
}

/// `m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = p (1 - lr wd) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`
pub(super) fn adam(isa: Isa, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], s: AdamStep) {
    assert!(p.len() == g.len() && p.len() == m.len() && p.len() == v.len());
    let t = s.step as f64;
    let c = Constants {
        decay: (1.0 - s.lr * s.weight_decay) as f32,
        beta1: s.beta1 as f32,
        beta2: s.beta2 as f32,
        rest1: (1.0 - s.beta1) as f32,
        rest2: (1.0 - s.beta2) as f32,
        rate: (s.lr / (1.0 - libm::pow(s.beta1, t))) as f32,
        root: (1.0 / (1.0 - libm::pow(s.beta2, t)).sqrt()) as f32,
        eps: s.eps as f32,
        gradient_scale: s.gradient_scale as f32,
    };
    let moments = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
    p.par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK)).zip(moments).for_each(|((p, g), (m, v))| {
        adam_block(isa, p, g, m, v, c);
    });
}
