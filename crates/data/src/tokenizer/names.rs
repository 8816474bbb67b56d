//! How a folder names its special tokens: `tokenizer_config.json`, then `special_tokens_map.json`, then the family's custom.

use serde_json::Value;
use tokenizers::AddedToken;

/// The names that T5's builders need.
pub(crate) struct SpecialNames {
    pub pad: String,
    pub eos: String,
    pub unk: String,
}

/// What a folder says about its special tokens.
pub(super) struct Names {
    /// `tokenizer_config.json`, null where it is not there.
    pub config: Value,
    /// `special_tokens_map.json`, null where it is not there.
    pub map: Value,
}

impl Names {
    /// The name under a key such as `pad_token`.
    pub fn get(&self, key: &str) -> Option<&str> {
        [&self.config, &self.map].into_iter().find_map(|file| match &file[key] {
            Value::Object(token) => token.get("content").and_then(Value::as_str),
            value => value.as_str(),
        })
    }

    /// The name under a key, or another one.
    pub fn or(&self, key: &str, default: &str) -> String {
        self.get(key).unwrap_or(default).to_string()
    }

    /// The names of T5's family.
    pub fn t5(&self) -> SpecialNames {
        SpecialNames {
            pad: self.or("pad_token", "<pad>"),
            eos: self.or("eos_token", "</s>"),
            unk: self.or("unk_token", "<unk>"),
        }
    }

    /// A special token as it is found in texts; white space before it belongs to it where the folder says so.
    pub fn token(&self, key: &str, default: &str) -> AddedToken {
        let left = [&self.config, &self.map].into_iter().any(|file| file[key]["lstrip"] == true);
        AddedToken::from(self.or(key, default), true).lstrip(left)
    }
}
