//! A model with a weight that is no number is refused by name: it would answer nothing, and say so nowhere.

use tercio_engine::{Arena, Cpu, Device};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{Initialization, LoadedT5, T5Config};

#[test]
fn weights_that_are_no_numbers_are_refused() {
    let device = Cpu::new(1).unwrap();
    let config = T5Config {
        vocab_size: 20,
        d_model: 8,
        d_kv: 4,
        d_ff: 12,
        num_layers: 1,
        num_decoder_layers: 1,
        num_heads: 2,
        ..T5Config::of_size("small").unwrap()
    };
    for value in [f32::NAN, f32::INFINITY] {
        let mut loaded = LoadedT5::random(config.clone(), Initialization { seed: 1 }, &device);
        let spec = loaded.model.layout().specs()[3].clone();
        let mut values = device.read(loaded.parameters.view(spec.place));
        values[5] = value;
        device.write(Arena::view_mut(&mut loaded.parameters, spec.place), &values);
        let dir = tempfile::tempdir().unwrap();
        loaded.save(dir.path(), &device).unwrap();
        let folder = ModelFolder::open(dir.path().to_str().unwrap()).unwrap();
        let error = LoadedT5::open(&folder, &device).err().expect("refused").to_string();
        assert!(error.contains(&spec.name) && error.contains("element 5"), "{error}");
    }
}
