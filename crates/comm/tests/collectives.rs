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

/// More ranks than processors, steps and newcomers at once.
#[test]
fn a_larger_world() {
    let size = 37;
    let results = ranks(size, Backend::Tcp, |world| {
        let mut sum = vec![world.rank() as f32; 100];
        world.all_reduce(&mut sum).unwrap();
        let told = world.broadcast_bytes(36, vec![world.rank() as u8; 3]).unwrap();
        let all = world.all_gather_bytes(vec![world.rank() as u8]).unwrap();
        (sum, told, all)
    });
    for (sum, told, all) in results {
        assert_eq!((sum, told), (vec![(36 * 37 / 2) as f32; 100], vec![36; 3]));
        assert!(all.into_iter().enumerate().all(|(rank, bytes)| bytes == [rank as u8]));
    }
}

/// A library may hold a world anywhere.
#[test]
fn a_world_goes_between_threads() {
    fn check<T: Send + Sync + Clone>(_: &T) {}
    check(&World::alone());
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
