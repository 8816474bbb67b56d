//! Speed of the CPU's matrix product on the shapes that training meets: `cargo run --release -p tercio-engine --example products [THREADS]`.

use std::time::Instant;

use tercio_engine::device::Matrix;
use tercio_engine::{Cpu, Device, Tensor};

fn main() {
    let threads = std::env::args().nth(1).and_then(|t| t.parse().ok()).unwrap_or(2);
    let cpu = Cpu::new(threads).expect("a CPU device");
    println!("{threads} threads, {}", cpu.isa().name());
    // rows, columns, inner, left transposed, right transposed
    let shapes = [
        (1536, 1536, 1536, false, false),
        (3000, 768, 768, false, true),
        (3000, 3072, 768, false, true),
        (3000, 768, 3072, false, true),
        (3000, 768, 3072, false, false),
        (3072, 768, 3000, true, false),
        (8, 32128, 768, false, true),
        (32128, 768, 8, true, false),
        (2800, 384, 128, false, true),
        (2800, 512, 128, false, true),
        (2800, 128, 512, false, true),
        (512, 128, 2800, true, false),
        (128, 512, 2800, true, false),
        (150, 150, 64, false, true),
        (150, 64, 150, false, false),
        (60, 60, 32, false, true),
        (60, 32, 60, false, false),
    ];
    for (m, n, k, ta, tb) in shapes {
        let fill = |r: usize, c: usize| {
            let v: Vec<f32> = (0..r * c).map(|i| (i * 7919 % 1000) as f32 / 1000.0 - 0.5).collect();
            Tensor::from_values(&cpu, r, c, &v)
        };
        let (a, b) = (if ta { fill(k, m) } else { fill(m, k) }, if tb { fill(n, k) } else { fill(k, n) });
        let mut c = Tensor::zeros(&cpu, m, n);
        let view = |t: &Tensor<Cpu>, flip: bool| -> bool { flip && t.rows > 0 };
        let mut times = Vec::new();
        cpu.run(|| {
            let repeat = (1_000_000_000 / (2 * m * n * k)).clamp(1, 2000);
            for _ in 0..30 {
                let t = Instant::now();
                for _ in 0..repeat {
                    let pick = |t, f| if view(t, f) { t.matrix().t() } else { t.matrix() };
                    let (x, y): (Matrix<'_, Cpu>, Matrix<'_, Cpu>) = (pick(&a, ta), pick(&b, tb));
                    cpu.product(x, y, c.view_mut(), false);
                }
                times.push(t.elapsed().as_secs_f64() / repeat as f64);
            }
        });
        times.sort_by(f64::total_cmp);
        let flops = 2.0 * (m * n * k) as f64;
        println!(
            "{m:6} x {n:6} x {k:5} {}{}: {:7.1} GFLOP/s best, {:7.1} median, {:9.1} us",
            if ta { "T" } else { "n" },
            if tb { "T" } else { "n" },
            flops / times[0] / 1e9,
            flops / times[15] / 1e9,
            times[15] * 1e6
        );
    }
}
