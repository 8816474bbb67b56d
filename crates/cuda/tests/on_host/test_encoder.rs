//! Pooling, unit rows, rotary positions, MaxSim.

use tercio_engine::device::{Device, EncoderKernels, MaxSimShape, MaxSimSide};
use tercio_engine::{Rotary, Span, Tensor};

use super::{check, draw};

fn spans(lengths: &[usize]) -> Vec<Span> {
    let mut offsets = vec![0u32];
    lengths.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + *n as u32));
    Span::from_offsets(&offsets)
}

fn tensor<D: Device>(d: &D, what: u64, rows: usize, columns: usize) -> Tensor<D> {
    Tensor::from_values(d, rows, columns, &draw(&[what, rows as u64, columns as u64], rows * columns))
}

#[test]
fn means_of_spans() {
    for width in [1, 32, 33, 100] {
        let texts = spans(&[3, 0, 1, 40, 8, 0]);
        check!(format!("width {width}"), |d| {
            let x = tensor(d, 1, 52, width);
            let (mut y, dy) = (Tensor::scratch(d, texts.len(), width), tensor(d, 2, texts.len(), width));
            d.span_means(x.view(), width, &texts, y.view_mut());
            let mut dx = tensor(d, 3, 52, width);
            d.span_means_backward(dy.view(), width, &texts, dx.view_mut());
            vec![("means", d.read_f64(y.view())), ("dx", d.read_f64(dx.view()))]
        });
    }
}

#[test]
fn rows_of_unit_length() {
    for (rows, width) in [(0, 4), (1, 1), (5, 33), (9, 128)] {
        // One row is shorter than `least`, and one is nothing.
        let mut values = draw(&[1, width as u64], rows * width);
        values.iter_mut().take(width).for_each(|v| *v *= 1e-3 / 16.0);
        values.iter_mut().skip(4 * width).take(width).for_each(|v| *v = 0.0);
        for least in [1e-12, 0.05] {
            check!(format!("{rows} x {width}, least {least}"), |d| {
                let x = Tensor::from_values(d, rows, width, &values);
                let (dy, mut y) = (tensor(d, 2, rows, width), Tensor::scratch(d, rows, width));
                d.normalize(x.view(), width, least, y.view_mut());
                let mut dx = tensor(d, 3, rows, width);
                if least > 1e-3 {
                    d.normalize_backward(x.view(), width, least, dy.view(), dx.view_mut());
                }
                vec![("y", d.read_f64(y.view())), ("dx", d.read_f64(dx.view()))]
            });
        }
    }
}

#[test]
fn rotary_positions() {
    for (heads, dim, stride) in [(1, 2, 2), (3, 6, 60), (5, 128, 3 * 640)] {
        let rotary = Rotary::new(10_000.0, dim, 50);
        let positions = [0, 7, 49, 3, 0];
        check!(format!("{heads} heads of {dim}"), |d| {
            let mut x = tensor(d, 1, positions.len(), stride);
            // Queries and keys are turned, values not.
            let columns = if stride > dim { 2 * heads * dim } else { dim };
            d.rotate(x.view_mut(), stride, columns, &rotary, &positions, false);
            let turned = d.read_f64(x.view());
            let mut y = tensor(d, 2, positions.len(), stride);
            d.rotate(y.view_mut(), stride, columns, &rotary, &positions, true);
            vec![("turned", turned), ("back", d.read_f64(y.view()))]
        });
    }
}

