//! The suite that every carrier passes: each function runs as every rank at once and checks what this rank gets.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tercio_comm::{Leave, World};

use super::{bits, tree_sum, values};

/// All of it, by name.
pub const SUITE: [(&str, fn(&World)); 11] = [
    ("all_reduce", all_reduce),
    ("all_reduce_of_f64", all_reduce_of_f64),
    ("reduction_by_buckets", reduction_by_buckets),
    ("absent_ranks", absent_ranks),
    ("own_parts", own_parts),
    ("ragged_gathers", ragged_gathers),
    ("broadcasts", broadcasts),
    ("barrier", barrier),
    ("gradients_of_a_gather", gradients_of_a_gather),
    ("several_threads", several_threads),
    ("costs", costs),
];

/// Lengths around nothing, one, odd, and more than a piece of a frame.
const LENGTHS: [usize; 6] = [0, 1, 5, 1000, 70_001, 300_007];

fn everyone(size: usize, len: usize) -> Vec<Option<Vec<f32>>> {
    (0..size).map(|rank| Some(values(rank, len))).collect()
}

fn all_reduce(world: &World) {
    for len in LENGTHS {
        let mut data = values(world.rank(), len);
        world.all_reduce(&mut data).unwrap();
        let expected = tree_sum(&everyone(world.size(), len), len);
        assert_eq!(bits(&data), bits(&expected), "{len} values");
    }
}

fn all_reduce_of_f64(world: &World) {
    let wide = |rank| values(rank, 40_003).into_iter().map(|v| f64::from(v) / 3.0).collect::<Vec<_>>();
    let mut data = wide(world.rank());
    world.all_reduce(&mut data).unwrap();
    let expected = tree_sum(&(0..world.size()).map(|r| Some(wide(r))).collect::<Vec<_>>(), 40_003);
    assert!(data.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
}

fn reduction_by_buckets(world: &World) {
    let len = 200_003;
    // Not in the order of the buffer, one empty, one of one element, and a gap that stays as it is.
    let buckets = [100_000..200_003, 70_000..70_000, 10..99_000, 0..1];
    let expected = tree_sum(&everyone(world.size(), len), len);
    let own = values(world.rank(), len);
    let mut data = own.clone();
    // SAFETY: `data` is not touched before `finish`, but for a bucket that is not ready.
    let reduction = unsafe {
        world.start_reduction(data.as_mut_ptr(), len, &buckets, Leave::Everywhere, 64, true).unwrap()
    };
    // In another order than declared, at another pace on each rank, and one not at all.
    std::thread::sleep(Duration::from_millis(3 * world.rank() as u64));
    for index in [2, 0, 1] {
        reduction.ready(index);
    }
    let cost = reduction.finish().unwrap();
    for index in 0..len {
        let summed = buckets.iter().any(|bucket| bucket.contains(&index));
        let expected = if summed { expected[index] } else { own[index] };
        assert_eq!(data[index].to_bits(), expected.to_bits(), "element {index}");
    }
    assert_eq!(cost.sent > 0, world.size() > 1);
}

fn absent_ranks(world: &World) {
    let len = 3001;
    // Every set of ranks that have something, for as many ranks as that is not too many; then some.
    let sets: Vec<usize> =
        if world.size() <= 4 { (0..1 << world.size()).collect() } else { vec![0, 1, 0x80, 0xaa, 0x0f, 0xff] };
    for set in sets {
        let has = |rank: usize| set >> rank & 1 == 1;
        // Minus zero: added to zero it would not be the same bits.
        let of = |rank: usize| if rank.is_multiple_of(2) { vec![-0.0; len] } else { values(rank, len) };
        let all: Vec<Option<Vec<f32>>> = (0..world.size()).map(|r| has(r).then(|| of(r))).collect();
        let expected = tree_sum(&all, len);
        let mut data = if has(world.rank()) { of(world.rank()) } else { vec![f32::NAN; len] };
        // SAFETY: `data` is not touched before `finish`.
        let reduction = unsafe {
            let present = has(world.rank());
            world.start_reduction(data.as_mut_ptr(), len, &[0..len], Leave::Everywhere, 1, present).unwrap()
        };
        reduction.ready(0);
        reduction.finish().unwrap();
        assert_eq!(bits(&data), bits(&expected), "ranks {set:b} of {}", world.size());
    }
}

fn own_parts(world: &World) {
    let len = 50_000;
    let buckets = [30_000..50_000, 0..29_999];
    for grain in [1, 512, 100_000] {
        let expected = tree_sum(&everyone(world.size(), len), len);
        let mut data = values(world.rank(), len);
        // SAFETY: `data` is not touched before `finish`.
        let reduction = unsafe {
            world.start_reduction(data.as_mut_ptr(), len, &buckets, Leave::Owned, grain, true).unwrap()
        };
        reduction.finish().unwrap();
        let mut renewed = vec![f32::NAN; len];
        for bucket in &buckets {
            let own = world.own_parts(bucket.clone(), grain)[world.rank()].clone();
            assert_eq!(bits(&data[own.clone()]), bits(&expected[own.clone()]), "grain {grain}");
            own.for_each(|i| renewed[i] = data[i] * 0.5);
        }
        world.all_gather_parts(&mut renewed, &buckets, grain).unwrap();
        for (i, value) in renewed.iter().enumerate() {
            if i == 29_999 {
                assert!(value.is_nan());
            } else {
                assert_eq!(value.to_bits(), (expected[i] * 0.5).to_bits(), "element {i}, grain {grain}");
            }
        }
    }
}

fn ragged_gathers(world: &World) {
    let size = world.size();
    // Rank 0 has nothing, the last one a lot.
    let of = |rank: usize| -> Vec<u8> {
        (0..rank * 300_001 / size.max(2)).map(|i| (i * 7 + rank) as u8).collect()
    };
    let all: Vec<Vec<u8>> = (0..size).map(of).collect();
    assert_eq!(world.all_gather_bytes(of(world.rank())).unwrap(), all);
    let gathered = world.gather_bytes(of(world.rank())).unwrap();
    assert_eq!(gathered, if world.is_main() { all } else { Vec::new() });
    let numbers = world.all_gather(&values(world.rank(), world.rank() * 3)).unwrap();
    for (rank, got) in numbers.iter().enumerate() {
        assert_eq!(bits(got), bits(&values(rank, rank * 3)));
    }
    // Nobody has anything.
    assert_eq!(world.all_gather_bytes(Vec::new()).unwrap(), vec![Vec::<u8>::new(); size]);
}

fn broadcasts(world: &World) {
    for root in 0..world.size() {
        let long = || (0..10_000_000u32).map(|i| (i >> 3) as u8 ^ root as u8).collect::<Vec<u8>>();
        // What the others pass is dropped, whatever its length.
        let own = if world.rank() == root { long() } else { vec![1; world.rank()] };
        assert!(world.broadcast_bytes(root, own).unwrap() == long(), "from {root}");
        let own = if world.rank() == root { Vec::new() } else { vec![9] };
        assert_eq!(world.broadcast_bytes(root, own).unwrap(), Vec::<u8>::new());
        let mut data = values(world.rank(), 5000);
        world.broadcast(root, &mut data).unwrap();
        assert_eq!(bits(&data), bits(&values(root, 5000)));
    }
}

fn barrier(world: &World) {
    // Nobody leaves before the last one came: all clocks are one clock on one host.
    for late in 0..world.size() {
        std::thread::sleep(Duration::from_millis(if late == world.rank() { 30 } else { 0 }));
        let came = now();
        world.barrier().unwrap();
        let left = now();
        let all = world.all_gather(&[came, left]).unwrap();
        let last_came = all.iter().map(|of| of[0]).fold(0.0, f64::max);
        assert!(all.iter().all(|of| of[1] >= last_came), "{all:?}");
    }
}

/// Seconds on a clock that all processes of a host share.
fn now() -> f64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap();
    // Hundredths: coarse, and never later for an earlier reading.
    text.split(' ').next().unwrap().parse().unwrap()
}

