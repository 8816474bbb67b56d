//! Endings of English words: the algorithm of Porter 1980, "An algorithm for suffix stripping", written from the paper.

/// Takes the endings off a word in lower case. Words of fewer than three letters, or with other characters than a to z, stay.
pub fn stem(word: &mut String) {
    if word.len() < 3 || !word.bytes().all(|b| b.is_ascii_lowercase()) {
        return;
    }
    plurals(word);
    past_and_participle(word);
    if ends_with_vowel_before(word, "y") {
        replace(word, "y", "i");
    }
    first_match(word, 0, &STEP_2);
    first_match(word, 0, &STEP_3);
    step_4(word);
    final_e(word);
}

/// Step 2: double suffixes, where the rest has a measure above 0.
const STEP_2: [(&str, &str); 20] = [
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("abli", "able"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
];
/// Step 3.
const STEP_3: [(&str, &str); 7] = [
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
];
/// Step 4: single suffixes, where the rest has a measure above 1. "ion" only follows s or t.
const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism",
    "ate", "iti", "ous", "ive", "ize",
];

fn is_consonant(word: &[u8], i: usize) -> bool {
    match word[i] {
        b'a' | b'e' | b'i' | b'o' | b'u' => false,
        b'y' => i == 0 || !is_consonant(word, i - 1),
        _ => true,
    }
}

/// How often a consonant follows a vowel: m in \[C\](VC)^m\[V\].
fn measure(word: &[u8]) -> usize {
    (1..word.len()).filter(|&i| is_consonant(word, i) && !is_consonant(word, i - 1)).count()
}

fn has_vowel(word: &[u8]) -> bool {
    (0..word.len()).any(|i| !is_consonant(word, i))
}

fn ends_with_vowel_before(word: &str, suffix: &str) -> bool {
    word.strip_suffix(suffix).is_some_and(|rest| has_vowel(rest.as_bytes()))
}

fn ends_with_double_consonant(word: &[u8]) -> bool {
    let n = word.len();
    n >= 2 && word[n - 1] == word[n - 2] && is_consonant(word, n - 1)
}

/// Whether it ends consonant, vowel, consonant, and the last is none of w, x, y.
fn ends_short(word: &[u8]) -> bool {
    let n = word.len();
    n >= 3
        && is_consonant(word, n - 1)
        && !is_consonant(word, n - 2)
        && is_consonant(word, n - 3)
        && !matches!(word[n - 1], b'w' | b'x' | b'y')
}

fn replace(word: &mut String, suffix: &str, by: &str) {
    word.truncate(word.len() - suffix.len());
    word.push_str(by);
}

/// Step 1a.
fn plurals(word: &mut String) {
    if word.ends_with("sses") || word.ends_with("ies") {
        word.truncate(word.len() - 2);
    } else if word.ends_with('s') && !word.ends_with("ss") {
        word.pop();
    }
}

/// Step 1b.
fn past_and_participle(word: &mut String) {
    if let Some(rest) = word.strip_suffix("eed") {
        if measure(rest.as_bytes()) > 0 {
            word.pop();
        }
        return;
    }
    let Some(suffix) = ["ed", "ing"].into_iter().find(|suffix| ends_with_vowel_before(word, suffix)) else {
        return;
    };
    replace(word, suffix, "");
    let bytes = word.as_bytes();
    let doubled = ends_with_double_consonant(bytes) && !word.ends_with(['l', 's', 'z']);
    if ["at", "bl", "iz"].iter().any(|end| word.ends_with(end)) || (measure(bytes) == 1 && ends_short(bytes))
    {
        word.push('e');
    } else if doubled {
        word.pop();
    }
}

/// Replaces the longest suffix of the table that the word has, if the rest has a measure above `least`.
fn first_match(word: &mut String, least: usize, table: &[(&str, &str)]) {
    let longest =
        table.iter().filter(|(suffix, _)| word.ends_with(suffix)).max_by_key(|(suffix, _)| suffix.len());
    let Some((suffix, by)) = longest else { return };
    if measure(&word.as_bytes()[..word.len() - suffix.len()]) > least {
        replace(word, suffix, by);
    }
}

