//! The shim finds what is wrong with a kernel, and knows all kernels.

use tercio_cuda::driver::{Argument, Launch};

use super::library::{Library, Storage, files, sources};
use super::memory::words;

/// What a kernel of `faults.cu` gave: an error, or its output.
fn run(kernel: &str, arguments: Vec<Argument>, len: usize, descending: bool) -> Result<Vec<u32>, String> {
    let out = words(vec![7; len]);
    let arguments: Vec<Argument> = arguments.into_iter().chain([(&out).into()]).collect();
    let launch = Launch { kernel, grid: [1, 1, 1], threads: 64, shared: 0, arguments: &arguments };
    Library::of(Storage::F32).launch(&launch, descending).map(|()| out.values().to_vec())
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_an_error() {
    let wanted = [
        (
            "fault_ended",
            "kernel fault_ended, block (0, 0, 0): threads can never meet: thread 0 waits at faults.cu:",
        ),
        ("fault_elsewhere", "threads can never meet: thread 0 waits at faults.cu:"),
        (
            "fault_shuffle",
            "kernel fault_shuffle, block (0, 0, 0): threads can never meet: thread 0 has ended",
        ),
        ("fault_beyond", "wrote behind the shared memory of faults.cu:"),
        ("fault_too_much", "asks for more than 101376 bytes of shared memory"),
    ];
    for (kernel, sentence) in wanted {
        for descending in [false, true] {
            let error = run(kernel, vec![], 64, descending).expect_err(kernel);
            assert!(error.contains(sentence), "{kernel}: {error}");
        }
    }
    let error = run("fault_elsewhere", vec![], 64, false).unwrap_err();
    assert!(error.contains("thread 40 waits at faults.cu:"), "{error}");
    let error = run("fault_ended", vec![], 64, false).unwrap_err();
    assert!(error.contains("thread 32 has ended"), "{error}");
}

#[test]
fn a_missing_barrier_gives_other_bits_in_one_of_the_orders() {
    let right: Vec<u32> = (0..64).map(|t| (t + 1) % 64).collect();
    let of = |with: u32, descending| run("fault_no_barrier", vec![with.into()], 64, descending).unwrap();
    assert_eq!((of(1, false), of(1, true)), (right.clone(), right));
    assert_ne!(of(0, false), of(0, true));
    let ahead = |with: u32, descending| run("fault_run_ahead", vec![with.into()], 64, descending).unwrap();
    assert_eq!((ahead(1, false), ahead(1, true)), (vec![6; 64], vec![6; 64]));
    assert_ne!(ahead(0, false), ahead(0, true));
}

#[test]
fn shuffles_and_votes_are_those_of_cuda() {
    let out = run("shuffles", vec![], 320, false).unwrap();
    for t in 0..64u32 {
        let (base, lane) = (t / 32 * 32, t % 32);
        let vote = (0..32).filter(|l| (base + l) % 3 == 0).map(|l| 1 << l).sum::<u32>();
        let up = if lane < 3 { t } else { t - 3 };
        let down = if lane > 28 { t } else { t + 3 };
        let want = [base + 5, up, down, t ^ 6, vote];
        let got: Vec<u32> = (0..5).map(|k| out[k * 64 + t as usize]).collect();
        assert_eq!(got, want, "thread {t}");
    }
}

#[test]
fn arguments_and_block_are_compared_with_the_declaration() {
    let library = Library::of(Storage::F32);
    let launch = |kernel: &str, threads, arguments: &[Argument]| {
        let launch = Launch { kernel, grid: [1, 1, 1], threads, shared: 0, arguments };
        library.launch(&launch, false).expect_err(kernel)
    };
    let out = words(vec![0; 64]);
    assert!(launch("no_such", 64, &[]).contains("there is no kernel no_such"));
    assert!(launch("fault_ended", 64, &[]).contains("the arguments are not those"));
    assert!(launch("fault_ended", 64, &[1u32.into()]).contains("the arguments are not those"));
    assert!(launch("fault_ended", 32, &[(&out).into()]).contains("32 threads a block, is declared with 64"));
}

/// Every kernel of the sources is in the library, and the device launches it: the tests run every operation of the device.
#[test]
fn every_kernel_is_launched_by_the_device() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let device: String = files(&here, "rs").iter().map(|f| std::fs::read_to_string(f).unwrap()).collect();
    for storage in [Storage::F32, Storage::Bf16] {
        let mut kernels = Library::of(storage).kernels();
        kernels.retain(|k| !k.starts_with("fault_") && k != "shuffles");
        for file in files(&sources(), "cu") {
            let text = std::fs::read_to_string(&file).unwrap();
            for line in text.lines().filter(|l| l.starts_with("KERNEL(")) {
                let name = line.split(", ").nth(1).expect("KERNEL(threads, name, ...)");
                assert!(kernels.iter().any(|k| k == name), "{name} of {} is not built", file.display());
            }
        }
        assert!(kernels.len() > 40, "{kernels:?}");
        for kernel in kernels {
            assert!(device.contains(&format!("\"{kernel}\"")), "the device never launches {kernel}");
        }
    }
}
