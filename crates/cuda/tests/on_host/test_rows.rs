//! Pointwise kernels, dropout's bits, norms, sums, embeddings: sizes around those of blocks and warps.

use tercio_engine::device::{Device, EncoderKernels};
use tercio_engine::random::key;
use tercio_engine::{Activation, Dropout, Tensor};

use super::driver::OnHost;
use super::gpu;
use super::library::{Library, Storage, to_bf16};
use super::memory::{Guarded, floats};
use super::{check, draw, same_bits_as_cpu};
use tercio_cuda::driver::{Factors, Launch};

const KINDS: [Activation; 5] =
    [Activation::Relu, Activation::GeluTanh, Activation::GeluErf, Activation::Silu, Activation::Tanh];

/// Rows and columns: none, one, around a warp, a block of rows, a block of threads, a partial sum.
const SHAPES: [(usize, usize); 9] =
    [(0, 5), (1, 1), (3, 31), (4, 32), (5, 33), (129, 7), (2, 255), (1, 257), (260, 40)];

fn dropout(site: u64) -> Option<Dropout> {
    Dropout::new(key(&[5, site]), 0.3)
}

fn tensor<D: Device>(d: &D, what: u64, rows: usize, columns: usize) -> Tensor<D> {
    Tensor::from_values(d, rows, columns, &draw(&[what, rows as u64, columns as u64], rows * columns))
}

fn draws_agree<D: Device>(device: &D) {
    for (rows, width) in SHAPES {
        let d = Dropout::new(key(&[1, rows as u64]), 0.4).unwrap();
        let mut x = Tensor::from_values(device, rows, width, &vec![1.0; rows * width]);
        device.dropout(x.view_mut(), width, d);
        for (i, v) in x.to_vec(device).iter().enumerate() {
            let want = d.factor(d.row(i / width), (i % width) as u32);
            assert_eq!(v.to_bits(), want.to_bits(), "{rows} x {width}: element {i}");
        }
    }
}

#[test]
fn dropout_has_the_bits_of_the_generator() {
    if gpu::wanted() {
        return draws_agree(&gpu::device(Factors::F32));
    }
    for descending in [false, true] {
        draws_agree(&OnHost::device(Storage::F32, descending));
    }
}

#[test]
fn pointwise_kernels() {
    for (rows, width) in SHAPES {
        let what = format!("{rows} x {width}");
        check!(what, |d| {
            let mut x = tensor(d, 1, rows, width);
            let (y, bias) = (tensor(d, 2, rows, width), tensor(d, 3, 1, width));
            d.add(x.view_mut(), y.view());
            d.scale(x.view_mut(), 0.75);
            d.add_bias(x.view_mut(), bias.view());
            let added = d.read_f64(x.view());
            d.residual(x.view_mut(), y.view(), width, None);
            d.residual(x.view_mut(), y.view(), width, dropout(1));
            let residual = d.read_f64(x.view());
            d.dropout(x.view_mut(), width, dropout(2).unwrap());
            let mut z = Tensor::scratch(d, rows, width);
            d.fill(z.view_mut(), -1.5);
            let filled = d.read_f64(z.view());
            vec![
                ("added", added),
                ("residual", residual),
                ("dropped", d.read_f64(x.view())),
                ("filled", filled),
            ]
        });
        same_bits_as_cpu!(what, |d| {
            let mut x = tensor(d, 1, rows, width);
            let (y, bias) = (tensor(d, 2, rows, width), tensor(d, 3, 1, width));
            d.add(x.view_mut(), y.view());
            d.scale(x.view_mut(), 0.75);
            d.add_bias(x.view_mut(), bias.view());
            d.residual(x.view_mut(), y.view(), width, None);
            d.residual(x.view_mut(), y.view(), width, dropout(1));
            d.dropout(x.view_mut(), width, dropout(2).unwrap());
            vec![("all", d.read_f64(x.view()))]
        });
    }
}

