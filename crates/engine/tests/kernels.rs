//! Kernels by themselves, on every instruction set of the processor: products, optimizer steps, and the small ones.

use tercio_engine::cpu::{Isa, Precision};
use tercio_engine::device::Matrix;
use tercio_engine::random::{key, normal};
use tercio_engine::{AdamStep, Cpu, Device, Reference, Tensor};

/// A device per instruction set of this processor; says which are not tested.
fn devices(threads: usize) -> Vec<Cpu> {
    let (have, lack): (Vec<Isa>, Vec<Isa>) = Isa::ALL.into_iter().partition(|i| i.available());
    for isa in lack {
        println!("not tested on this processor: {}", isa.name());
    }
    have.into_iter().map(|isa| Cpu::with_isa(threads, isa).unwrap()).collect()
}

fn draw(parts: &[u64], len: usize) -> Vec<f32> {
    let stream = key(parts);
    (0..len).map(|i| normal(stream, i as u64) as f32).collect()
}

/// A product: sizes, which operands are stored transposed, extra elements between stored rows, whether it adds.
#[derive(Clone, Copy, Debug)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    gap: usize,
    accumulate: bool,
}

impl Product {
    /// What rounding of a chain of `k` multiply-adds may leave of an element.
    fn allowed(&self, want: f64) -> f64 {
        (4e-6 + f64::from(f32::EPSILON) * want.abs()) * (self.k as f64 + 1.0).sqrt()
    }
    fn operand(&self, what: u64, rows: usize, columns: usize, transposed: bool) -> (usize, usize, Vec<f32>) {
        let (stored_rows, stored_columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let stride = stored_columns + self.gap;
        let id = [what, self.m as u64, self.n as u64, self.k as u64];
        (stored_rows, stride, draw(&id, stored_rows * stride))
    }
    fn run<D: Device>(&self, device: &D) -> Vec<f64> {
        self.run_on(device, |x| x)
    }
    /// With every factor changed before.
    fn run_on<D: Device>(&self, device: &D, change: fn(f32) -> f32) -> Vec<f64> {
        let matrix = |(stored_rows, stride, values): &(usize, usize, Vec<f32>)| {
            let values: Vec<f32> = values.iter().map(|&x| change(x)).collect();
            Tensor::from_values(device, *stored_rows, *stride, &values)
        };
        let a = matrix(&self.operand(1, self.m, self.k, self.transposed.0));
        let b = matrix(&self.operand(2, self.k, self.n, self.transposed.1));
        let before = draw(&[3, self.m as u64], self.m * self.n);
        let mut c = Tensor::from_values(device, self.m, self.n, &before);
        let left = operand(&a, self.m, self.k, self.transposed.0);
        let right = operand(&b, self.k, self.n, self.transposed.1);
        device.run(|| device.product(left, right, c.view_mut(), self.accumulate));
        device.read_f64(c.view())
    }
}

fn operand<D: Device>(t: &Tensor<D>, rows: usize, columns: usize, transposed: bool) -> Matrix<'_, D> {
    Matrix { view: t.view(), rows, columns, stride: t.columns, transposed }
}

fn products() -> Vec<Product> {
    // Borders of tiles, of depth blocks (768) and of row blocks, and single rows and columns.
    let mut sizes = vec![
        (1, 1, 1),
        (1, 300, 64),
        (300, 1, 64),
        (64, 64, 1),
        (1, 1, 600),
        (14, 32, 256),
        (15, 33, 257),
        (13, 31, 255),
        (29, 70, 600),
        (350, 40, 48),
        (169, 100, 17),
        (5, 0, 3),
        (0, 5, 3),
        (4, 6, 0),
        // Borders of AMX: tiles, depth blocks, row blocks, columns packed at a time.
        (64, 64, 32),
        (65, 97, 33),
        (80, 33, 257),
        (1030, 40, 64),
        (40, 4130, 40),
        // A few rows, whose matrix is not packed.
        (2, 100, 300),
        (3, 17, 47),
        (4, 700, 333),
        (6, 64, 601),
        (7, 65, 129),
        (8, 311, 100),
        (9, 311, 100),
        // Depths beyond one block, and far beyond.
        (14, 32, 768),
        (15, 33, 769),
        (40, 70, 1601),
        (3, 20, 4001),
        (8, 40, 9001),
    ];
    for i in 0..24 {
        let size = |what: u64| 1 + (key(&[9, i, what]) % 300) as usize;
        sizes.push((size(0), size(1), size(2)));
    }
    let variants = sizes.into_iter().enumerate().flat_map(|(i, (m, n, k))| {
        [(false, false), (false, true), (true, false), (true, true)].into_iter().enumerate().map(
            move |(v, transposed)| {
                let gap = if (i + v) % 3 == 0 { 5 } else { 0 };
                Product { m, n, k, transposed, gap, accumulate: (i + v) % 2 == 1 }
            },
        )
    });
    variants.collect()
}

