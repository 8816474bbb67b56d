//! The special tokens that a family puts around a text: `[CLS] .. [SEP]`, `<s> .. </s>`, T5's `.. </s>`.

use tokenizers::processors::template::TemplateProcessing;

use super::names::Names;

/// Ids before and behind every text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub before: Vec<u32>,
    pub behind: Vec<u32>,
}

/// A text that every vocabulary gives at least one token for.
const PROBE: &str = "question: a";

impl Frame {
    /// What a pipeline puts around a text; where it has no such step, the tokens that the folder names `cls_token` and `sep_token`.
    pub fn of(pipeline: &tokenizers::Tokenizer, names: &Names) -> Result<Frame, String> {
        let encode = |special| pipeline.encode_fast(PROBE, special).map_err(|e| e.to_string());
        let (bare, whole) = (encode(false)?, encode(true)?);
        let (bare, ids) = (bare.get_ids(), whole.get_ids());
        if bare == ids {
            let id = |key| names.get(key).and_then(|name| pipeline.token_to_id(name)).into_iter().collect();
            return Ok(Frame { before: id("cls_token"), behind: id("sep_token") });
        }
        let first = whole.get_special_tokens_mask().iter().take_while(|&&special| special == 1).count();
        if bare.is_empty() || ids.get(first..first + bare.len()) != Some(bare) {
            return Err(format!(
                "expected special tokens before and behind the tokens of {PROBE:?}, found {ids:?} for {bare:?}; correct `post_processor`"
            ));
        }
        Ok(Frame { before: ids[..first].to_vec(), behind: ids[first + bare.len()..].to_vec() })
    }

    /// How many tokens they are.
    pub fn len(&self) -> usize {
        self.before.len() + self.behind.len()
    }

    /// The ids of a text, cut so that all are at most `max_length`, in their frame; `None` where not even the frame fits.
    pub fn around(&self, ids: &[u32], max_length: usize) -> Option<Vec<u32>> {
        let room = max_length.checked_sub(self.len())?;
        Some([&self.before, &ids[..ids.len().min(room)], &self.behind].concat())
    }
}

/// The step of a pipeline that puts two special tokens around a text. In `pair` of two texts: `$B`, and the tokens by their names.
pub(super) fn template(
    (cls, cls_id): (&str, u32),
    (sep, sep_id): (&str, u32),
    pair: &str,
) -> Result<TemplateProcessing, String> {
    let mut special = vec![(cls.to_string(), cls_id)];
    if sep != cls {
        special.push((sep.to_string(), sep_id));
    }
    TemplateProcessing::builder()
        .try_single(format!("{cls} $A {sep}"))
        .and_then(|b| b.try_pair(pair))
        .map(|b| b.special_tokens(special).build())?
        .map_err(|e| e.to_string())
}
