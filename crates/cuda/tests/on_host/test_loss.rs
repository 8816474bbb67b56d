//! Cross-entropy, label smoothing, the greatest of a row, the k greatest.

use tercio_engine::Tensor;
use tercio_engine::device::Device;
use tercio_engine::random::key;

use super::{check, draw, same_bits_as_cpu};

#[test]
fn cross_entropy_and_smoothing() {
    for (rows, classes) in [(0, 4), (1, 1), (3, 2), (2, 255), (4, 256), (5, 257), (2, 5000), (1, 32_128)] {
        let labels: Vec<u32> = (0..rows).map(|i| (key(&[3, i]) % classes) as u32).collect();
        // Logits far from zero: the greatest is taken off before the exponentials.
        let logits: Vec<f32> =
            draw(&[1, classes], (rows * classes) as usize).iter().map(|v| v * 8.0 + 64.0).collect();
        let (rows, classes) = (rows as usize, classes as usize);
        check!(format!("{rows} rows of {classes} classes"), |d| {
            let mut z = Tensor::from_values(d, rows, classes, &logits);
            let (mut losses, mut log_sum) = (Tensor::scratch(d, rows, 1), Tensor::scratch(d, rows, 1));
            d.cross_entropy(z.view(), &labels, losses.view_mut(), log_sum.view_mut());
            d.smooth_losses(z.view(), &labels, 0.2, losses.view_mut());
            d.cross_entropy_backward(z.view_mut(), &labels, log_sum.view(), 0.7);
            let gradient = d.read_f64(z.view());
            d.smooth_gradient(z.view_mut(), &labels, 0.14);
            vec![
                ("losses", d.read_f64(losses.view())),
                ("log sum", d.read_f64(log_sum.view())),
                ("gradient", gradient),
                ("smoothed", d.read_f64(z.view())),
            ]
        });
        // The sums' orders differ; given the log-sum, the gradient has the CPU's bits.
        same_bits_as_cpu!(format!("{rows} rows of {classes} classes"), |d| {
            let mut z = Tensor::from_values(d, rows, classes, &logits);
            let log_sum = Tensor::from_values(d, rows, 1, &vec![80.0; rows]);
            d.cross_entropy_backward(z.view_mut(), &labels, log_sum.view(), 0.7);
            vec![("gradient", d.read_f64(z.view()))]
        });
    }
}

#[test]
fn argmax_takes_the_first_of_equals() {
    for width in [1, 31, 256, 257, 1000] {
        let rows = 4;
        let mut x: Vec<f32> = draw(&[5, width as u64], rows * width).iter().map(|v| v.round()).collect();
        x[width..2 * width].fill(f32::NEG_INFINITY);
        check!(format!("width {width}"), |d| {
            let t = Tensor::from_values(d, rows, width, &x);
            vec![("places", d.argmax(t.view(), width).into_iter().map(f64::from).collect())]
        });
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
    for k in [0, 1, 2, 8, 40, width + 5] {
        check!(format!("k = {k}"), |d| {
            let t = Tensor::from_values(d, rows, width, &x);
            let (places, values) =
                d.top_k(t.view(), width, k).into_iter().unzip::<_, _, Vec<u32>, Vec<f64>>();
            vec![("places", places.into_iter().map(f64::from).collect()), ("values", values)]
        });
    }
}
