//! Names of T5 tensors: Hugging Face's, and those of FiD's own checkpoints.
//!
//! FiD wraps the encoder and each of its blocks, which shows in the names:
//! `encoder.encoder.block.{i}.module.layer...` is Hugging Face's `encoder.block.{i}.layer...`. Its released checkpoints
//! also hold a relative bias of cross-attention, [`CROSS_ATTENTION_BIAS`], which later libraries dropped.

use super::WeightsReader;
use super::error::{Result, WeightsError};

/// Token embeddings: encoder, decoder and, where tied, output.
pub const SHARED: &str = "shared.weight";
/// Output layer of an untied model.
pub const LM_HEAD: &str = "lm_head.weight";
/// Buckets x heads; added to the cross-attention of every decoder layer. In old checkpoints only.
pub const CROSS_ATTENTION_BIAS: &str =
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";

/// Copies of the token embeddings under other names.
pub(crate) const ALIASES: [&str; 2] = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];

/// What the tensors of a T5 say about the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct T5Layout {
    /// No own output layer: it is absent, or has the same bits as the token embeddings.
    pub tied: bool,
    /// The names were FiD's.
    pub fid: bool,
    /// There is a relative bias of cross-attention.
    pub cross_attention_bias: bool,
}

/// Hugging Face's name of a tensor that FiD calls `name`. Other names come back as they are.
pub fn from_fid(name: &str) -> String {
    let Some(rest) = name.strip_prefix("encoder.encoder.") else {
        return name.to_owned();
    };
    if let Some((index, layer)) = rest.strip_prefix("block.").and_then(|rest| rest.split_once(".module."))
        && index.bytes().all(|b| b.is_ascii_digit())
    {
        return format!("encoder.block.{index}.{layer}");
    }
    format!("encoder.{rest}")
}

/// FiD's name of a tensor that Hugging Face calls `name`.
pub fn to_fid(name: &str) -> String {
    let Some(rest) = name.strip_prefix("encoder.") else {
        return name.to_owned();
    };
    match rest.strip_prefix("block.").and_then(|rest| rest.split_once('.')) {
        Some((index, layer)) => format!("encoder.encoder.block.{index}.module.{layer}"),
        None => format!("encoder.encoder.{rest}"),
    }
}

/// Renames the tensors of a T5 to Hugging Face's names, and removes copies of the token embeddings, so that afterwards
/// [`SHARED`] is there once and [`LM_HEAD`] only where it is a layer of its own.
///
/// # Errors
/// No token embeddings; copies of them that differ; two tensors of one name after renaming.
pub fn normalize(reader: &mut WeightsReader) -> Result<T5Layout> {
    let path = reader.path.clone();
    let fid = reader.entries.keys().any(|name| name.starts_with("encoder.encoder."));
    reader.rename(|name| Some(from_fid(name)))?;
    if !reader.contains(SHARED) {
        // Some writers keep only one of the names that share their memory.
        let Some(alias) = ALIASES.into_iter().find(|alias| reader.contains(alias)) else {
            return Err(WeightsError::Missing { path, name: SHARED.to_owned(), count: reader.entries.len() });
        };
        if let Some(entry) = reader.entries.remove(alias) {
            reader.entries.insert(SHARED.to_owned(), entry);
        }
    }
    for alias in ALIASES {
        if !reader.contains(alias) {
            continue;
        }
        if !reader.same(alias, SHARED)? {
            let entry = reader.entry(alias)?;
            let shared = &reader.entry(SHARED)?.stored_name;
            let what = format!(
                "expected the same numbers as `{shared}`, found others; a T5 whose encoder and decoder have embeddings \
                 of their own is not supported"
            );
            return Err(reader.error(entry, what));
        }
        reader.entries.remove(alias);
    }
    let tied = !reader.contains(LM_HEAD) || reader.same(LM_HEAD, SHARED)?;
    if tied {
        reader.entries.remove(LM_HEAD);
    }
    Ok(T5Layout { tied, fid, cross_attention_bias: reader.contains(CROSS_ATTENTION_BIAS) })
}

#[cfg(test)]
mod tests {
    use super::super::save_safetensors;
    use super::*;

    fn layout_of(tensors: &[(&str, &[f32])]) -> Result<(T5Layout, Vec<String>)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let shapes: Vec<_> = tensors.iter().map(|(_, data)| [data.len()]).collect();
        save_safetensors(&path, tensors.iter().zip(&shapes).map(|((n, d), s)| (*n, &s[..], *d)), &[])
            .unwrap();
        let mut reader = WeightsReader::open(&path).unwrap();
        let layout = normalize(&mut reader)?;
        Ok((layout, reader.names().map(str::to_owned).collect()))
    }

    #[test]
    fn names_translate_both_ways() {
        for (fid, plain) in [
            (
                "encoder.encoder.block.11.module.layer.0.SelfAttention.q.weight",
                "encoder.block.11.layer.0.SelfAttention.q.weight",
            ),
            ("encoder.encoder.final_layer_norm.weight", "encoder.final_layer_norm.weight"),
            ("encoder.encoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
            (CROSS_ATTENTION_BIAS, CROSS_ATTENTION_BIAS),
            (SHARED, SHARED),
        ] {
            assert_eq!(from_fid(fid), plain);
            assert_eq!(from_fid(plain), plain);
            assert_eq!(to_fid(plain), fid);
        }
    }

    #[test]
    fn tying_is_decided_by_the_numbers() {
        let plain = layout_of(&[(SHARED, &[1.0, 2.0])]).unwrap();
        assert_eq!(
            plain,
            (T5Layout { tied: true, fid: false, cross_attention_bias: false }, vec![SHARED.to_owned()])
        );
        let copy =
            layout_of(&[(SHARED, &[1.0, 2.0]), (LM_HEAD, &[1.0, 2.0]), (CROSS_ATTENTION_BIAS, &[0.0])])
                .unwrap();
        assert!(copy.0.tied && copy.0.cross_attention_bias && !copy.1.contains(&LM_HEAD.to_owned()));
        let own = layout_of(&[(SHARED, &[0.0, 2.0]), (LM_HEAD, &[-0.0, 2.0])]).unwrap();
        assert!(!own.0.tied && own.1.contains(&LM_HEAD.to_owned()));
    }

    #[test]
    fn copies_of_the_embeddings_go_and_differing_ones_are_refused() {
        let (layout, names) = layout_of(&[
            ("encoder.encoder.embed_tokens.weight", &[1.0]),
            ("decoder.embed_tokens.weight", &[1.0]),
        ])
        .unwrap();
        assert!(layout.fid);
        assert_eq!(names, [SHARED]);
        let error =
            layout_of(&[(SHARED, &[1.0]), ("decoder.embed_tokens.weight", &[1.5])]).unwrap_err().to_string();
        assert!(
            error.contains("`decoder.embed_tokens.weight`") && error.contains("not supported"),
            "{error}"
        );
        let error = layout_of(&[("lm_head.weight", &[1.0])]).unwrap_err().to_string();
        assert!(error.contains("no tensor `shared.weight` among the 1"), "{error}");
        let both = [
            (SHARED, &[1.0f32][..]),
            ("encoder.final_layer_norm.weight", &[1.0]),
            ("encoder.encoder.final_layer_norm.weight", &[1.0]),
        ];
        assert!(layout_of(&both).unwrap_err().to_string().contains("same parameter"));
    }
}
