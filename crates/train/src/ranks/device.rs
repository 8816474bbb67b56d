//! The device of this rank: the processor, or a GPU of its host.

use tercio_comm::World;
use tercio_cuda::driver::Factors;
use tercio_cuda::gpu::{self, nccl};
use tercio_cuda::{Cuda, Driver, Gpu, Pool};
use tercio_engine::memory::human;
use tercio_engine::{Cpu, Fault, fault};

use super::start::{device_among, differs};
use crate::error::TrainError;
use crate::options::{DeviceChoice, DeviceOptions, Precision};

/// A device of either kind; [`crate::on_device`] does work on it.
pub enum AnyDevice {
    /// The processor.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Cuda),
}

/// Does work, generic over the device, on the device that was opened. A GPU that fails ends it with [`TrainError::Device`].
#[macro_export]
macro_rules! on_device {
    ($opened:expr, |$device:ident| $work:expr) => {
        $crate::ranks::device::faults(|| match $opened {
            $crate::ranks::device::AnyDevice::Cpu($device) => $work,
            $crate::ranks::device::AnyDevice::Cuda($device) => $work,
        })
    };
}

/// Work on a device, its faults as errors.
///
/// # Errors
/// What the work returns; [`TrainError::Device`].
pub fn faults<T>(work: impl FnOnce() -> Result<T, TrainError>) -> Result<T, TrainError> {
    fault::caught(work).unwrap_or_else(|fault| Err(TrainError::Device(fault)))
}

/// The device that was chosen, on every rank. `threads` as in [`device_among`].
///
/// # Errors
/// As [`device_among`]; a GPU that is not there or cannot be used, or that others than all ranks are to use.
pub fn open_device(
    world: &World,
    threads: usize,
    precision: Precision,
    options: &DeviceOptions,
) -> Result<AnyDevice, TrainError> {
    open(world, threads, precision, options, false)
}

/// As [`open_device`], for ranks that add gradients.
///
/// # Errors
/// As [`open_device`]; what NCCL says.
pub fn open_device_to_train(
    world: &World,
    threads: usize,
    precision: Precision,
    options: &DeviceOptions,
) -> Result<AnyDevice, TrainError> {
    open(world, threads, precision, options, true)
}

fn open(
    world: &World,
    threads: usize,
    precision: Precision,
    options: &DeviceOptions,
    joins: bool,
) -> Result<AnyDevice, TrainError> {
    // All ranks come to the same decision, from what all have.
    let found = match options.device {
        DeviceChoice::Cpu => Err(Fault(String::new())),
        _ => gpu::count(),
    };
    let kind = |choice: &DeviceChoice| u8::from(*choice != DeviceChoice::Cpu);
    let own = [
        kind(&options.device),
        u8::from(found.is_ok()),
        u8::from(options.reproducible),
        u8::from(options.tf32),
    ];
    let all = if world.size() == 1 { vec![own.to_vec()] } else { world.all_gather_bytes(own.to_vec())? };
    let flags = ["--device", "", "--reproducible", "--tf32"];
    for (i, flag) in flags.into_iter().enumerate().filter(|(_, flag)| !flag.is_empty()) {
        if let Some(rank) = all.iter().position(|a| a.get(i) != all[0].get(i)) {
            let what = format!("{flag} is not as on rank 0 there; start all ranks with the same settings");
            return Err(differs(world, rank, what));
        }
    }
    let everywhere = all.iter().all(|a| a.get(1) == Some(&1));
    let cuda = match options.device {
        DeviceChoice::Cpu => false,
        DeviceChoice::Auto => everywhere,
        DeviceChoice::Cuda(_) => true,
    };
    if !cuda {
        if options.tf32 && options.device == DeviceChoice::Cpu {
            return Err(TrainError::Options("--tf32 is for GPUs: give --device cuda or auto too".into()));
        }
        return Ok(AnyDevice::Cpu(device_among(world, threads, precision)?));
    }
    let factors = match (precision, options.tf32) {
        (Precision::Bf16, true) => {
            return Err(TrainError::Options(
                "--bf16 and --tf32 round the same factors: give one of them".into(),
            ));
        }
        (Precision::Bf16, false) => Factors::Bf16,
        (Precision::F32, true) => Factors::Tf32,
        (Precision::F32, false) => Factors::F32,
    };
    let place = world.place();
    let ordinal = ordinal(options.device, place.local_rank, place.local_size, found?)?;
    let gpu = Gpu::open(ordinal, factors)?;
    if joins {
        join_gpus(world, &gpu, options.reproducible)?;
    }
    let room = gpu.room().unwrap_or(u64::MAX);
    let limit = options.device_memory.map_or(room - room / 16, |gib| (gib * (1u64 << 30) as f64) as u64);
    tracing::info!("computing on {}, {} for tensors at most", gpu.name(), human(limit));
    Ok(AnyDevice::Cuda(Cuda::new(Pool::new(gpu, limit))))
}

