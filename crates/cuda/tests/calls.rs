//! What the device asks of a driver, and in which order: a driver that computes nothing writes it down.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tercio_cuda::driver::{Address, Driver, Factors, Launch, Product};
use tercio_cuda::{Cuda, Pool};
use tercio_engine::device::{Heads, HeadsMut, Matrix};
use tercio_engine::memory::{self, OutOfMemory};
use tercio_engine::{
    AdamStep, Arena, AttentionShape, Device, EncoderKernels, Fault, Span, Tape, Tensor, fault,
};
use tercio_models::t5::{Initialization, LoadedT5, T5Config, Targets};

/// A call, by its name and what matters of it.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Allocate(u64),
    Release(u64),
    Zero(u64),
    Upload(usize),
    Download(usize),
    Copy(u64),
    Launch(String, [u32; 3], u32),
    Product(Product),
    Wait,
}

/// A driver with so many bytes.
struct Recorder {
    calls: Mutex<Vec<Call>>,
    factors: Factors,
    free: AtomicU64,
    next: AtomicU64,
    /// A kernel that fails.
    broken: &'static str,
}

impl Recorder {
    fn new(factors: Factors, bytes: u64) -> Recorder {
        let (free, next) = (AtomicU64::new(bytes), AtomicU64::new(1 << 20));
        Recorder { calls: Mutex::default(), factors, free, next, broken: "" }
    }
    fn device(factors: Factors) -> Cuda<Recorder> {
        Cuda::new(Pool::new(Recorder::new(factors, 1 << 40), u64::MAX))
    }
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
    /// The calls since the last time.
    fn taken(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
    /// The same, of launches and products: the kernels' names.
    fn work(&self) -> Vec<String> {
        let named = |call| match call {
            Call::Launch(kernel, _, _) => Some(kernel),
            Call::Product(p) => Some(if p.bf16 { "product of bf16" } else { "product" }.to_owned()),
            _ => None,
        };
        self.taken().into_iter().filter_map(named).collect()
    }
}

impl Driver for Recorder {
    fn name(&self) -> String {
        "a recorder".into()
    }
    fn arithmetic(&self) -> String {
        "none".into()
    }
    fn factors(&self) -> Factors {
        self.factors
    }
    fn allocate(&self, bytes: u64) -> Result<Option<Address>, Fault> {
        self.note(Call::Allocate(bytes));
        let fits = self.free.fetch_update(Relaxed, Relaxed, |free| free.checked_sub(bytes)).is_ok();
        Ok(fits.then(|| self.next.fetch_add(bytes.next_multiple_of(512), Relaxed)))
    }
    fn release(&self, _at: Address, bytes: u64) -> Result<(), Fault> {
        self.note(Call::Release(bytes));
        self.free.fetch_add(bytes, Relaxed);
        Ok(())
    }
    fn room(&self) -> Option<u64> {
        Some(self.free.load(Relaxed))
    }
    fn zero(&self, _at: Address, bytes: u64) -> Result<(), Fault> {
        self.note(Call::Zero(bytes));
        Ok(())
    }
    fn upload(&self, _to: Address, from: &[u8]) -> Result<(), Fault> {
        self.note(Call::Upload(from.len()));
        Ok(())
    }
    fn download(&self, _from: Address, to: &mut [u8]) -> Result<(), Fault> {
        self.note(Call::Download(to.len()));
        Ok(())
    }
    fn copy(&self, _to: Address, _from: Address, bytes: u64) -> Result<(), Fault> {
        self.note(Call::Copy(bytes));
        Ok(())
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        if launch.kernel == self.broken {
            return Err(Fault(format!("{} does not run", launch.kernel)));
        }
        self.note(Call::Launch(launch.kernel.into(), launch.grid, launch.threads));
        Ok(())
    }
    fn product(&self, product: &Product) -> Result<(), Fault> {
        self.note(Call::Product(*product));
        Ok(())
    }
    fn wait(&self) -> Result<(), Fault> {
        self.note(Call::Wait);
        Ok(())
    }
}

#[test]
fn a_list_is_there_before_the_kernel_that_reads_it() {
    let device = Recorder::device(Factors::F32);
    let (table, mut rows) = (Tensor::zeros(&device, 10, 300), Tensor::scratch(&device, 3, 300));
    device.driver().taken();
    device.gather(table.view(), 300, &[1, 2, 1], rows.view_mut());
    let launch = Call::Launch("gather".into(), [3, 1, 1], 256);
    assert_eq!(device.driver().taken(), [Call::Allocate(512), Call::Upload(12), launch.clone()]);
    // The list's memory came back; sorted ids, their order and their starts come in three lists.
    let mut target = Tensor::zeros(&device, 10, 300);
    device.driver().taken();
    device.scatter_add(rows.view(), 300, &[1, 2, 1], target.view_mut());
    let calls = device.driver().taken();
    let of = |call: &Call| calls.iter().filter(|c| *c == call).count();
    assert_eq!((of(&Call::Upload(12)), of(&Call::Allocate(512))), (3, 2), "{calls:?}");
    assert_eq!(calls.last(), Some(&Call::Launch("scatter_add".into(), [2, 2, 1], 256)));
}

#[test]
fn factors_become_bf16_right_before_their_product() {
    let run = |factors| {
        let device = Recorder::device(factors);
        let (a, b) = (Tensor::zeros(&device, 3, 5), Tensor::zeros(&device, 7, 5));
        let mut c = Tensor::zeros(&device, 3, 7);
        device.driver().taken();
        device.product(a.matrix(), b.matrix().t(), c.view_mut(), true);
        // A sum of no terms, and a result without elements.
        let none = Tensor::zeros(&device, 3, 0);
        device.product(Matrix::new(none.view(), 3, 0), Matrix::new(none.view(), 0, 7), c.view_mut(), true);
        let mut nothing = Tensor::zeros(&device, 0, 7);
        device.product(Matrix::new(none.view(), 0, 5), b.matrix().t(), nothing.view_mut(), false);
        device.driver().work()
    };
    assert_eq!(run(Factors::F32), ["product"]);
    assert_eq!(run(Factors::Tf32), ["product"]);
    assert_eq!(run(Factors::Bf16), ["to_bf16", "to_bf16", "product of bf16"]);
}

#[test]
fn attention_goes_backward_to_queries_and_then_to_keys() {
    let device = Recorder::device(Factors::F32);
    let spans = Span::from_offsets(&[0, 40, 40, 41]);
    let shape = AttentionShape {
        heads: 2,
        head_dim: 64,
        queries: spans.clone(),
        keys: spans,
        first_query: 0,
        causal: false,
        window: None,
        scale: 0.125,
        buckets: None,
        dropout: None,
    };
    let (x, mut dx) = (Tensor::zeros(&device, 41, 384), Tensor::zeros(&device, 41, 384));
    let (mut y, dy) = (Tensor::zeros(&device, 41, 128), Tensor::zeros(&device, 41, 128));
    let mut sums = Tensor::zeros(&device, 41, 2);
    device.driver().taken();
    device.attention(Heads::Fused(x.view()), None, &shape, y.view_mut(), sums.view_mut());
    let (heads, y, sums) = (Heads::Fused(x.view()), y.view(), sums.view());
    device.attention_backward(heads, None, &shape, y, sums, dy.view(), HeadsMut::Fused(dx.view_mut()), None);
    let launches: Vec<Call> =
        device.driver().taken().into_iter().filter(|c| matches!(c, Call::Launch(..))).collect();
    let launch = |kernel: &str, grid| Call::Launch(kernel.into(), grid, 128);
    // Tiles of 32 rows: two of the first sequence, none of the empty one, one of the last; a block for each head.
    let wanted = [
        launch("attention_64", [3, 2, 1]),
        launch("attention_delta", [21, 1, 1]),
        launch("attention_queries_64", [3, 2, 1]),
        launch("attention_keys_64", [3, 2, 1]),
    ];
    assert_eq!(launches, wanted);
}

/// An update of a small reader: the losses are the only thing that comes back, and the second one allocates nothing.
#[test]
fn an_update_waits_for_nothing_but_its_losses() {
    let device = Recorder::device(Factors::Bf16);
    let config = T5Config {
        vocab_size: 50,
        d_model: 24,
        d_kv: 8,
        d_ff: 40,
        num_layers: 2,
        num_decoder_layers: 2,
        num_heads: 3,
        dropout_rate: 0.1,
        ..T5Config::of_size("small").unwrap()
    };
    let mut loaded = LoadedT5::random(config, Initialization { seed: 1 }, &device);
    let (mut first, mut second) =
        (Arena::of_len(&device, loaded.parameters.len()), Arena::of_len(&device, loaded.parameters.len()));
    let mut update = || {
        let (model, parameters) = (&loaded.model, &loaded.parameters);
        let (spans, keys) = (Span::from_offsets(&[0, 3, 5]), Span::from_offsets(&[0, 20, 37]));
        let passages = Span::from_offsets(&[0, 9, 20, 37]);
        let ids: Vec<u32> = (0..37).collect();
        let targets = Targets {
            inputs: &[0, 4, 5, 0, 6],
            labels: &[4, 5, 1, 6, 1],
            spans: &spans,
            keys: &keys,
            key_positions: None,
            weight: 1.0,
            smoothing: 0.0,
        };
        let mut tape = Tape::recording(&device, parameters, None);
        let states = model.encode(&mut tape, &ids, &passages, true);
        model.loss(&mut tape, &states, &targets);
        let mut gradients = Arena::of_len(&device, parameters.len());
        tape.backward(&mut gradients, &[]);
        let step = AdamStep {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step: 1,
            gradient_scale: 1.0,
        };
        let parameters = loaded.parameters.all_mut();
        device.adam(parameters, gradients.all(), first.all_mut(), second.all_mut(), step);
        device.trim();
        device.driver().taken()
    };
    let calls = [update(), update(), update()];
    for calls in &calls {
        let downloads: Vec<&Call> = calls.iter().filter(|c| matches!(c, Call::Download(_))).collect();
        assert_eq!(downloads, [&Call::Download(4 * 5)], "only the losses of five tokens come back");
        assert!(!calls.contains(&Call::Wait) && calls.len() > 100);
    }
    let memory = |c: &&Call| matches!(c, Call::Allocate(_) | Call::Release(_));
    assert_eq!(calls[1].iter().filter(memory).count(), 0, "what one update used, the next uses again");
    let kinds = |calls: &[Call]| calls.iter().map(std::mem::discriminant).collect::<Vec<_>>();
    assert!(kinds(&calls[1]) == kinds(&calls[2]), "one update is as the next");
}

#[test]
fn memory_comes_back_in_sizes_that_fit() {
    let pool = Pool::new(Recorder::new(Factors::F32, 1 << 40), u64::MAX);
    let of = |bytes| drop(pool.take(bytes));
    of(1000);
    of(700);
    of(1024);
    of(400);
    of(0);
    assert_eq!(pool.zeros(800).bytes(), 800);
    // A large block is not given away for little.
    of(8 << 20);
    of(7 << 20);
    of(4 << 20);
    let device = Cuda::new(pool.clone());
    let wanted = [Call::Allocate(1024), Call::Zero(800), Call::Allocate(8 << 20), Call::Allocate(4 << 20)];
    assert_eq!(device.driver().taken(), wanted);
    assert_eq!(pool.bytes_in_use(), 0);
    (0..20).for_each(|_| device.trim());
    assert_eq!(device.driver().taken().len(), 3, "what nobody needs for long goes back");
    let exact = Pool::exact(Recorder::new(Factors::F32, 1 << 40), u64::MAX);
    drop(exact.take(13));
    let device = Cuda::new(exact.clone());
    assert_eq!(device.driver().taken(), [Call::Allocate(13), Call::Release(13)]);
}

#[test]
fn memory_has_a_limit_and_free_blocks_go_first() {
    let pool = Pool::new(Recorder::new(Factors::F32, 1 << 40), 10 << 20);
    let kept = pool.take(4 << 20);
    drop(pool.take(5 << 20));
    // Nine of ten are held, five of them free: these go back for another six.
    let second = pool.take(6 << 20);
    let device = Cuda::new(pool.clone());
    let (four, five, six) = (4 << 20, 5 << 20, 6 << 20);
    let wanted = [Call::Allocate(four), Call::Allocate(five), Call::Release(five), Call::Allocate(six)];
    assert_eq!(device.driver().taken(), wanted);
    let out = memory::caught(|| pool.take(1 << 20)).map(|b| b.bytes()).unwrap_err();
    let used = 10 << 20;
    assert_eq!(out, OutOfMemory { asked: 1 << 20, room: Some(0), used, peak: used });
    drop((kept, second));
    assert_eq!(pool.take(10 << 20).bytes(), 10 << 20);
    // The GPU itself has less than the limit.
    let pool = Pool::new(Recorder::new(Factors::F32, 3 << 20), u64::MAX);
    let out = memory::caught(|| pool.take(4 << 20)).map(|b| b.bytes()).unwrap_err();
    assert_eq!(out, OutOfMemory { asked: 4 << 20, room: Some(3 << 20), used: 0, peak: 0 });
}

#[test]
fn a_fault_of_the_driver_reaches_who_asked() {
    let driver = Recorder { broken: "add_bias", ..Recorder::new(Factors::F32, 1 << 40) };
    let device = Cuda::new(Pool::new(driver, u64::MAX));
    let (mut x, bias) = (Tensor::zeros(&device, 3, 4), Tensor::zeros(&device, 1, 4));
    let fault = fault::caught(|| device.add_bias(x.view_mut(), bias.view())).unwrap_err();
    assert_eq!(fault, Fault("add_bias does not run".into()));
}