fn step_4(word: &mut String) {
    let longest = STEP_4.iter().filter(|suffix| word.ends_with(*suffix)).max_by_key(|suffix| suffix.len());
    let Some(suffix) = longest else { return };
    let rest = &word.as_bytes()[..word.len() - suffix.len()];
    if measure(rest) > 1 && (*suffix != "ion" || matches!(rest.last(), Some(b's' | b't'))) {
        replace(word, suffix, "");
    }
}

/// Step 5.
fn final_e(word: &mut String) {
    if let Some(rest) = word.strip_suffix('e') {
        let m = measure(rest.as_bytes());
        if m > 1 || (m == 1 && !ends_short(rest.as_bytes())) {
            word.pop();
        }
    }
    if word.ends_with("ll") && measure(&word.as_bytes()[..word.len() - 1]) > 1 {
        word.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the paper, each through all steps; where a later step of the paper changes an earlier example further,
    /// what comes out is worked out by its rules.
    #[test]
    fn the_examples_of_the_paper() {
        for (word, want) in [
            ("caresses", "caress"),
            ("ponies", "poni"),
            ("ties", "ti"),
            ("cats", "cat"),
            ("feed", "feed"),
            ("agreed", "agre"),
            ("plastered", "plaster"),
            ("bled", "bled"),
            ("motoring", "motor"),
            ("sing", "sing"),
            ("conflated", "conflat"),
            ("troubled", "troubl"),
            ("sized", "size"),
            ("hopping", "hop"),
            ("tanned", "tan"),
            ("falling", "fall"),
            ("hissing", "hiss"),
            ("fizzed", "fizz"),
            ("failing", "fail"),
            ("filing", "file"),
            ("happy", "happi"),
            ("sky", "sky"),
            ("relational", "relat"),
            ("conditional", "condit"),
            ("rational", "ration"),
            ("valenci", "valenc"),
            ("digitizer", "digit"),
            ("radicalli", "radic"),
            ("vileli", "vile"),
            ("vietnamization", "vietnam"),
            ("predication", "predic"),
            ("operator", "oper"),
            ("feudalism", "feudal"),
            ("decisiveness", "decis"),
            ("hopefulness", "hope"),
            ("callousness", "callous"),
            ("sensitiviti", "sensit"),
            ("sensibiliti", "sensibl"),
            ("triplicate", "triplic"),
            ("formative", "form"),
            ("electrical", "electr"),
            ("goodness", "good"),
            ("revival", "reviv"),
            ("allowance", "allow"),
            ("airliner", "airlin"),
            ("adjustable", "adjust"),
            ("replacement", "replac"),
            ("adoption", "adopt"),
            ("communism", "commun"),
            ("effective", "effect"),
            ("probate", "probat"),
            ("rate", "rate"),
            ("cease", "ceas"),
            ("controll", "control"),
            ("roll", "roll"),
            ("generalizations", "gener"),
            ("oscillators", "oscil"),
            // No letters of a to z alone, or too few of them: left as they are.
            ("is", "is"),
            ("1990s", "1990s"),
            ("cafés", "cafés"),
        ] {
            let mut found = word.to_owned();
            stem(&mut found);
            assert_eq!(found, want, "{word}");
        }
    }

    #[test]
    fn any_word_has_a_stem_that_is_no_longer() {
        for seed in 0..20_000u64 {
            let draw = |k: u64| tercio_data::draw::keyed(&[seed, k]);
            let letters = b"aeioubcdlnstyzg";
            let mut word: String =
                (0..draw(0) % 12).map(|k| letters[(draw(k + 1) % 15) as usize] as char).collect();
            let before = word.clone();
            stem(&mut word);
            assert!(word.len() <= before.len() && (word.is_empty() == before.is_empty()), "{before} {word}");
        }
    }
}