#[test]
fn activations() {
    for (i, (rows, width)) in SHAPES.into_iter().enumerate() {
        for (k, kind) in KINDS.into_iter().enumerate() {
            let (gated, drop) = ((i + k) % 2 == 1, dropout(k as u64).filter(|_| i % 3 != 0));
            let stored = if gated { 2 * width } else { width };
            let what = format!("{kind:?}, {rows} x {width}, gated {gated}, {drop:?}");
            check!(what, |d| {
                let (u, bias) = (tensor(d, 1, rows, stored), tensor(d, 2, 1, stored));
                let dy = tensor(d, 3, rows, width);
                let (mut y, mut z) = (Tensor::scratch(d, rows, width), Tensor::scratch(d, rows, width));
                d.activation(u.view(), width, kind, gated, drop, y.view_mut());
                d.bias_activation(u.view(), bias.view(), width, kind, gated, drop, z.view_mut());
                let (mut du, mut dv) = (Tensor::scratch(d, rows, stored), Tensor::scratch(d, rows, stored));
                let mut dbias = tensor(d, 4, 1, stored);
                d.activation_backward(u.view(), width, kind, gated, drop, dy.view(), du.view_mut());
                let (b, target) = (bias.view(), dbias.view_mut());
                let (dy, out) = (dy.view(), dv.view_mut());
                d.bias_activation_backward(u.view(), b, width, kind, gated, drop, dy, out, target);
                vec![
                    ("y", d.read_f64(y.view())),
                    ("y with bias", d.read_f64(z.view())),
                    ("du", d.read_f64(du.view())),
                    ("du with bias", d.read_f64(dv.view())),
                    ("dbias", d.read_f64(dbias.view())),
                ]
            });
            same_bits_as_cpu!(what, |d| {
                let u = tensor(d, 1, rows, stored);
                let dy = tensor(d, 3, rows, width);
                let (mut y, mut du) = (Tensor::scratch(d, rows, width), Tensor::scratch(d, rows, stored));
                d.activation(u.view(), width, kind, gated, drop, y.view_mut());
                d.activation_backward(u.view(), width, kind, gated, drop, dy.view(), du.view_mut());
                vec![("y", d.read_f64(y.view())), ("du", d.read_f64(du.view()))]
            });
        }
    }
}

#[test]
fn norms() {
    const EPS: f64 = 1e-6;
    for (i, (rows, width)) in SHAPES.into_iter().chain([(6, 1031)]).enumerate() {
        for has_bias in [true, false] {
            let what = format!("{rows} x {width}, bias {has_bias}");
            let parameters = if has_bias { 2 * width } else { width };
            let drop = dropout(i as u64).filter(|_| i % 2 == 0);
            check!(what, |d| {
                // Far from zero in the mean, as real rows are.
                let mut x = tensor(d, 1, rows, width);
                let (shift, norm) = (tensor(d, 9, 1, width), tensor(d, 2, 1, parameters));
                d.add_bias(x.view_mut(), shift.view());
                let dy = tensor(d, 3, rows, width);
                let (mut rms, mut layer) = (Tensor::scratch(d, rows, width), Tensor::scratch(d, rows, width));
                d.rms_norm(x.view(), shift.view(), EPS, rms.view_mut());
                d.layer_norm(x.view(), width, norm.view(), EPS, layer.view_mut());
                let (mut dx, mut dw) = (tensor(d, 4, rows, width), tensor(d, 5, 1, width));
                let (to, of) = (dx.view_mut(), dw.view_mut());
                d.rms_norm_backward(x.view(), shift.view(), EPS, dy.view(), to, of);
                let (mut dz, mut dn) = (tensor(d, 6, rows, width), tensor(d, 7, 1, parameters));
                let (to, of) = (dz.view_mut(), dn.view_mut());
                // A row of one or two elements has hardly a deviation: its gradient is a difference of equals.
                let eps = if width < 3 { 0.1 } else { EPS };
                d.layer_norm_backward(x.view(), width, norm.view(), eps, dy.view(), to, of);
                let mut end = tensor(d, 8, rows, width);
                let (bias, n) = (Some(shift.view()), Some((norm.view(), EPS)));
                d.bias_residual(end.view_mut(), width, bias, dy.view(), n, drop);
                d.bias_residual(end.view_mut(), width, None, dy.view(), None, drop);
                let (mut back, mut dbias) = (Tensor::scratch(d, rows, width), tensor(d, 5, 1, width));
                let of = Some(dbias.view_mut());
                d.bias_residual_backward(dy.view(), width, dropout(8).unwrap(), back.view_mut(), of);
                vec![
                    ("rms norm", d.read_f64(rms.view())),
                    ("layer norm", d.read_f64(layer.view())),
                    ("dx", d.read_f64(dx.view())),
                    ("dweight", d.read_f64(dw.view())),
                    ("dx of layer norm", d.read_f64(dz.view())),
                    ("dnorm", d.read_f64(dn.view())),
                    ("end of a sub-layer", d.read_f64(end.view())),
                    ("back", d.read_f64(back.view())),
                    ("dbias", d.read_f64(dbias.view())),
                ]
            });
            same_bits_as_cpu!(what, |d| {
                let (x, weight) = (tensor(d, 1, rows, width), tensor(d, 2, 1, width));
                let (dy, mut dx) = (tensor(d, 3, rows, width), tensor(d, 4, rows, width));
                let (mut y, mut ignored) = (Tensor::scratch(d, rows, width), tensor(d, 5, 1, width));
                let norm = tensor(d, 6, 1, parameters);
                d.rms_norm(x.view(), weight.view(), EPS, y.view_mut());
                let (to, of) = (dx.view_mut(), ignored.view_mut());
                d.rms_norm_backward(x.view(), weight.view(), EPS, dy.view(), to, of);
                let mut z = Tensor::scratch(d, rows, width);
                d.layer_norm(x.view(), width, norm.view(), EPS, z.view_mut());
                let parts = [&y, &dx, &z].map(|t| d.read_f64(t.view()));
                ["y", "dx", "layer norm"].into_iter().zip(parts).collect()
            });
        }
    }
}

