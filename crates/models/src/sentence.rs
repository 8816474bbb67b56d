//! sentence-transformers' models of one vector a text: an encoder, pooling, dense layers, unit length; their folders in and out.
//!
//! Source: Reimers and Gurevych (2019), and the folders that sentence-transformers writes. Texts are packed: one flat row of tokens, a
//! span per text; nothing is padded.

mod folder;
mod modules;

use tercio_engine::random::{key_of_name, uniform};
use tercio_engine::{Activation, Arena, Device, Layout, Param, Span, Tape, Var};

use crate::encoder::{Encoder, EncoderConfig, LEAST_LENGTH};
use crate::retriever::Pooling;

pub use folder::LoadedSentenceEncoder;
pub use modules::{DenseActivation, DenseConfig, SentenceConfig};

struct Dense {
    weight: Param,
    bias: Option<Param>,
    activation: DenseActivation,
}

/// A sentence encoder: its shapes and where each parameter lies; the values are in an arena.
pub struct SentenceEncoder {
    /// What follows the encoder.
    pub config: SentenceConfig,
    /// The encoder.
    pub encoder: Encoder,
    layout: Layout,
    dense: Vec<Dense>,
}

impl SentenceEncoder {
    /// The model of two configurations. The encoder's parameters have its own names, those of a dense layer the name of its folder before
    /// theirs (`2_Dense.linear.weight`).
    pub fn new(encoder: EncoderConfig, config: SentenceConfig) -> SentenceEncoder {
        let mut layout = Layout::default();
        let encoder = Encoder::new(encoder, &mut layout);
        let dense = config.dense.iter().map(|d| {
            let name = |part: &str| format!("{}.linear.{part}", d.folder);
            let weight = layout.add(name("weight"), &[d.outputs, d.inputs]);
            let bias = d.bias.then(|| layout.add(name("bias"), &[d.outputs]));
            Dense { weight, bias, activation: d.activation }
        });
        let dense = dense.collect();
        SentenceEncoder { config, encoder, layout, dense }
    }

    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Width of a text's vector.
    pub fn dimension(&self) -> usize {
        self.config.dense.last().map_or(self.encoder.config().width(), |d| d.outputs)
    }

    /// The vector of every text, `[spans, dimension]`. `spans` are the texts of the flat `ids`, none empty, none longer than
    /// [`EncoderConfig::max_tokens`]; `recompute` keeps only the input of each layer for the backward.
    pub fn embed<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let states = self.encoder.encode(tape, ids, None, spans, recompute);
        let mut vectors = match self.config.pooling {
            Pooling::Mean => tape.span_means(&states, spans),
            Pooling::First => {
                let first: Vec<u32> = spans.iter().map(|s| s.start).collect();
                tape.rows(&states, &first)
            }
        };
        for layer in &self.dense {
            vectors = tape.linear_bias(&(&vectors).into(), layer.weight, layer.bias);
            if layer.activation == DenseActivation::Tanh {
                vectors = tape.activation(&vectors, Activation::Tanh, false, None);
            }
        }
        if self.config.normalize { tape.normalize(&vectors, LEAST_LENGTH) } else { vectors }
    }

    /// Random initial values of the dense layers, as PyTorch draws them: uniform within one over the root of the inputs; each from the
    /// parameter's name and the seed.
    pub fn fill_dense<D: Device>(&self, seed: u64, device: &D, parameters: &mut Arena<D>) {
        let own = &self.layout.specs()[self.encoder_parameters()..];
        let inputs =
            self.config.dense.iter().flat_map(|d| std::iter::repeat_n(d.inputs, 1 + usize::from(d.bias)));
        for (spec, inputs) in own.iter().zip(inputs) {
            let (key, bound) = (key_of_name(seed, &spec.name), 1.0 / libm::sqrt(inputs as f64));
            let value = |i: u64| (bound * (2.0 * uniform(key, i) - 1.0)) as f32;
            let values: Vec<f32> = (0..spec.place.len() as u64).map(value).collect();
            device.write(parameters.view_mut(spec.place), &values);
        }
    }

    /// How many of the layout's first parameters are the encoder's.
    fn encoder_parameters(&self) -> usize {
        let dense: usize = self.config.dense.iter().map(|d| 1 + usize::from(d.bias)).sum();
        self.layout.specs().len() - dense
    }
}
