//! The settings of decoding: flags, environment variables, defaults. Names and meanings are those of transformers' `generate`.

use clap::Args;
use tercio_models::t5::{Decoding, EarlyStopping};

/// How answers are decoded, beside their greatest length.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct DecodingOptions {
    /// Beams that look for the answers to a question; 1: the likeliest token at every step
    #[arg(long, env = "TERCIO_NUM_BEAMS", default_value_t = 1)]
    pub num_beams: usize,
    /// Answers to each question, best first; at most --num_beams
    #[arg(long, env = "TERCIO_NUM_RETURN_SEQUENCES", default_value_t = 1)]
    pub num_return_sequences: usize,
    /// Beams are compared by their log probability over length to this power: above 0 favours long answers, below 0 short ones
    #[arg(long, env = "TERCIO_LENGTH_PENALTY", default_value_t = 1.0, allow_negative_numbers = true)]
    pub length_penalty: f64,
    /// When beam search ends, once --num_beams answers are found: true, at once; false, when no beam scores better as it
    /// stands; never, when none could by the greatest length
    #[arg(long, env = "TERCIO_EARLY_STOPPING", value_name = "true|false|never", default_value = "false")]
    pub early_stopping: EarlyStopping,
    /// Tokens of an answer at least, the start token counted, the end token not
    #[arg(long, env = "TERCIO_GENERATION_MIN_LENGTH", default_value_t = 0)]
    pub generation_min_length: usize,
}

impl DecodingOptions {
    /// The decoding that they describe, with a greatest length (the start token counted).
    ///
    /// # Errors
    /// Settings out of range.
    pub fn decoding(&self, max_length: usize) -> Result<Decoding, String> {
        let decoding = Decoding {
            max_length,
            min_length: self.generation_min_length,
            num_beams: self.num_beams,
            num_return_sequences: self.num_return_sequences,
            length_penalty: self.length_penalty,
            early_stopping: self.early_stopping,
        };
        decoding.check()?;
        Ok(decoding)
    }
}
