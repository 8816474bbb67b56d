//! ColBERT: an encoder and dense layers give every token of a text a vector of unit length; a query and a document are compared token by
//! token (`tercio_engine`'s MaxSim).
//!
//! Source: Khattab and Zaharia (2020), and what PyLate's folders hold. Texts are packed: one flat row of tokens, a span per text; nothing
//! is padded. The mask tokens that fill up a query are tokens: they attend to the real ones, and nobody attends to them.

mod config;
mod folder;
pub mod pooling;

use tercio_engine::random::{key_of_name, uniform};
use tercio_engine::{Activation, Arena, Device, Layout, Param, Span, Tape, Var};

use crate::encoder::{Encoder, EncoderConfig, LEAST_LENGTH};

pub use config::{ColbertConfig, DIMENSION, DenseLayer};
pub use folder::{ColbertHeaders, LoadedColbert, save};

struct Dense {
    weight: Param,
    bias: Option<Param>,
    activation: Option<Activation>,
    residual: bool,
    matrix: Option<Param>,
}

/// A ColBERT model: its shapes and where each parameter lies; the values are in an arena.
pub struct Colbert {
    /// What follows the encoder, and how texts are made.
    pub config: ColbertConfig,
    /// The encoder.
    pub encoder: Encoder,
    layout: Layout,
    dense: Vec<Dense>,
    /// How many of the layout's first parameters are the encoder's.
    encoder_parameters: usize,
}

/// Packed texts, and which of their tokens get a vector.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// Token ids of all texts, one after the other.
    pub ids: &'a [u32],
    /// Where each text lies in `ids`; none empty, none longer than [`EncoderConfig::max_tokens`].
    pub spans: &'a [Span],
    /// The tokens of each text that are attended to: its first ones.
    pub keys: &'a [Span],
    /// Rows of `ids` whose vectors are asked for.
    pub kept: &'a [u32],
}

impl Colbert {
    /// The model of two configurations. The encoder's parameters have its own names, those of a dense layer the name of its folder before
    /// PyLate's (`1_Dense.linear.weight`).
    pub fn new(encoder: EncoderConfig, config: ColbertConfig) -> Colbert {
        let mut layout = Layout::default();
        let encoder = Encoder::new(encoder, &mut layout);
        let encoder_parameters = layout.specs().len();
        let mut dense = Vec::with_capacity(config.dense.len());
        for d in &config.dense {
            let name = |part: &str| format!("{}.{part}", d.folder);
            let weight = layout.add(name("linear.weight"), &[d.outputs, d.inputs]);
            let bias = d.bias.then(|| layout.add(name("linear.bias"), &[d.outputs]));
            let matrix =
                d.has_residual_matrix().then(|| layout.add(name("residual.weight"), &[d.outputs, d.inputs]));
            dense.push(Dense { weight, bias, activation: d.activation, residual: d.residual, matrix });
        }
        Colbert { config, encoder, layout, dense, encoder_parameters }
    }

    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Width of a token's vector.
    pub fn dimension(&self) -> usize {
        self.config.dimension(self.encoder.config().width())
    }

    /// The vectors of the kept tokens, `[kept, dimension]`, each of unit length; `recompute` keeps only the input of each layer of the
    /// encoder for the backward.
    pub fn embed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        texts: TokenRows<'_>,
        recompute: bool,
    ) -> Var<D> {
        let TokenRows { ids, spans, keys, kept } = texts;
        let mut x = self.encoder.encode_keyed(tape, ids, None, spans, keys, recompute);
        if !kept.iter().copied().eq(0..ids.len() as u32) {
            x = tape.rows(&x, kept);
        }
        for layer in &self.dense {
            let mut y = tape.linear_bias(&(&x).into(), layer.weight, layer.bias);
            if let Some(kind) = layer.activation {
                y = tape.activation(&y, kind, false, None);
            }
            x = match (layer.residual, layer.matrix) {
                (false, _) => y,
                (true, None) => tape.sum(&y, &x),
                (true, Some(matrix)) => tape.linear_residual(&x, matrix, &y, None),
            };
        }
        tape.normalize(&x, LEAST_LENGTH)
    }

    /// Random initial values of the dense layers `from` on, as PyTorch draws them: uniform within one over the root of the inputs; each
    /// from the parameter's name and the seed.
    pub fn fill_dense<D: Device>(&self, from: usize, seed: u64, device: &D, parameters: &mut Arena<D>) {
        for layer in &self.config.dense[from..] {
            let before = format!("{}.", layer.folder);
            let bound = 1.0 / libm::sqrt(layer.inputs as f64);
            let own = self.layout.specs()[self.encoder_parameters..].iter();
            for spec in own.filter(|s| s.name.starts_with(&before)) {
                let key = key_of_name(seed, &spec.name);
                let value = |i: u64| (bound * (2.0 * uniform(key, i) - 1.0)) as f32;
                let values: Vec<f32> = (0..spec.place.len() as u64).map(value).collect();
                device.write(parameters.view_mut(spec.place), &values);
            }
        }
    }
}
