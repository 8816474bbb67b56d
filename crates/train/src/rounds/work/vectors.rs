//! Vectors of all passages, by all ranks.

use tercio_data::Passages;
use tercio_data::vectors::{FORMAT, VectorSettings, VectorsFolder};
use tercio_engine::Device;
use tercio_models::embedding_model::TextKind;

use super::{Figures, Outcome, Work};
use crate::embed::{EmbedProgress, Embedder, TextEncoder, TextSource, Texts, embed_among};
use crate::error::TrainError;
use crate::ranks::corpus::open_among;
use crate::ranks::start::same_among;
use crate::rounds::stage::Step;
use crate::run::Progress;

impl Work<'_> {
    pub(super) fn vectors(&self) -> Result<Outcome, TrainError> {
        let (o, world) = (&self.settings.embed, self.world);
        let precision = self.settings.retriever.compute.get();
        let device = self.device(precision)?;
        let model = self.folder(self.stage.sibling(Step::Retriever)).to_string_lossy().into_owned();
        let embedder = device.run(|| Embedder::open(&model, None, None, &device))?;
        let fingerprint = device.run(|| embedder.fingerprint(&device));
        same_among(world, "the retriever", &fingerprint)?;
        let path = &self.settings.all.passages;
        let cache = self.cache();
        let cache = world.is_main().then_some(cache.as_path());
        let passages: Passages = open_among(world, path, cache, self.link.broadcast_data)?;
        let texts = Texts::of_passages(passages, embedder.template(TextKind::Passage, false)?);
        let maxlength = embedder.model.max_tokens(TextKind::Passage);
        let settings = VectorSettings {
            format: FORMAT,
            model,
            model_fingerprint: Some(fingerprint),
            dimension: embedder.model.dimension(),
            dtype: o.dtype,
            precision: precision.name().to_owned(),
            pooling: embedder.pooling().to_owned(),
            normalized: embedder.model.normalizes(),
            template: texts.template().to_string(),
            maxlength,
            batch_tokens: o.batch_tokens,
            batch_texts: o.per_gpu_batch_size,
            window: o.window,
            source: path.display().to_string(),
            source_fingerprint: Some(texts.fingerprint().to_owned()),
            count: texts.len() as u64,
            per_shard: o.passages_per_shard as u64,
        };
        let dir = self.dir();
        let folder = match world.is_main() {
            true => Some(VectorsFolder::open(&dir, settings.clone())?),
            false => None,
        };
        let encoder = TextEncoder {
            device: &device,
            model: &embedder.model,
            tokenizer: &embedder.tokenizer,
            maxlength,
            padding: embedder.padding(TextKind::Passage),
            batch_tokens: o.batch_tokens,
            batch_texts: o.per_gpu_batch_size,
            window: o.window,
        };
        let (part, parts) = self.part.unwrap_or((0, 1));
        let cut = |n: u64| (u128::from(settings.shards()) * u128::from(n) / u128::from(parts.max(1))) as u64;
        let mut bar = None;
        let mut progress = |p: EmbedProgress| {
            let bar: &mut Progress =
                bar.get_or_insert_with(|| Progress::start(0, p.total, world.is_main() && self.progress));
            bar.advance(p.done, "passages");
        };
        let (stop, shards) = (|| self.stop(), cut(part)..cut(part + 1));
        let embed = || {
            embed_among(
                world,
                &encoder,
                &texts,
                &settings,
                folder.as_ref().map(|f| f as _),
                shards,
                &stop,
                &mut progress,
            )
        };
        let report = device.run(embed)?;
        if report.stopped {
            return Ok(Outcome::Stopped);
        }
        self.say(format_args!("{} passages, {} shards of {}", report.texts, report.finished, report.shards));
        if world.is_main() && !report.complete {
            return Ok(Outcome::Parts);
        }
        let names = |n| ["vectors", "ids"].map(|ending| dir.join(format!("shard-{n:05}.{ending}")));
        let results = if world.is_main() { (0..report.shards).flat_map(names).collect() } else { Vec::new() };
        let mut figures = Figures::new();
        figures.insert("passages".into(), settings.count.into());
        figures.insert("dimension".into(), settings.dimension.into());
        Ok(Outcome::Finished(results, figures))
    }
}