#[test]
fn products_agree_with_f64_and_do_not_depend_on_threads() {
    let (one, three) = (devices(1), devices(3));
    for p in products() {
        let want = p.run(&Reference);
        let mut fused: Option<Vec<f64>> = None;
        for (one, three) in one.iter().zip(&three) {
            let isa = one.isa();
            let got = p.run(one);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let error = (g - w).abs();
                assert!(error <= p.allowed(*w), "{p:?} on {isa:?}: [{i}] is {g}, not {w}");
            }
            assert!(got == p.run(three), "{p:?} on {isa:?}: other bits with 3 threads");
            // AMX adds in another order.
            if isa.fuses() && isa != Isa::Amx {
                assert!(
                    *fused.get_or_insert(got.clone()) == got,
                    "{p:?} on {isa:?}: other bits than the first"
                );
            }
        }
    }
}

/// PyTorch's single-tensor AdamW, written from its documentation, apart from both devices.
fn adamw(p: &mut f64, m: &mut f64, v: &mut f64, g: f64, s: AdamStep) {
    let g = g * s.gradient_scale;
    *p -= s.lr * s.weight_decay * *p;
    *m = s.beta1 * *m + (1.0 - s.beta1) * g;
    *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
    let m_hat = *m / (1.0 - libm::pow(s.beta1, s.step as f64));
    let v_hat = *v / (1.0 - libm::pow(s.beta2, s.step as f64));
    *p -= s.lr * m_hat / (libm::sqrt(v_hat) + s.eps);
}

fn steps<D: Device>(device: &D, n: usize, list: &[AdamStep]) -> [Vec<f64>; 3] {
    let start = draw(&[1], n);
    let mut p = Tensor::from_values(device, 1, n, &start);
    let (mut m, mut v) = (Tensor::zeros(device, 1, n), Tensor::zeros(device, 1, n));
    for s in list {
        let g = Tensor::from_values(device, 1, n, &draw(&[2, s.step], n));
        device.run(|| device.adam(p.view_mut(), g.view(), m.view_mut(), v.view_mut(), *s));
    }
    [&p, &m, &v].map(|t| device.read_f64(t.view()))
}

#[test]
fn adam_takes_the_steps_of_its_formula() {
    let n = 20_011; // more than a block, and no multiple of a vector
    let step = |i: u64| AdamStep {
        lr: 1e-2 / i as f64,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: i,
        gradient_scale: if i == 2 { 0.25 } else { 1.0 },
    };
    let list: Vec<AdamStep> = (1..=6).map(step).collect();
    let start = draw(&[1], n);
    let mut want = [start.iter().map(|&v| v as f64).collect(), vec![0f64; n], vec![0f64; n]];
    for s in &list {
        let g = draw(&[2, s.step], n);
        let [p, m, v] = &mut want;
        (0..n).for_each(|i| adamw(&mut p[i], &mut m[i], &mut v[i], g[i] as f64, *s));
    }
    let moved = want[0].iter().zip(&start).map(|(a, b)| (a - *b as f64).abs()).fold(0.0, f64::max);
    assert!(moved > 5e-3);
    let check = |name: &str, got: &[Vec<f64>; 3], relative: f64, absolute: f64| {
        for (part, (got, want)) in
            ["parameters", "first moment", "second moment"].iter().zip(got.iter().zip(&want))
        {
            for (i, (g, w)) in got.iter().zip(want).enumerate() {
                let allowed = relative * w.abs() + absolute;
                assert!((g - w).abs() <= allowed, "{name}: {part}[{i}] is {g}, not {w}");
            }
        }
    };
    check("reference", &steps(&Reference, n, &list), 1e-13, 1e-15);
    let mut fused: Option<[Vec<f64>; 3]> = None;
    for (one, three) in devices(1).iter().zip(&devices(3)) {
        let got = steps(one, n, &list);
        check(one.isa().name(), &got, 2e-6, 1e-7);
        assert!(got == steps(three, n, &list), "{:?}: other bits with 3 threads", one.isa());
        if one.isa().fuses() {
            assert!(*fused.get_or_insert(got.clone()) == got, "{:?}: other bits than the first", one.isa());
        }
    }
}