/// Lets the GPUs of all ranks sum gradients among themselves, where every rank has a GPU of its own and NCCL, and bits need not be those
/// of one rank.
fn join_gpus(world: &World, gpu: &Gpu, reproducible: bool) -> Result<(), TrainError> {
    if world.size() == 1 {
        return Ok(());
    }
    let identity = [&[u8::from(nccl::is_present())][..], &gpu.identity()?].concat();
    let all = world.all_gather_bytes(identity)?;
    let host_of = |why: &str| {
        let order =
            "gradients are added through the hosts' memory, in the order that gives the bits of one rank";
        if world.is_main() {
            tracing::info!("{order}{why}");
        }
        Ok(())
    };
    let same = |a: &Vec<u8>, b: &Vec<u8>| a.get(1..) == b.get(1..);
    let shares = (1..all.len()).any(|r| all[..r].iter().any(|other| same(other, &all[r])));
    match () {
        () if reproducible => return host_of(""),
        () if shares => return host_of(": ranks share a GPU, which NCCL does not take"),
        () if all.iter().any(|a| a.first() != Some(&1)) => {
            return host_of(": NCCL (libnccl.so.2) is not found");
        }
        () => {}
    }
    let made = if world.is_main() { nccl::meeting()?.0.to_vec() } else { Vec::new() };
    let id = world.all_gather_bytes(made)?.swap_remove(0);
    let id = id.try_into().map_err(|_| TrainError::Unusable("rank 0 made no meeting of NCCL's".into()))?;
    let known = world.clone();
    let lost = Box::new(move || known.check().err().map(|error| error.to_string()));
    gpu.join(nccl::Meeting(id), world.rank(), world.size(), lost)?;
    if world.is_main() {
        tracing::info!(
            "gradients are added by NCCL, in its own order; --reproducible gives the bits of one rank"
        );
    }
    Ok(())
}

/// The number of this rank's GPU among the `found` that it sees. A scheduler that gives each rank its own shows it that one only.
fn ordinal(choice: DeviceChoice, rank: usize, ranks: usize, found: usize) -> Result<usize, TrainError> {
    match choice {
        DeviceChoice::Cuda(Some(n)) => Ok(n),
        _ if found == 1 => Ok(0),
        _ if rank < found => Ok(rank),
        _ => Err(TrainError::Options(format!(
            "{ranks} ranks on this host and {found} GPUs: start a rank for each GPU, or show each rank its own \
             (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_the_gpu_of_its_number_or_the_only_one() {
        let of = |choice, rank, found| ordinal(choice, rank, 4, found).ok();
        let cuda = DeviceChoice::Cuda(None);
        assert_eq!(
            (of(cuda, 0, 4), of(cuda, 3, 4), of(DeviceChoice::Auto, 2, 8)),
            (Some(0), Some(3), Some(2))
        );
        assert_eq!((of(cuda, 3, 1), of(DeviceChoice::Cuda(Some(2)), 0, 4)), (Some(0), Some(2)));
        let error = ordinal(cuda, 2, 4, 2).unwrap_err().to_string();
        assert!(error.starts_with("4 ranks on this host and 2 GPUs"), "{error}");
    }

    #[test]
    fn without_a_gpu_auto_is_the_processor_and_cuda_an_error() {
        if gpu::count().is_ok() {
            println!("not run: this machine has a GPU");
            return;
        }
        let open = |text: &str, tf32| {
            let options = DeviceOptions {
                device: text.parse().unwrap(),
                device_memory: None,
                reproducible: false,
                tf32,
            };
            open_device(&World::alone(), 1, Precision::F32, &options)
        };
        assert!(matches!(open("cpu", false), Ok(AnyDevice::Cpu(_))));
        assert!(matches!(open("auto", true), Ok(AnyDevice::Cpu(_))));
        for text in ["cuda", "cuda:1"] {
            let Err(TrainError::Device(fault)) = open(text, false) else { panic!("{text} was opened") };
            assert!(fault.0.starts_with("no GPU can be used: NVIDIA's driver"), "{fault}");
        }
        let Err(error) = open("cpu", true) else { panic!("--tf32 was taken") };
        assert!(error.to_string().contains("--device cuda"), "{error}");
    }

    #[test]
    fn faults_become_errors() {
        let faulty = || -> Result<(), TrainError> { Fault("gone".into()).raise() };
        assert_eq!(faults(faulty).unwrap_err().to_string(), "gone");
    }
}
