//! Whether two runs differ by more than chance: paired tests over the queries that both have.
//!
//! - Student's t: the mean of the differences over its standard error, n - 1 degrees of freedom, two-sided, with a confidence interval.
//! - Fisher's randomization test: were the runs the same, each difference could as well have the other sign. The p value is the share of
//!   all choices of signs whose mean lies at least as far from 0; of up to 2^16 choices all are tried, else keyed draws stand for
//!   them (then (hits + 1) / (draws + 1): Phipson and Smyth 2010). It assumes nothing of how the differences are spread (Smucker, Allan and
//!   Carterette 2007 compare the two).
//!
//! The same runs and seed give the same bits, with any number of threads.

use std::collections::HashMap;

use rayon::prelude::*;
use tercio_data::draw;

use crate::SearchError;
use crate::ranking::Figures;

/// Keeps these draws apart from others with the same seed.
const TAG: u64 = 0x7369_676e_7300;
/// Up to so many differences all choices of signs are tried.
const ALL_SIGNS: usize = 16;
/// Share of the confidence interval.
pub const CONFIDENCE: f64 = 0.95;

/// How the tests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestRules {
    /// Draws of the randomization test.
    pub draws: u64,
    /// What the draws are keyed by.
    pub seed: u64,
}

impl Default for TestRules {
    fn default() -> TestRules {
        TestRules { draws: 100_000, seed: 0 }
    }
}

/// One metric of two runs, over the queries of both.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The metric.
    pub name: String,
    /// Mean of the first run.
    pub first: f64,
    /// Mean of the second.
    pub second: f64,
    /// What [`test()`] finds in the differences, first less second.
    pub test: PairedTest,
}

/// What the differences of pairs tell.
#[derive(Clone, Debug, PartialEq)]
pub struct PairedTest {
    /// Their mean.
    pub difference: f64,
    /// Its confidence interval ([`CONFIDENCE`], by Student's t); `None` of fewer than two pairs.
    pub interval: Option<(f64, f64)>,
    /// Student's t; infinite where all differences are the same and not 0, `None` where they are 0, or fewer than two.
    pub t: Option<f64>,
    /// Its two-sided p value; 1 where all differences are 0, `None` of fewer than two pairs.
    pub p_t: Option<f64>,
    /// Two-sided p value of the randomization test.
    pub p_randomization: f64,
    /// Pairs with a difference above 0.
    pub better: u64,
    /// Pairs with a difference below 0.
    pub worse: u64,
}

/// Comparisons of all metrics, and the queries that could not be compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// One for each metric.
    pub metrics: Vec<Comparison>,
    /// Queries of both runs.
    pub queries: u64,
    /// Queries that only the first run has.
    pub only_first: u64,
    /// Queries that only the second run has.
    pub only_second: u64,
}

/// Compares two runs, query by query.
///
/// # Errors
/// Other metrics; an id that two queries of a run have; no query that both have; no draws.
pub fn compare(first: &Figures, second: &Figures, rules: &TestRules) -> Result<Compared, SearchError> {
    let refuse = |what: String| Err(SearchError::Unusable(what));
    if first.names != second.names {
        return refuse("two runs are compared by the same metrics; these have others".into());
    }
    let mut of_second: HashMap<&str, &[f64]> = HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for (figures, is_second) in [(first, false), (second, true)] {
        seen.clear();
        for (id, values) in &figures.queries {
            if !seen.insert(id.as_str()) {
                return refuse(format!(
                    "the id {id} stands for two queries; runs are compared by ids of their own"
                ));
            }
            if is_second {
                of_second.insert(id, values);
            }
        }
    }
    let pairs: Vec<(&[f64], &[f64])> = first
        .queries
        .iter()
        .filter_map(|(id, values)| Some((values.as_slice(), *of_second.get(id.as_str())?)))
        .collect();
    if pairs.is_empty() {
        return refuse("the two runs have no query in common; compare how they name queries".into());
    }
    let count = pairs.len() as f64;
    let metric = |(i, name): (usize, &String)| {
        let differences: Vec<f64> = pairs.iter().map(|(a, b)| a[i] - b[i]).collect();
        Ok(Comparison {
            name: name.clone(),
            first: pairs.iter().map(|(a, _)| a[i]).sum::<f64>() / count,
            second: pairs.iter().map(|(_, b)| b[i]).sum::<f64>() / count,
            test: test(&differences, rules)?,
        })
    };
    Ok(Compared {
        metrics: first.names.iter().enumerate().map(metric).collect::<Result<_, SearchError>>()?,
        queries: pairs.len() as u64,
        only_first: (first.queries.len() - pairs.len()) as u64,
        only_second: (second.queries.len() - pairs.len()) as u64,
    })
}