#[test]
fn gather_and_scatter_move_rows() {
    let ids = [3u32, 0, 3, 1];
    fn both<D: Device>(device: &D, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let table = Tensor::from_values(device, 4, 3, &(0..12).map(|i| i as f32).collect::<Vec<_>>());
        let mut rows = Tensor::scratch(device, 4, 3);
        device.gather(table.view(), 3, ids, rows.view_mut());
        let mut sum = Tensor::from_values(device, 4, 3, &[1.0; 12]);
        device.scatter_add(rows.view(), 3, ids, sum.view_mut());
        (rows.to_vec(device), sum.to_vec(device))
    }
    let rows = vec![9., 10., 11., 0., 1., 2., 9., 10., 11., 3., 4., 5.];
    let sums = vec![1., 2., 3., 4., 5., 6., 1., 1., 1., 19., 21., 23.];
    assert_eq!(both(&Reference, &ids), (rows.clone(), sums.clone()));
    for device in devices(2) {
        assert_eq!(both(&device, &ids), (rows.clone(), sums.clone()), "{:?}", device.isa());
    }
}

#[test]
fn argmax_takes_the_first_of_equals() {
    let x = [1.0f32, 3.0, 3.0, -2.0, -5.0, -2.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0];
    let of = |got: Vec<u32>| assert_eq!(got, [1, 0, 2]);
    of(Reference.argmax(Tensor::from_values(&Reference, 3, 3, &x).view(), 3));
    for device in devices(1) {
        of(device.argmax(Tensor::from_values(&device, 3, 3, &x).view(), 3));
    }
}

#[test]
fn top_k_is_a_sorted_row_cut_short() {
    // Few distinct values, so that equals are many; some that are no numbers.
    let (rows, width) = (5, 301);
    let mut x: Vec<f32> = draw(&[6], rows * width).iter().map(|v| (v * 3.0).round()).collect();
    for i in [0, 3, width - 1, 2 * width + 7] {
        x[i] = f32::NAN;
    }
    x[width..2 * width].fill(f32::NEG_INFINITY);
    x[3 * width..4 * width].fill(f32::NAN);
    fn of<D: Device>(device: &D, x: &[f32], width: usize, k: usize) -> Vec<(u32, u64)> {
        let t = Tensor::from_values(device, x.len() / width, width, x);
        device.top_k(t.view(), width, k).into_iter().map(|(i, v)| (i, v.to_bits())).collect()
    }
    for k in [0, 1, 2, 8, width - 1, width, width + 5] {
        let want = of(&Reference, &x, width, k);
        assert_eq!(want.len(), rows * k.min(width));
        for device in devices(2) {
            assert_eq!(of(&device, &x, width, k), want, "{k}, {:?}", device.isa());
        }
    }
}

