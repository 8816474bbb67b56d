//! Sharded models: an `*.index.json` whose `weight_map` says which file holds which tensor.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::WeightsReader;
use super::error::{Result, WeightsError};
use super::file::DataFile;

/// No index of a real model comes near this many bytes.
const MAX_INDEX: u64 = 32 << 20;

/// A JSON object in file order in which no key may occur twice.
pub(super) struct UniqueMap<V>(pub Vec<(String, V)>);

/// A value that is read knowing its key, so that nothing has to be kept as untyped JSON.
pub(super) trait Keyed: Sized {
    /// Reads the value of `key`.
    fn next<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> std::result::Result<Self, A::Error>;
}

impl Keyed for String {
    fn next<'de, A: MapAccess<'de>>(_: &str, map: &mut A) -> std::result::Result<Self, A::Error> {
        map.next_value()
    }
}

impl<'de, V: Keyed> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs<V>(PhantomData<V>);
        impl<'de, V: Keyed> Visitor<'de> for Pairs<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let (mut pairs, mut seen) = (Vec::new(), BTreeSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format_args!("`{key}` is there twice")));
                    }
                    let value = V::next(&key, &mut map)
                        .map_err(|e| serde::de::Error::custom(format_args!("tensor `{key}`: {e}")))?;
                    pairs.push((key, value));
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// Opens every shard that the index names. As in transformers, a tensor that a shard holds beyond the index is kept.
pub(super) fn open(path: &Path, reader: &mut WeightsReader) -> Result<()> {
    let map = read(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut opened = BTreeSet::new();
    for (name, shard) in &map {
        if opened.insert(shard.as_str()) {
            let shard_path = folder.join(shard);
            if !shard_path.exists() {
                let what =
                    format!("its shard {} is missing; copy or download it again", shard_path.display());
                return Err(WeightsError::tensor(path, name, what));
            }
            reader.add_file(&shard_path)?;
        }
    }
    for (name, shard) in &map {
        let held_by = reader.entries.get(name).map(|e| &reader.sources[e.source].file.path);
        if held_by != Some(&folder.join(shard)) {
            let what = format!("the index says that it is in {shard}, but it is not");
            return Err(WeightsError::tensor(path, name, what));
        }
    }
    Ok(())
}

/// Names of the shards of an index, ascending.
#[cfg(feature = "hub")]
pub(crate) fn shards(path: &Path) -> Result<BTreeSet<String>> {
    Ok(read(path)?.into_iter().map(|(_, shard)| shard).collect())
}

/// Reads pairs of tensor and shard; a shard is a plain file name.
fn read(path: &Path) -> Result<Vec<(String, String)>> {
    let file = DataFile::open(path)?;
    if file.len > MAX_INDEX {
        let what = format!("expected an index of at most {MAX_INDEX} bytes, found {}", file.len);
        return Err(WeightsError::invalid(path, what));
    }
    file.refuse_pointer_files()?;
    let index: Index = serde_json::from_slice(&file.head(MAX_INDEX)?).map_err(|e| {
        WeightsError::invalid(path, format!("expected {{\"weight_map\": {{tensor: file}}}}: {e}"))
    })?;
    let map = index.weight_map.0;
    if map.is_empty() {
        return Err(WeightsError::invalid(
            path,
            "expected a `weight_map` that names tensors, found an empty one",
        ));
    }
    for (name, shard) in &map {
        let mut parts = Path::new(shard).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
            || shard.ends_with(".json")
        {
            let what = format!("expected the name of a file beside the index, found `{shard}`");
            return Err(WeightsError::tensor(path, name, what));
        }
    }
    Ok(map)
}