#[test]
fn max_sim_and_its_gradients() {
    let (queries, documents) = (spans(&[3, 1, 0, 33, 32]), spans(&[5, 0, 1, 70, 32]));
    for (i, width) in [1, 64, 65, 128].into_iter().enumerate() {
        let mut shape = MaxSimShape::all(queries.clone(), documents.clone());
        match i {
            0 => shape.floors = vec![false, true, true, false, true],
            1 => shape.pairs = vec![(4, 3), (0, 0), (3, 3), (0, 3), (4, 3), (1, 1)],
            2 => shape.pairs.clear(),
            _ => {}
        }
        check!(format!("width {width}"), |d| {
            let (q, t) = (tensor(d, 1, 69, width), tensor(d, 2, 108, width));
            let mut scores = Tensor::scratch(d, shape.pairs.len(), 1);
            let best = d.max_sim(q.view(), t.view(), width, &shape, scores.view_mut());
            let slopes = tensor(d, 3, shape.pairs.len(), 1);
            let (mut dq, mut dt) = (tensor(d, 4, 69, width), tensor(d, 5, 108, width));
            let (s, side) = (slopes.view(), MaxSimSide::Queries);
            d.max_sim_backward(t.view(), width, &shape, &best, s, side, dq.view_mut());
            let side = MaxSimSide::Documents;
            d.max_sim_backward(q.view(), width, &shape, &best, s, side, dt.view_mut());
            vec![
                ("scores", d.read_f64(scores.view())),
                ("best", best.into_iter().map(|row| f64::from(row as i32)).collect()),
                ("dqueries", d.read_f64(dq.view())),
                ("ddocuments", d.read_f64(dt.view())),
            ]
        });
    }
}

/// More may be retrieved than there are, one alone, some; few distinct values, so that equal products are many.
#[test]
fn xtr_scores_and_their_gradients() {
    let (queries, documents) = (spans(&[3, 1, 0, 5]), spans(&[5, 0, 1, 270, 32]));
    let coarse =
        |what: u64, len: usize| -> Vec<f32> { draw(&[what], len).iter().map(|v| v.round()).collect() };
    for width in [1, 33] {
        for retrieved in [1, 7, 40, 307, 308] {
            let mut shape = MaxSimShape::all(queries.clone(), documents.clone());
            shape.retrieved = retrieved;
            if retrieved == 7 {
                shape.pairs = vec![(3, 3), (0, 0), (3, 4), (0, 3), (3, 0), (1, 1)];
            }
            check!(format!("width {width}, {retrieved} retrieved"), |d| {
                let q = Tensor::from_values(d, 9, width, &coarse(1, 9 * width));
                let t = Tensor::from_values(d, 308, width, &coarse(2, 308 * width));
                let mut scores = Tensor::scratch(d, shape.pairs.len(), 1);
                let best = d.max_sim(q.view(), t.view(), width, &shape, scores.view_mut());
                let slopes = tensor(d, 3, shape.pairs.len(), 1);
                let (mut dq, mut dt) = (tensor(d, 4, 9, width), tensor(d, 5, 308, width));
                let (s, side) = (slopes.view(), MaxSimSide::Queries);
                d.max_sim_backward(t.view(), width, &shape, &best, s, side, dq.view_mut());
                let side = MaxSimSide::Documents;
                d.max_sim_backward(q.view(), width, &shape, &best, s, side, dt.view_mut());
                vec![
                    // As a small number, so that no other row is within the tolerance of f32.
                    ("best", best.into_iter().map(|row| f64::from(row as i32)).collect()),
                    ("scores", d.read_f64(scores.view())),
                    ("dqueries", d.read_f64(dq.view())),
                    ("ddocuments", d.read_f64(dt.view())),
                ]
            });
        }
    }
}

/// Of equal products the first row is the best, as on the other devices.
#[test]
fn max_sim_takes_the_first_of_equals() {
    let shape = MaxSimShape::all(spans(&[2]), spans(&[45]));
    check!("equal rows", |d| {
        let q = Tensor::from_values(d, 2, 1, &[1.0, -1.0]);
        let rows: Vec<f32> = (0..45).map(|j| if [9, 12, 41].contains(&j) { 2.0 } else { 1.0 }).collect();
        let t = Tensor::from_values(d, 45, 1, &rows);
        let mut scores = Tensor::scratch(d, 1, 1);
        let best = d.max_sim(q.view(), t.view(), 1, &shape, scores.view_mut());
        assert_eq!(best, [9, 0]);
        vec![("scores", d.read_f64(scores.view()))]
    });
}