/// Tests whether the mean of differences of pairs is 0.
///
/// # Errors
/// No differences, or ones that are no numbers; no draws.
pub fn test(differences: &[f64], rules: &TestRules) -> Result<PairedTest, SearchError> {
    if differences.is_empty() || differences.iter().any(|d| !d.is_finite()) || rules.draws == 0 {
        let what = "expected differences of pairs that are numbers, and at least one draw";
        return Err(SearchError::Unusable(what.into()));
    }
    let count = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / count;
    let mut found = PairedTest {
        difference: mean,
        interval: None,
        t: None,
        p_t: None,
        p_randomization: randomization(differences, rules),
        better: differences.iter().filter(|d| **d > 0.0).count() as u64,
        worse: differences.iter().filter(|d| **d < 0.0).count() as u64,
    };
    if differences.len() >= 2 {
        let freedom = count - 1.0;
        let is_constant = differences.iter().all(|d| *d == differences[0]);
        let squares: f64 = differences.iter().map(|d| (d - mean) * (d - mean)).sum();
        let error = if is_constant { 0.0 } else { (squares / freedom / count).sqrt() };
        let width = error * t_quantile(1.0 - CONFIDENCE, freedom);
        found.interval = Some((mean - width, mean + width));
        found.t = (mean != 0.0 || error > 0.0).then(|| mean / error);
        found.p_t = Some(found.t.map_or(1.0, |t| t_two_sided(t, freedom)));
    }
    Ok(found)
}

/// Two-sided p value of Fisher's randomization test.
fn randomization(differences: &[f64], rules: &TestRules) -> f64 {
    // Those of 0 are the same with either sign.
    let differences: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    // Sums that are equal but for rounding count as equal.
    let slack = 1e-12 * differences.iter().map(|d| d.abs()).sum::<f64>();
    let observed = differences.iter().sum::<f64>().abs() - slack;
    let reaches = |signs: &dyn Fn(u64) -> u64| {
        let mut sum = 0.0;
        for (block, part) in differences.chunks(64).enumerate() {
            let signs = signs(block as u64);
            for (i, d) in part.iter().enumerate() {
                sum += if signs >> i & 1 == 1 { *d } else { -d };
            }
        }
        sum.abs() >= observed
    };
    if differences.len() <= ALL_SIGNS {
        let all = 1u64 << differences.len();
        return (0..all).filter(|&signs| reaches(&|_| signs)).count() as f64 / all as f64;
    }
    let drawn = |n: u64| reaches(&|block| draw::keyed(&[TAG, rules.seed, n, block]));
    let hits = (0..rules.draws).into_par_iter().filter(|&n| drawn(n)).count();
    (hits as f64 + 1.0) / (rules.draws as f64 + 1.0)
}

/// Two-sided p value of Student's t: the regularised incomplete beta function I(x; f/2, 1/2) at x = f / (f + t^2) (Abramowitz and
/// Stegun 26.7.1).
fn t_two_sided(t: f64, freedom: f64) -> f64 {
    let square = t * t;
    if square == f64::INFINITY {
        return 0.0;
    }
    // Both of them as they are: 1 less the other would lose the digits of a small one.
    incomplete_beta(freedom / (freedom + square), square / (freedom + square), freedom / 2.0, 0.5)
}

