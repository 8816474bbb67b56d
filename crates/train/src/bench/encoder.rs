//! The layers of an encoder alone: training steps on texts of one length, without padding on either side.

use std::path::Path;

use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::random::{key, mix};
use tercio_engine::{Arena, Buckets, Device, Draw, Layout, Span, Tape};
use tercio_models::bert::BertConfig;
use tercio_models::encoder::{Encoder, EncoderConfig, LoadedEncoder};

use super::{
    Batch, BenchMode, BenchReport, BenchSettings, Encoded, Profiled, Work, product_peak, report, train,
};
use crate::error::TrainError;
use crate::objective::{Evaluation, Objective, ShardOutcome, ShardSize};
use crate::ranks::RankDevice;

/// Rows of the word embedding: few, since the peer has none and would step none.
const VOCABULARY: usize = 1000;

/// A benchmark's settings.
#[derive(Clone, Debug)]
pub struct EncoderBenchOptions {
    /// Texts a step.
    pub sequences: usize,
    /// Tokens of a text.
    pub tokens: usize,
    /// Steps and device.
    pub settings: BenchSettings,
}

/// Times forward, backward, clipping and AdamW of BERT-base without dropout; the loss is the mean of the squares of all states,
/// as `bench/peer_bert_trunk.py` has it.
///
/// # Errors
/// Texts longer than the encoder takes.
pub fn bench_encoder<D: RankDevice>(
    device: &D,
    options: &EncoderBenchOptions,
) -> Result<BenchReport, TrainError> {
    match &options.settings.profile {
        None => bench(device, options),
        Some(profile) => bench(&Profiled::new(device, profile.clone()), options),
    }
}

fn bench<D: RankDevice>(device: &D, options: &EncoderBenchOptions) -> Result<BenchReport, TrainError> {
    let o = options;
    let config = BertConfig {
        vocab_size: VOCABULARY,
        hidden_dropout: 0.0,
        attention_dropout: 0.0,
        ..BertConfig::base()
    };
    if o.tokens > config.max_tokens() {
        let most = config.max_tokens();
        return Err(TrainError::Options(format!("--tokens {}: the encoder takes at most {most}", o.tokens)));
    }
    let flops = encoder_flops(&config, o.sequences, o.tokens);
    let loaded = LoadedEncoder::random(EncoderConfig::Bert(config), 0, device);
    let ids: Vec<u32> =
        (0..o.sequences * o.tokens).map(|i| (mix(key(&[i as u64])) % VOCABULARY as u64) as u32).collect();
    let ends: Vec<u32> = (0..=o.sequences).map(|i| (i * o.tokens) as u32).collect();
    let trunk = Trunk { encoder: loaded.encoder, layout: loaded.layout, recompute: o.settings.recompute };
    let shard = (ids, Span::from_offsets(&ends));
    let objective = Encoded { objective: trunk, batches: vec![Batch { rows: vec![0], shard }] };
    let peak = product_peak(device);
    let (times, losses) = train(device, &objective, loaded.parameters, &o.settings)?;
    let (steps, passes) = (o.settings.steps as f64, if o.settings.recompute { 4.0 } else { 3.0 });
    let tokens = steps * (o.sequences * o.tokens) as f64;
    let work = Work {
        mode: BenchMode::Train,
        size: "bert-base trunk".into(),
        questions: o.sequences,
        passages: 0,
        tokens,
        places: tokens,
        flops: steps * passes * flops,
        times,
        losses,
        peak,
    };
    Ok(report(device, &o.settings, work))
}

/// Floating-point operations of the matrix products of a forward pass over texts of one length, a multiply-add counted as two.
pub(super) fn encoder_flops(c: &BertConfig, sequences: usize, tokens: usize) -> f64 {
    let [d, ff, n] = [c.hidden_size, c.intermediate_size, tokens].map(|n| n as f64);
    let token = 2.0 * (4.0 * d * d + 2.0 * d * ff);
    c.num_hidden_layers as f64 * sequences as f64 * (n * token + 4.0 * n * n * d)
}

/// An encoder whose states are to be small.
struct Trunk {
    encoder: Encoder,
    layout: Layout,
    recompute: bool,
}

impl<D: Device> Objective<D> for Trunk {
    type Shard = (Vec<u32>, Vec<Span>);

