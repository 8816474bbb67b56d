//! Where the texts to embed come from: a collection of passages, or a file of questions.

use std::path::Path;

use tercio_data::template::TextTemplate;
use tercio_data::{DataError, Passages, Questions};

/// A list of texts with ids.
pub trait TextSource: Sync {
    /// How many there are.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Id and text of one.
    ///
    /// # Errors
    /// It cannot be read.
    fn text(&self, i: usize) -> Result<(String, String), DataError>;
}

/// A file and the template that makes texts of its items.
pub struct Texts {
    file: File,
    template: TextTemplate,
}

enum File {
    Passages(Passages),
    Questions(Questions),
}

impl Texts {
    /// Texts of passages.
    pub fn of_passages(passages: Passages, template: TextTemplate) -> Texts {
        Texts { file: File::Passages(passages), template }
    }

    /// Texts of questions.
    pub fn of_questions(questions: Questions, template: TextTemplate) -> Texts {
        Texts { file: File::Questions(questions), template }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        match &self.file {
            File::Passages(passages) => passages.path(),
            File::Questions(questions) => questions.path(),
        }
    }

    /// SHA-256 of the file's content, in hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        match &self.file {
            File::Passages(passages) => passages.fingerprint(),
            File::Questions(questions) => questions.fingerprint(),
        }
    }

    /// The template.
    pub fn template(&self) -> &TextTemplate {
        &self.template
    }
}

impl TextSource for Texts {
    fn len(&self) -> usize {
        match &self.file {
            File::Passages(passages) => passages.len(),
            File::Questions(questions) => questions.len(),
        }
    }

    fn text(&self, i: usize) -> Result<(String, String), DataError> {
        Ok(match &self.file {
            File::Passages(passages) => {
                let passage = passages.get(i)?;
                let text = self.template.of_passage(&passage);
                (passage.id, text)
            }
            File::Questions(questions) => {
                let question = questions.get(i)?;
                (question.id_text(), self.template.of_question(&question.question))
            }
        })
    }
}
