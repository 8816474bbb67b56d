//! Times the sum of one long buffer over all ranks. Start it as a rank, for instance
//! `tercio launch --nproc-per-node 2 -- ...` does it for `tercio`, or `bench/all_reduce.py` for this program; rank 0 prints one
//! line of JSON: bytes per second are those of the buffer, not of the wire.
//!
//!     all_reduce [--bytes 400000000] [--rounds 5] [--backend auto|local|tcp|mpi]

use std::time::Instant;

use tercio_comm::place::Flags;
use tercio_comm::{CommError, Place, Settings, World};

/// The values that are summed come again after so many.
const PERIOD: usize = 1000;

struct Asked {
    bytes: usize,
    rounds: usize,
    settings: Settings,
}

fn asked() -> Result<Asked, String> {
    let mut asked = Asked { bytes: 400_000_000, rounds: 5, settings: Settings::default() };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(format!("{flag}: expected a value after it"))?;
        let number = || value.parse::<usize>().map_err(|error| format!("{flag} {value}: {error}"));
        match flag.as_str() {
            "--bytes" => asked.bytes = number()?,
            "--rounds" => asked.rounds = number()?.max(1),
            "--backend" => {
                asked.settings.backend = value.parse().map_err(|error: CommError| error.to_string())?
            }
            _ => return Err(format!("{flag}: expected --bytes, --rounds or --backend")),
        }
    }
    Ok(asked)
}

fn rounds(world: &World, elements: usize, rounds: usize) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
    let ranks = world.size() as f32;
    let mut data = vec![0f32; elements];
    let mut seconds = Vec::new();
    // The first round is not counted: it makes the pages of memory real.
    for round in 0..=rounds {
        for period in data.chunks_mut(PERIOD) {
            period.iter_mut().enumerate().for_each(|(i, value)| *value = (i + world.rank()) as f32);
        }
        world.barrier()?;
        let start = Instant::now();
        world.all_reduce(&mut data)?;
        world.barrier()?;
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
        // Whole numbers below 2^24: every order of sums gives these.
        let of_ranks = ranks * (ranks - 1.0) / 2.0;
        for (index, period) in data.chunks(PERIOD).enumerate() {
            let wrong = period.iter().enumerate().find(|(i, value)| **value != *i as f32 * ranks + of_ranks);
            if let Some((i, value)) = wrong {
                return Err(format!("wrong sum at element {}: {value}", index * PERIOD + i).into());
            }
        }
    }
    Ok(seconds)
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let Asked { bytes, rounds: count, settings } = asked()?;
    let place = Place::from_env(Flags::default())?;
    let world = World::join(&place, &settings)?;
    let mut seconds = rounds(&world, bytes / 4, count)?;
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    if world.is_main() {
        println!(
            "{{\"backend\": \"{}\", \"ranks\": {}, \"bytes\": {bytes}, \"rounds\": {count}, \"seconds\": {median:.6}, \
             \"best_seconds\": {:.6}, \"gb_per_second\": {:.4}}}",
            world.backend(),
            world.size(),
            seconds[0],
            bytes as f64 / median / 1e9
        );
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("all_reduce: {error}");
        std::process::exit(1);
    }
}
