//! Predictions on their way to rank 0, as bytes.

use tercio_comm::CommError;

use crate::predict::{Alternative, Likelihood, Prediction};

/// The predictions of one batch, appended to `out`.
pub fn write(predictions: &[Prediction], out: &mut Vec<u8>) {
    let number = |out: &mut Vec<u8>, n: usize| out.extend((n as u64).to_le_bytes());
    number(out, predictions.len());
    let answer = |out: &mut Vec<u8>, answer: &str, tokens: &[u32], l: &Likelihood| {
        number(out, answer.len());
        out.extend(answer.as_bytes());
        number(out, tokens.len());
        out.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        number(out, usize::from(l.beam_score.is_some()));
        let numbers = [l.log_probability, l.mean_log_probability].into_iter().chain(l.beam_score);
        out.extend(numbers.flat_map(f64::to_le_bytes));
    };
    for p in predictions {
        answer(out, &p.answer, &p.tokens, &p.likelihood);
        number(out, p.alternatives.len());
        p.alternatives.iter().for_each(|a| answer(out, &a.answer, &a.tokens, &a.likelihood));
        // One more than there are; 0: not scored.
        number(out, p.scores.as_ref().map_or(0, |s| s.len() + 1));
        out.extend(p.scores.iter().flatten().flat_map(|s| s.to_le_bytes()));
    }
}

/// Reads what [`write()`] wrote, a batch at a time.
pub struct Answers<'b> {
    rest: &'b [u8],
    rank: usize,
}

impl<'b> Answers<'b> {
    /// Of the bytes that `rank` sent.
    pub fn new(bytes: &'b [u8], rank: usize) -> Self {
        Answers { rest: bytes, rank }
    }
    /// The next batch.
    ///
    /// # Errors
    /// The bytes are no predictions.
    pub fn batch(&mut self) -> Result<Vec<Prediction>, CommError> {
        let rank = self.rank;
        let read = self.read_batch();
        read.ok_or_else(|| CommError::Protocol(format!("rank {rank} sent bytes that are no predictions")))
    }
    fn read_batch(&mut self) -> Option<Vec<Prediction>> {
        let n = self.number()?;
        let mut predictions = Vec::new();
        for _ in 0..n {
            let Alternative { answer, tokens, likelihood } = self.answer()?;
            let mut alternatives = Vec::new();
            for _ in 0..self.number()? {
                alternatives.push(self.answer()?);
            }
            let scores = match self.number()? {
                0 => None,
                n => Some(self.words(n - 1)?.iter().map(|w| f32::from_le_bytes(*w)).collect()),
            };
            predictions.push(Prediction { answer, tokens, likelihood, alternatives, scores });
        }
        Some(predictions)
    }
    fn answer(&mut self) -> Option<Alternative> {
        let len = self.number()?;
        let answer = String::from_utf8(self.take(len)?.to_vec()).ok()?;
        let tokens = self.number()?;
        let tokens = self.words(tokens)?.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let scored = self.number()?;
        let (log_probability, mean_log_probability) = (self.float()?, self.float()?);
        let beam_score = match scored {
            0 => None,
            _ => Some(self.float()?),
        };
        let likelihood = Likelihood { log_probability, mean_log_probability, beam_score };
        Some(Alternative { answer, tokens, likelihood })
    }
    fn float(&mut self) -> Option<f64> {
        Some(f64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
    fn take(&mut self, n: usize) -> Option<&'b [u8]> {
        let (head, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        Some(head)
    }
    fn words(&mut self, n: usize) -> Option<&'b [[u8; 4]]> {
        Some(self.take(n.checked_mul(4)?)?.as_chunks::<4>().0)
    }
    fn number(&mut self) -> Option<usize> {
        let bytes = self.take(8)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_come_back_as_they_went() {
        let of = |answer: &str, tokens: &[u32], scores: Option<Vec<f32>>| Prediction {
            answer: answer.into(),
            tokens: tokens.to_vec(),
            likelihood: Likelihood { log_probability: -1.5, mean_log_probability: -0.5, beam_score: None },
            alternatives: Vec::new(),
            scores,
        };
        let beam_score = Some(-0.25);
        let likelihood = Likelihood { log_probability: -2.0, mean_log_probability: f64::MIN, beam_score };
        let other = Alternative { answer: "ö".into(), tokens: vec![3], likelihood };
        let several = Prediction { alternatives: vec![other.clone(), other], ..of("b", &[9], None) };
        let first = vec![of("né", &[1, u32::MAX], Some(vec![-0.5, f32::MIN])), of("", &[], None)];
        let second = vec![of("x", &[7], Some(vec![])), several];
        let mut bytes = Vec::new();
        write(&first, &mut bytes);
        write(&second, &mut bytes);
        let mut answers = Answers::new(&bytes, 1);
        assert_eq!((answers.batch().unwrap(), answers.batch().unwrap()), (first, second));
        assert!(answers.batch().is_err());
        for cut in [0, 7, 12, 30, bytes.len() - 9] {
            let mut answers = Answers::new(&bytes[..cut], 1);
            assert!(answers.batch().and_then(|_| answers.batch()).is_err(), "{cut}");
        }
        let huge = u64::MAX.to_le_bytes().repeat(3);
        assert!(Answers::new(&huge, 1).batch().is_err());
    }
}