#[test]
fn sums_go_beyond_a_block() {
    for n in [0, 1, 255, 16384, 16385, 40_003] {
        check!(format!("{n} elements"), |d| {
            let (a, b) = (tensor(d, 1, 1, n), tensor(d, 2, 1, n));
            vec![("blocks", d.dot_blocks(a.view(), b.view())), ("dot", vec![d.dot(a.view(), b.view())])]
        });
    }
    for (rows, width) in [(0, 3), (1, 1), (128, 32), (129, 33), (700, 5)] {
        check!(format!("{rows} rows of {width}"), |d| {
            let (x, mut total) = (tensor(d, 1, rows, width), tensor(d, 2, 1, width));
            d.sum_rows(x.view(), total.view_mut());
            vec![("total", d.read_f64(total.view()))]
        });
    }
}

#[test]
fn embeddings() {
    for (width, count) in [(1, 40), (33, 0), (300, 70), (4, 1)] {
        let table_rows = 9;
        let ids: Vec<u32> = (0..count).map(|i| (key(&[7, i as u64]) % table_rows) as u32 & !2).collect();
        let all = |what: u64| draw(&[what, width as u64], table_rows as usize * width);
        check!(format!("{count} rows of {width}"), |d| {
            let table = Tensor::from_values(d, table_rows as usize, width, &all(1));
            let mut rows = Tensor::scratch(d, count, width);
            d.gather(table.view(), width, &ids, rows.view_mut());
            d.gather_add(table.view(), width, &ids, rows.view_mut());
            let mut sum = Tensor::from_values(d, table_rows as usize, width, &all(2));
            let values = tensor(d, 3, count, width);
            d.scatter_add(values.view(), width, &ids, sum.view_mut());
            vec![("rows", d.read_f64(rows.view())), ("table", d.read_f64(sum.view()))]
        });
        same_bits_as_cpu!(format!("{count} rows of {width}"), |d| {
            let mut sum = Tensor::from_values(d, table_rows as usize, width, &all(2));
            let values = tensor(d, 3, count, width);
            d.scatter_add(values.view(), width, &ids, sum.view_mut());
            vec![("table", d.read_f64(sum.view()))]
        });
    }
}

/// To the storage type and back: exact in f32; in bf16 the nearest, ties to even, and what is not finite stays so.
#[test]
fn factors_are_rounded_to_the_nearest_bf16() {
    let mut values = draw(&[1], 300);
    values.iter_mut().enumerate().for_each(|(i, v)| *v = f32::from_bits(v.to_bits() + 37 * i as u32));
    values.extend([f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, 1e-40]);
    values.extend([0x3f80_8000, 0x3f81_8000, 0x7f7f_8000, 0x7fff_ffff, 0xff80_0001].map(f32::from_bits));
    let n = values.len();
    for storage in [Storage::F32, Storage::Bf16] {
        let (x, y) = (floats(values.clone()), Guarded::new(vec![0u16; n], 0x7f7f));
        let arguments = [(&x).into(), (&y).into(), (n as u64).into()];
        let grid = [n.div_ceil(256) as u32, 1, 1];
        let launch = Launch { kernel: "to_bf16", grid, threads: 256, shared: 0, arguments: &arguments };
        Library::of(storage).launch(&launch, false).unwrap();
        for (v, b) in values.iter().zip(y.values()) {
            let (got, want) = (f32::from_bits((*b as u32) << 16), f32::from_bits((to_bf16(*v) as u32) << 16));
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && v.is_nan(),
                "{v:e} became {got:e}, not {want:e}"
            );
        }
    }
    assert_eq!(to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
    assert_eq!(to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
}
