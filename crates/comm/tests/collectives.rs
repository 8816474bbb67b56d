//! The suite of collectives over the carriers of the default build, ranks being threads.

mod common;

use common::{ranks, suite::SUITE};
use tercio_comm::{Backend, World};

const SIZES: [usize; 6] = [1, 2, 3, 4, 7, 8];

fn run(name: &str, backend: Backend) {
    let part: fn(&World) = SUITE.iter().find(|(other, _)| *other == name).unwrap().1;
    for size in SIZES {
        let backends = ranks(size, backend, |world| {
            part(&world);
            world.backend()
        });
        let expected = if size == 1 { "none" } else { backend.name() };
        assert!(backends.iter().all(|name| *name == expected), "{backends:?}");
    }
}

macro_rules! suite {
    ($module:ident, $backend:expr, $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $name() {
                    super::run(stringify!($name), $backend);
                }
            )*
            #[test]
            fn nothing_is_left_out() {
                assert_eq!([$(stringify!($name)),*], super::SUITE.map(|(name, _)| name));
            }
        }
    };
}

macro_rules! over {
    ($module:ident, $backend:expr) => {
        suite!($module, $backend, all_reduce all_reduce_of_f64 reduction_by_buckets absent_ranks own_parts ragged_gathers broadcasts
            barrier gradients_of_a_gather several_threads costs);
    };
}

over!(tcp, tercio_comm::Backend::Tcp);
over!(local, tercio_comm::Backend::Local);
