//! One suite that every carrier passes: what collectives give, bit for bit, for worlds of several sizes.

mod common;

use common::{bits, ranks, tree_sum, values};
use tercio_comm::{Backend, Leave, World};

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Lengths around nothing, one, odd, and more than a piece of a frame.
const LENGTHS: [usize; 6] = [0, 1, 5, 1000, 70_001, 300_007];

fn all_reduce(backend: Backend) {
    for size in SIZES {
        for len in LENGTHS {
            let expected = tree_sum(&(0..size).map(|r| Some(values(r, len))).collect::<Vec<_>>(), len);
            let got = ranks(size, backend, |world| {
                let mut data = values(world.rank(), len);
                world.all_reduce(&mut data).unwrap();
                let mut wide: Vec<f64> = values(world.rank(), len).into_iter().map(f64::from).collect();
                world.all_reduce(&mut wide).unwrap();
                (data, wide)
            });
            let wide: Vec<_> = (0..size)
                .map(|r| Some(values(r, len).into_iter().map(f64::from).collect::<Vec<f64>>()))
                .collect();
            let wide = tree_sum(&wide, len);
            for (rank, (data, wider)) in got.iter().enumerate() {
                assert_eq!(bits(data), bits(&expected), "rank {rank} of {size}, {len} values");
                assert!(
                    wider.iter().zip(&wide).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{rank} of {size}, {len}"
                );
            }
        }
    }
}

#[test]
fn all_reduce_over_tcp() {
    all_reduce(Backend::Tcp);
}