/// The t whose two-sided p value is `p`, by bisection.
fn t_quantile(p: f64, freedom: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while t_two_sided(high, freedom) > p {
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if t_two_sided(middle, freedom) > p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The regularised incomplete beta function I(x; a, b), with `rest` = 1 - x, by its continued fraction (NIST's Digital Library of
/// Mathematical Functions 8.17.22), which converges quickly below its mean.
fn incomplete_beta(x: f64, rest: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || rest <= 0.0 {
        return if x <= 0.0 { 0.0 } else { 1.0 };
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(rest, x, b, a);
    }
    let log_beta = libm::lgamma(a) + libm::lgamma(b) - libm::lgamma(a + b);
    let front = libm::exp(a * libm::log(x) + b * libm::log(rest) - log_beta) / a;
    // The fraction 1 / (1 + d1 / (1 + d2 / (1 + ...))) from its far end; so many terms that the rest does not count.
    let terms = 300 + 4 * (a + b).sqrt() as u32;
    let mut tail = 1.0;
    for n in (1..=terms).rev() {
        let m = f64::from(n / 2);
        let d = match n % 2 {
            0 => m * (b - m) / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            _ => -(a + m) * (a + b + m) / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        };
        tail = 1.0 + d * x / tail;
    }
    front / tail
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1e-3), "{found} is not {expected}");
    }

    #[test]
    fn students_t_is_what_closed_forms_give() {
        // One degree of freedom is Cauchy's distribution, two have a closed form, many are nearly normal.
        for t in [0.0f64, 0.3, 1.0, 2.5, 12.706, 400.0] {
            near(t_two_sided(t, 1.0), 1.0 - 2.0 / std::f64::consts::PI * libm::atan(t));
            near(t_two_sided(-t, 2.0), 1.0 - t / (2.0 + t * t).sqrt());
            let three = (t / 3f64.sqrt()) / (1.0 + t * t / 3.0) + libm::atan(t / 3f64.sqrt());
            near(t_two_sided(t, 3.0), 1.0 - 2.0 / std::f64::consts::PI * three);
            let normal = libm::erfc(t.min(5.0) / 2f64.sqrt());
            assert!((t_two_sided(t.min(5.0), 1e7) - normal).abs() < 1e-6);
        }
        // 0.975 quantiles as printed tables have them.
        for (freedom, quantile) in
            [(1.0, 12.7062), (5.0, 2.5706), (10.0, 2.2281), (30.0, 2.0423), (1e6, 1.9600)]
        {
            assert!((t_quantile(0.05, freedom) - quantile).abs() < 6e-5, "{freedom}");
        }
        assert_eq!(t_two_sided(f64::INFINITY, 4.0), 0.0);
    }

    #[test]
    fn small_samples_try_all_signs() {
        let p = |differences: &[f64]| test(differences, &TestRules::default()).unwrap();
        // Of 8 choices of signs only the two with all alike reach the sum.
        let all_above = p(&[0.5, 0.25, 0.125]);
        assert_eq!((all_above.p_randomization, all_above.better, all_above.worse), (0.25, 3, 0));
        // Sums 0.5 of +-0.5, +-0.25, +-0.25: +-1, +-0.5 (twice), 0 (twice): 6 of 8 reach 0.5.
        assert_eq!(p(&[0.5, 0.25, -0.25, 0.0]).p_randomization, 0.75);
        let none = p(&[0.0; 5]);
        assert_eq!(
            (none.p_randomization, none.t, none.p_t, none.interval),
            (1.0, None, Some(1.0), Some((0.0, 0.0)))
        );
        let constant = p(&[0.1; 4]);
        assert_eq!((constant.t, constant.p_t), (Some(f64::INFINITY), Some(0.0)));
        assert_eq!(constant.p_randomization, 0.125);
        let one = p(&[0.1]);
        assert_eq!((one.t, one.p_t, one.interval, one.p_randomization), (None, None, None, 1.0));
        for wrong in [&[][..], &[f64::NAN], &[1.0, f64::INFINITY]] {
            assert!(test(wrong, &TestRules::default()).is_err());
        }
    }

    #[test]
    fn drawn_signs_come_near_students_t_and_are_the_same_every_time() {
        let noise = |i: u64| (draw::keyed(&[7, i]) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        let differences: Vec<f64> = (0..200).map(|i| noise(i) + 0.04).collect();
        let rules = TestRules { draws: 20_000, seed: 3 };
        let found = test(&differences, &rules).unwrap();
        let p_t = found.p_t.unwrap();
        assert!((0.001..0.9).contains(&p_t), "{p_t} would show nothing");
        assert!((found.p_randomization - p_t).abs() < 0.02, "{found:?}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(pool.install(|| test(&differences, &rules).unwrap()), found);
        let (low, high) = found.interval.unwrap();
        assert_eq!(p_t < 0.05, low > 0.0 || high < 0.0, "the interval and the test say the same");
        // A mean moved to the end of the interval has the p value of that end.
        let moved: Vec<f64> = differences.iter().map(|d| d - low).collect();
        assert!((test(&moved, &rules).unwrap().p_t.unwrap() - 0.05).abs() < 1e-6);
    }

    #[test]
    fn queries_are_paired_by_their_ids() {
        let figures = |queries: &[(&str, f64)]| Figures {
            names: vec!["map".into()],
            queries: queries.iter().map(|(id, value)| ((*id).to_owned(), vec![*value])).collect(),
        };
        let a = figures(&[("q1", 0.5), ("q2", 1.0), ("q3", 0.25)]);
        let b = figures(&[("q3", 0.0), ("q4", 1.0), ("q2", 0.5), ("q5", 0.0)]);
        let found = compare(&a, &b, &TestRules::default()).unwrap();
        assert_eq!((found.queries, found.only_first, found.only_second), (2, 1, 2));
        let metric = &found.metrics[0];
        assert_eq!((metric.first, metric.second, metric.test.difference), (0.625, 0.25, 0.375));
        let refused = |b: &Figures| compare(&a, b, &TestRules::default()).unwrap_err().to_string();
        assert!(refused(&figures(&[("q9", 1.0)])).contains("no query in common"));
        assert!(refused(&figures(&[("q1", 1.0), ("q1", 0.0)])).contains("q1 stands for two"));
        assert!(refused(&Figures { names: vec!["mrr".into()], ..b }).contains("same metrics"));
    }
}
