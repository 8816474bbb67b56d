//! What tells one embedding model from another: its values, its tokenizer, and how it pools.

use sha2::{Digest, Sha256};
use tercio_data::Tokenizer;
use tercio_engine::{Arena, Device, Layout};

use crate::run::hex;

/// SHA-256, in hexadecimal digits, of names, shapes and values of the parameters, the tokenizer's files, and `rest`: whatever
/// else reaches a vector, in words. The format of the weights' file does not matter.
pub fn model_fingerprint<D: Device>(
    device: &D,
    layout: &Layout,
    parameters: &Arena<D>,
    tokenizer: &Tokenizer,
    rest: &str,
) -> String {
    let mut sum = Sha256::new();
    // Every part is preceded by its length, so that no two lists of parts read the same.
    let mut add = |bytes: &[u8]| {
        sum.update((bytes.len() as u64).to_le_bytes());
        sum.update(bytes);
    };
    add(rest.as_bytes());
    for (name, bytes) in tokenizer.files() {
        add(name.as_bytes());
        add(bytes);
    }
    for spec in layout.specs() {
        add(spec.name.as_bytes());
        add(format!("{:?}", spec.shape).as_bytes());
        let values = device.read(parameters.view(spec.place));
        add(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    }
    hex(&sum.finalize())
}
