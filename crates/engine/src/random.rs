//! Draws that depend on nothing but their key: a counter generator, so that any rank, thread or second pass draws the same.

/// SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits that passes statistical tests on counters.
#[inline(always)]
pub fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Key of a stream of draws, made of the numbers that name it, in order.
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0x7465_7263_696f, |k, &p| mix(k ^ mix(p)))
}

/// Key of a stream named by text (a parameter's name): FNV-1a over the bytes, mixed with `seed`.
pub fn key_of_name(seed: u64, name: &str) -> u64 {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3));
    key(&[seed, hash])
}

/// Uniform in (0, 1), 53 bits, for element `index` of the stream `key`.
pub fn uniform(key: u64, index: u64) -> f64 {
    ((mix(key ^ mix(index)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Standard normal (Box and Muller, 1958) for element `index` of the stream `key`; the same bits on every host.
pub fn normal(key: u64, index: u64) -> f64 {
    let (a, b) = (uniform(key, 2 * index), uniform(key, 2 * index + 1));
    libm::sqrt(-2.0 * libm::log(a)) * libm::cos(std::f64::consts::TAU * b)
}

/// Inverted dropout of one site in one shard of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    key: u64,
    /// An element is dropped when its 32 random bits are below this.
    pub threshold: u32,
    /// Factor on kept elements: 1 / (1 - p).
    pub scale: f32,
}

impl Dropout {
    /// Dropout with probability `p` in (0, 1); `key` names update, shard and site. `None` for `p == 0`.
    pub fn new(key: u64, p: f64) -> Option<Dropout> {
        assert!((0.0..1.0).contains(&p), "dropout probability must be at least 0 and less than 1, is {p}");
        if p == 0.0 {
            return None;
        }
        Some(Dropout { key, threshold: (p * 4_294_967_296.0) as u32, scale: (1.0 / (1.0 - p)) as f32 })
    }
    /// What names update, shard and site: a device whose kernels draw by themselves is given it.
    pub fn key(&self) -> u64 {
        self.key
    }
    /// The two words that key row `row`.
    #[inline(always)]
    pub fn row(&self, row: usize) -> (u32, u32) {
        let k = mix(self.key ^ mix(row as u64));
        (k as u32, (k >> 32) as u32)
    }
    /// Factor on element `column` of a row keyed by [`Dropout::row`]: 0 or `scale`.
    #[inline(always)]
    pub fn factor(&self, row: (u32, u32), column: u32) -> f32 {
        if hash32(row, column) < self.threshold { 0.0 } else { self.scale }
    }
}

/// 32 random bits for a column of a keyed row: two rounds of a multiply-xorshift mixer
/// (constants of Ellis' `lowbias32`); it vectorises, a 64-bit mixer does not.
#[inline(always)]
pub fn hash32(row: (u32, u32), column: u32) -> u32 {
    let mut x = column ^ row.0;
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_add(row.1).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_rate_and_independence() {
        let d = Dropout::new(key(&[1, 2, 3]), 0.1).unwrap();
        let e = Dropout::new(key(&[1, 2, 4]), 0.1).unwrap();
        let (mut dropped, mut both, n) = (0, 0, 400 * 512);
        for r in 0..400 {
            let (a, b) = (d.row(r), e.row(r));
            for c in 0..512 {
                let x = d.factor(a, c) == 0.0;
                dropped += x as usize;
                both += (x && e.factor(b, c) == 0.0) as usize;
            }
        }
        let (rate, joint) = (dropped as f64 / n as f64, both as f64 / n as f64);
        assert!((rate - 0.1).abs() < 0.003, "{rate}");
        assert!((joint - 0.01).abs() < 0.001, "{joint}");
    }

    #[test]
    fn normals_have_unit_moments() {
        let k = key_of_name(7, "shared.weight");
        let x: Vec<f64> = (0..20_000).map(|i| normal(k, i)).collect();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.04, "{mean} {var}");
        assert_ne!(k, key_of_name(8, "shared.weight"));
    }
}