    fn layout(&self) -> &Layout {
        &self.layout
    }
    fn examples(&self) -> usize {
        1
    }
    fn shards(&self, _: &UpdateExamples, _: usize) -> Result<Vec<Self::Shard>, TrainError> {
        Ok(Vec::new())
    }
    fn size(&self, (ids, spans): &Self::Shard) -> ShardSize {
        let tokens = ids.len() as u64;
        ShardSize { tokens, padded_tokens: tokens, count: 1, inputs: spans.len() as u64, truncated: 0 }
    }
    fn gradient_with(
        &self,
        device: &D,
        parameters: &Arena<D>,
        (ids, spans): &Self::Shard,
        draw: Draw,
        weight: f64,
        gradients: &mut Arena<D>,
        buckets: Option<Buckets<'_, D>>,
    ) -> ShardOutcome {
        let mut tape = Tape::recording(device, parameters, Some(draw));
        let states = self.encoder.encode(&mut tape, ids, None, spans, self.recompute);
        let mean = weight / states.tensor.len() as f64;
        let loss = device.dot(states.tensor.view(), states.tensor.view()) * mean;
        let mut slope = states.tensor.duplicate(device);
        device.scale(slope.view_mut(), 2.0 * mean);
        tape.inject(&states, slope);
        drop(states);
        match buckets {
            Some(buckets) => tape.backward_with(gradients, buckets),
            None => drop(tape.backward(gradients, &[])),
        }
        ShardOutcome { loss }
    }
    fn evaluate_among(
        &self,
        _: &World,
        _: &D,
        _: &Arena<D>,
        _: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Evaluation>, TrainError> {
        Ok(None)
    }
    fn save(&self, _: &D, _: &Arena<D>, folder: &Path) -> Result<(), TrainError> {
        Err(TrainError::Unusable(format!("{}: a benchmark saves nothing", folder.display())))
    }
    fn fingerprint(&self) -> Map<String, Value> {
        Map::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_engine::Cpu;

    #[test]
    fn operations_are_those_counted_by_hand() {
        let config =
            BertConfig { hidden_size: 2, intermediate_size: 3, num_hidden_layers: 5, ..BertConfig::base() };
        // Multiply-adds of a token: projections 4*2*2 = 16, feed-forward 2*2*3 = 12; of 4 tokens with each other 2*16*2.
        let layer = 4 * (16 + 12) + 2 * 16 * 2;
        assert_eq!(encoder_flops(&config, 7, 4) as usize, 2 * 7 * 5 * layer);
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let device = Cpu::new(1).unwrap();
        let base =
            BertConfig { hidden_size: 8, num_attention_heads: 2, intermediate_size: 8, ..BertConfig::base() };
        let config = BertConfig {
            vocab_size: 11,
            num_hidden_layers: 1,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            ..base
        };
        let mut loaded = LoadedEncoder::random(EncoderConfig::Bert(config), 3, &device);
        let trunk = Trunk { encoder: loaded.encoder, layout: loaded.layout.clone(), recompute: false };
        let shard = (vec![1, 2, 3, 4, 5], Span::from_offsets(&[0, 2, 5]));
        let draw = Draw { seed: 0, update: 0, shard: 0 };
        let loss = |parameters: &Arena<Cpu>| {
            let mut gradients = Arena::zeros(&device, &loaded.layout);
            let run = || trunk.gradient(&device, parameters, &shard, draw, 1.0, &mut gradients);
            let loss = device.run(run).loss;
            (loss, gradients)
        };
        // The last norm's bias moves every state.
        let bias = loaded.layout.specs().iter().rfind(|s| s.name.ends_with("LayerNorm.bias")).unwrap().place;
        let (before, gradients) = loss(&loaded.parameters);
        let slope = device.read(gradients.view(bias))[0];
        let mut values = device.read(loaded.parameters.view(bias));
        values[0] += 0.5;
        device.write(loaded.parameters.view_mut(bias), &values);
        // The mean of squares is a parabola of the bias, of curvature 2 over the width.
        let expected = f64::from(slope) * 0.5 + 0.25 / 8.0;
        let (after, _) = loss(&loaded.parameters);
        assert!((after - before - expected).abs() < 1e-5, "{before} {after} {expected}");
    }
}