fn gradients_of_a_gather(world: &World) {
    let size = world.size();
    let lengths: Vec<usize> = (0..size).map(|rank| 4 * (rank % 3)).collect();
    let total: usize = lengths.iter().sum();
    let gathered = world.all_gather_with_gradients(&values(world.rank(), lengths[world.rank()])).unwrap();
    let rows: Vec<f32> = (0..size).flat_map(|rank| values(rank, lengths[rank])).collect();
    assert_eq!(bits(&gathered.rows), bits(&rows));
    let gradients = |rank: usize| values(rank + 100, total);
    let own = gathered.backward(gradients(world.rank())).unwrap();
    let all: Vec<_> = (0..size).map(|rank| Some(gradients(rank))).collect();
    let expected = tree_sum(&all, total)[gathered.parts[world.rank()].clone()].to_vec();
    assert_eq!(bits(&own), bits(&expected));
    // A wrong length is this rank's own error, and ends nothing.
    assert!(gathered.backward(vec![0.0; total + 1]).is_err());
    world.barrier().unwrap();
}

fn several_threads(world: &World) {
    // A reduction at work while another thread asks for the next collective: it waits for its turn.
    let mut data = values(world.rank(), 9000);
    let log = Mutex::new(Vec::new());
    // SAFETY: `data` is not touched before `finish`.
    let reduction = unsafe {
        world.start_reduction(data.as_mut_ptr(), 9000, &[0..9000], Leave::Everywhere, 1, true).unwrap()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            world.barrier().unwrap();
            log.lock().unwrap().push("barrier");
        });
        std::thread::sleep(Duration::from_millis(20));
        if world.size() > 1 {
            log.lock().unwrap().push("ready");
        }
        reduction.ready(0);
        reduction.finish().unwrap();
    });
    let expected = if world.size() > 1 { vec!["ready", "barrier"] } else { vec!["barrier"] };
    assert_eq!(*log.lock().unwrap(), expected);
    assert_eq!(bits(&data), bits(&tree_sum(&everyone(world.size(), 9000), 9000)));
}

fn costs(world: &World) {
    let before = world.costs();
    let since = Instant::now();
    world.all_reduce(&mut [1.0f32; 1 << 16]).unwrap();
    let (after, passed) = (world.costs(), since.elapsed().as_secs_f64());
    if world.size() == 1 {
        assert_eq!((before, after), Default::default());
        return;
    }
    // Twice (P - 1)/P of the bytes within the cube, and frames around them.
    let power = 1 << world.size().ilog2();
    let bytes = (2 * (power - 1) * (4 << 16) / power) as u64;
    let sent = after.sent - before.sent;
    if world.size() == power {
        assert!((bytes..bytes + 4096).contains(&sent), "{sent} bytes, expected {bytes}");
    }
    assert!(after.waited - before.waited <= passed && after.busy >= before.busy);
}