/// Fill, copy, add, scale, dot over more than a block.
#[test]
fn elementwise_kernels_agree_with_the_reference() {
    fn all<D: Device>(device: &D) -> (Vec<f32>, f64) {
        let n = 40_003;
        let (a, b) = (draw(&[4], n), draw(&[5], n));
        let (mut a, b) = (Tensor::from_values(device, 1, n, &a), Tensor::from_values(device, 1, n, &b));
        let c = b.duplicate(device);
        device.scale(a.view_mut(), 0.5);
        device.add(a.view_mut(), c.view());
        let mut head = a.view_mut();
        (head.start, head.len) = (7, 20_000);
        device.fill(head, -1.5);
        let dot = device.dot(a.view(), b.view());
        (a.to_vec(device), dot)
    }
    let (values, dot) = all(&Reference);
    for (one, three) in devices(1).iter().zip(&devices(3)) {
        let (v, d) = one.run(|| all(one));
        assert!(v.iter().zip(&values).all(|(a, b)| (a - b).abs() <= 1e-6), "{:?}", one.isa());
        assert!((d - dot).abs() < 1e-4, "{:?}: dot {d}, not {dot}", one.isa());
        assert!(three.run(|| all(three)) == (v, d), "{:?}: other bits with 3 threads", one.isa());
    }
}

/// Root mean square of the errors of a long product, by instruction set: cutting factors into parts costs no accuracy.
#[test]
fn products_err_by_no_more_than_a_chain_of_multiply_adds() {
    let p = Product { m: 96, n: 96, k: 3000, transposed: (false, true), gap: 0, accumulate: false };
    let want = p.run(&Reference);
    let error = |device: &Cpu| {
        let squares: f64 = p.run(device).iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum();
        (squares / want.len() as f64).sqrt()
    };
    let errors: Vec<(Isa, f64)> = devices(1).iter().map(|d| (d.isa(), error(d))).collect();
    let (_, portable) = errors[errors.len() - 1];
    for (isa, error) in errors {
        println!("{isa:?}: {error:.3e}");
        assert!(error <= 1.1 * portable, "{isa:?}: {error:.3e}, portable: {portable:.3e}");
    }
}

/// The nearest bf16 by distance, ties to the even one: by trying both neighbours.
fn nearest_bf16(x: f32) -> f32 {
    let below = f32::from_bits(x.to_bits() & 0xffff_0000);
    let above = f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000);
    let (down, up) = ((x as f64 - below as f64).abs(), (above as f64 - x as f64).abs());
    let even = below.to_bits() >> 16 & 1 == 0;
    if down < up || down == up && even { below } else { above }
}

#[test]
fn bf16_products_are_products_of_rounded_factors() {
    assert_eq!(nearest_bf16(1.0 + 1.0 / 256.0), 1.0);
    assert_eq!(nearest_bf16(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
    let of = |threads| devices(threads).into_iter().map(|d| d.with_precision(Precision::Bf16));
    for p in products() {
        let want = p.run_on(&Reference, nearest_bf16);
        for (one, three) in of(1).zip(of(3)) {
            let isa = one.isa();
            let got = p.run(&one);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let error = (g - w).abs();
                assert!(error <= p.allowed(*w), "{p:?} on {isa:?}: [{i}] is {g}, not {w}");
            }
            assert!(got == p.run(&three), "{p:?} on {isa:?}: other bits with 3 threads");
        }
    }
}

#[test]
fn what_is_not_finite_stays_so_in_products() {
    let payload = f32::from_bits(0x7fff_ffff);
    for (precision, device) in devices(1).into_iter().flat_map(|d| {
        [Precision::F32, Precision::Bf16].map(|precision| (precision, d.clone().with_precision(precision)))
    }) {
        for bad in [f32::NAN, payload, -payload, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 64 * 64];
            values[5 * 64 + 40] = bad;
            let a = Tensor::from_values(&device, 64, 64, &values);
            let b = Tensor::from_values(&device, 64, 64, &[1.0; 64 * 64]);
            let mut c = Tensor::zeros(&device, 64, 64);
            device.run(|| device.product(a.matrix(), b.matrix(), c.view_mut(), false));
            for (i, value) in c.to_vec(&device).iter().enumerate() {
                let isa = device.isa();
                assert_eq!(value.is_finite(), i / 64 != 5, "{isa:?}, {precision:?}, {bad}: [{i}] is {value}");
            }
        }
    }
}
