//! Vectors that Fusion-in-Decoder or DPR pickled, taken over into a folder of our own.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use sha2::{Digest, Sha256};
use tercio_data::vectors::{FORMAT, VectorDtype, VectorSettings, VectorsFolder};
use tercio_models::weights::PickledVectors;

use super::{EmbedReport, WINDOW};
use crate::error::TrainError;
use crate::run::hex;

/// Bytes that are read at a time for a checksum.
const CHUNK: usize = 1 << 20;

/// Writes the vectors of `files`, one file after the other, into `output`, in shards of `per_shard` rows. Finished shards are
/// not written again. Nothing is known of the model: the settings say so. The files are read twice: once for the fingerprint
/// that tells them from others.
///
/// # Errors
/// A pickle that is refused; vectors of different dimensions; files that cannot be written; vectors of other files in `output`;
/// [`TrainError::Stopped`] while the fingerprint is made.
pub fn import_pickles(
    files: &[PathBuf],
    output: &Path,
    dtype: VectorDtype,
    per_shard: u64,
    stop: &dyn Fn() -> bool,
) -> Result<EmbedReport, TrainError> {
    let since = Instant::now();
    let open = |path: &PathBuf| PickledVectors::open(path);
    let opened: Vec<PickledVectors> = files.iter().map(open).collect::<Result<_, _>>()?;
    let dimension = opened.first().map_or(0, PickledVectors::dimension);
    if let Some(other) = opened.iter().position(|v| v.dimension() != dimension) {
        return Err(TrainError::Unusable(format!(
            "{}: expected vectors of {dimension} numbers, as {} has, found {}; import files of one model",
            files[other].display(),
            files[0].display(),
            opened[other].dimension()
        )));
    }
    let source = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(" ");
    let settings = VectorSettings {
        format: FORMAT,
        model: "imported".into(),
        model_fingerprint: None,
        dimension,
        dtype,
        precision: String::new(),
        pooling: String::new(),
        normalized: false,
        template: String::new(),
        maxlength: 0,
        batch_tokens: 0,
        batch_texts: 0,
        window: 0,
        source,
        source_fingerprint: Some(fingerprint(files, stop)?),
        count: opened.iter().map(|v| v.len() as u64).sum(),
        per_shard,
    };
    let folder = VectorsFolder::open(output, settings.clone())?;
    let (mut texts, mut found, mut stopped) = (0, 0, false);
    'shards: for number in 0..settings.shards() {
        if folder.finished(number)?.is_some() {
            found += 1;
            continue;
        }
        let mut shard = folder.shard(number)?;
        let rows = settings.rows_of(number);
        let mut at = rows.start;
        while at < rows.end {
            if stop() {
                stopped = true;
                break 'shards;
            }
            let (file, row) = place(&opened, at);
            let count = (opened[file].len() - row).min((rows.end - at) as usize).min(WINDOW);
            let mut values = vec![0.0; count * dimension];
            opened[file].rows(row, &mut values)?;
            for (k, vector) in values.chunks_exact(dimension).enumerate() {
                shard.push(opened[file].id(row + k), vector)?;
            }
            at += count as u64;
        }
        texts += rows.end - rows.start;
        shard.finish("imported")?;
    }
    let finished = folder.complete()?;
    let seconds = since.elapsed().as_secs_f64();
    Ok(EmbedReport {
        output: output.display().to_string(),
        dimension,
        shards: settings.shards(),
        finished,
        found,
        texts,
        tokens: 0,
        rank_tokens: Vec::new(),
        seconds,
        texts_per_second: texts as f64 / seconds.max(1e-9),
        tokens_per_second: 0.0,
        complete: finished == settings.shards(),
        stopped,
    })
}

/// SHA-256, in hexadecimal digits, of lengths and bytes of all files, in their order.
fn fingerprint(files: &[PathBuf], stop: &dyn Fn() -> bool) -> Result<String, TrainError> {
    let mut sum = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    for path in files {
        let wrong = |source| TrainError::Read { path: path.display().to_string(), source };
        let mut file = File::open(path).map_err(wrong)?;
        // Each file is preceded by its length, so that no two lists of files read the same.
        sum.update(file.metadata().map_err(wrong)?.len().to_le_bytes());
        loop {
            if stop() {
                return Err(TrainError::Stopped);
            }
            match file.read(&mut chunk).map_err(wrong)? {
                0 => break,
                n => sum.update(&chunk[..n]),
            }
        }
    }
    Ok(hex(&sum.finalize()))
}

/// File and row of a row of the whole.
fn place(files: &[PickledVectors], at: u64) -> (usize, usize) {
    let mut row = at as usize;
    for (file, vectors) in files.iter().enumerate() {
        if row < vectors.len() {
            return (file, row);
        }
        row -= vectors.len();
    }
    unreachable!("a row of the set")
}
