//! Ranking metrics against plain definitions, whatever the order of lines; ties, negative and missing judgements; hits by answer.

use std::path::PathBuf;

use tercio_data::draw::{index, keyed};
use tercio_data::has_answer::AnswerMode;
use tercio_data::retrieval::RunFile;
use tercio_data::{Qrels, Questions};
use tercio_search::ranking::{self, Evaluation, Lacking, Metric, Ranked, Rules, hits};

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }
    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
    fn evaluate(&self, run: &str, qrels: &str, rules: &Rules) -> Result<Evaluation, String> {
        let run = RunFile::open(&self.write("run.txt", run), usize::MAX).map_err(|e| e.to_string())?;
        let qrels = Qrels::open(&self.write("qrels.txt", qrels)).map_err(|e| e.to_string())?;
        ranking::evaluate(&run, &qrels, rules).map_err(|e| e.to_string())
    }
}

fn rules(metrics: &[&str]) -> Rules {
    Rules { metrics: metrics.iter().map(|m| m.parse().unwrap()).collect(), ..Rules::default() }
}

/// A made-up run and its judgements: few different scores, grades from -1 to 3, queries that only one of them has.
struct Case {
    ranked: Vec<(usize, String, f64)>,
    judged: Vec<(usize, String, i64)>,
}

fn case(seed: u64) -> Case {
    let mut case = Case { ranked: vec![], judged: vec![] };
    for query in 0..6 {
        for document in 0..30u64 {
            let at = |what: u64, n: usize| index(&[seed, query as u64, document, what], n).unwrap();
            let name = format!("d{}", document * 7 % 30);
            if query != 4 && at(0, 3) > 0 {
                case.ranked.push((query, name.clone(), at(1, 6) as f64 / 4.0 - 0.5));
            }
            if query != 5 && at(2, 2) > 0 {
                case.judged.push((query, name, at(3, 5) as i64 - 1));
            }
        }
    }
    case
}

impl Case {
    fn run(&self) -> Vec<String> {
        self.ranked.iter().map(|(q, d, score)| format!("q{q} Q0 {d} 0 {score} t\n")).collect()
    }
    fn qrels(&self) -> Vec<String> {
        self.judged.iter().map(|(q, d, grade)| format!("q{q} 0 {d} {grade}\n")).collect()
    }
    fn grade(&self, query: usize, document: &str) -> i64 {
        self.judged.iter().find(|(q, d, _)| (*q, d.as_str()) == (query, document)).map_or(0, |(_, _, g)| *g)
    }
    /// Ranks by their definition: one more than the documents before.
    fn ranks(&self, query: usize) -> Vec<(usize, i64)> {
        let of_query = || self.ranked.iter().filter(move |(q, _, _)| *q == query);
        let rank = |name: &str, score: f64| {
            1 + of_query().filter(|(_, d, s)| *s > score || (*s == score && d.as_str() > name)).count()
        };
        of_query().map(|(q, d, s)| (rank(d, *s), self.grade(*q, d))).collect()
    }
    fn plain(&self, query: usize, metric: Metric) -> f64 {
        let ranks = self.ranks(query);
        let relevant: Vec<usize> = ranks.iter().filter(|(_, g)| *g >= 1).map(|(rank, _)| *rank).collect();
        let mut grades: Vec<i64> = self.judged.iter().filter(|(q, _, _)| *q == query).map(|j| j.2).collect();
        let all = grades.iter().filter(|g| **g >= 1).count() as f64;
        let within = |k: usize| relevant.iter().filter(|rank| **rank <= k).count() as f64;
        let discount = |rank: usize| 1.0 / ((rank + 1) as f64).log2();
        if all == 0.0 {
            return 0.0;
        }
        match metric {
            Metric::Success(k) => f64::from(within(k) > 0.0),
            Metric::Precision(k) => within(k) / k as f64,
            Metric::Recall(k) => within(k) / all,
            Metric::Mrr(k) => {
                let first = relevant.iter().min().filter(|rank| **rank <= k.unwrap_or(usize::MAX));
                first.map_or(0.0, |rank| 1.0 / *rank as f64)
            }
            Metric::Map(k) => {
                let counted = relevant.iter().filter(|rank| **rank <= k.unwrap_or(usize::MAX));
                counted.map(|rank| within(*rank) / *rank as f64).sum::<f64>() / all
            }
            Metric::Ndcg(k) => {
                let k = k.unwrap_or(usize::MAX);
                grades.sort_by_key(|g| -g);
                let gain = |pairs: &[(usize, i64)]| -> f64 {
                    pairs
                        .iter()
                        .filter(|(r, g)| *r <= k && *g > 0)
                        .map(|(r, g)| *g as f64 * discount(*r))
                        .sum()
                };
                let ideal: Vec<(usize, i64)> = (1..).zip(grades).collect();
                gain(&ranks) / gain(&ideal)
            }
        }
    }
}

const METRICS: [&str; 11] = [
    "ndcg",
    "ndcg@5",
    "map",
    "map@4",
    "mrr",
    "mrr@2",
    "recall@7",
    "recall@100",
    "precision@10",
    "precision@40",
    "success@1",
];

#[test]
fn metrics_are_their_plain_definitions() {
    let files = Files::new();
    for seed in 0..20 {
        let case = case(seed);
        let found = files.evaluate(&case.run().concat(), &case.qrels().concat(), &rules(&METRICS)).unwrap();
        assert_eq!((found.judged_queries, found.missing, found.not_judged_queries), (5, 1, 1));
        for (name, values) in &found.figures.queries {
            let query = name[1..].parse().unwrap();
            for (metric, value) in METRICS.iter().zip(values) {
                let plain = case.plain(query, metric.parse().unwrap());
                assert!((value - plain).abs() < 1e-12, "seed {seed}, {name} {metric}: {value}, not {plain}");
            }
        }
        let ranked = case.ranked.iter().filter(|(q, _, _)| *q != 5).count() as u64;
        assert_eq!(found.ranked, ranked);
    }
}

#[test]
fn the_order_of_lines_reaches_no_bit() {
    let files = Files::new();
    let case = case(99);
    let measure = |seed: u64| {
        let [mut run, mut qrels] = [case.run(), case.qrels()];
        for lines in [&mut run, &mut qrels] {
            lines.sort_by_key(|line| keyed(&[seed, line.bytes().fold(7, |h, b| keyed(&[h, u64::from(b)]))]));
        }
        files.evaluate(&run.concat(), &qrels.concat(), &rules(&METRICS)).unwrap()
    };
    let first = measure(0);
    (1..6).for_each(|seed| assert_eq!(measure(seed), first));
}

#[test]
fn scores_tie_as_32_bit_numbers_and_the_greater_name_comes_first() {
    let files = Files::new();
    // 1.00000001 is 1 in 32 bits; "b" comes before "B" and "a", byte by byte from behind.
    for (run, first) in [
        ("q Q0 a 1 1.00000001 t\nq Q0 b 2 1 t\n", "b"),
        ("q Q0 a 1 1.001 t\nq Q0 b 2 1 t\n", "a"),
        ("q Q0 B 1 1 t\nq Q0 b 2 1 t\n", "b"),
        ("q Q0 a 1 0 t\nq Q0 b 2 -0.0 t\n", "b"),
        ("q Q0 a 1 -1e-300 t\nq Q0 b 2 0 t\n", "b"),
        ("q Q0 d10 1 5 t\nq Q0 d9 2 5 t\n", "d9"),
    ] {
        let found = files.evaluate(run, &format!("q 0 {first} 1\n"), &rules(&["mrr"])).unwrap();
        assert_eq!(found.figures.means(), [1.0], "{run}");
    }
}

#[test]
fn what_is_missing_counts_as_the_rules_say_and_is_told() {
    let files = Files::new();
    let run = "good Q0 a 1 2 t\ngood Q0 x 2 1 t\nnone Q0 a 1 1 t\nother Q0 a 1 1 t\n";
    let qrels = "good 0 a 1\ngood 0 b 2\nnone 0 a 0\nnone 0 b -1\nabsent 0 a 1\n";
    let evaluate = |missing, without_relevant| {
        let rules = Rules { missing, without_relevant, ..rules(&["recall@10"]) };
        files.evaluate(run, qrels, &rules).unwrap()
    };
    use Lacking::{Skip, Zero};
    for (missing, without, mean) in
        [(Zero, Zero, 0.5 / 3.0), (Skip, Zero, 0.25), (Zero, Skip, 0.25), (Skip, Skip, 0.5)]
    {
        let found = evaluate(missing, without);
        assert_eq!(found.figures.means(), [mean]);
        assert_eq!((found.judged_queries, found.missing, found.without_relevant), (3, 1, 1));
        assert_eq!((found.not_judged_queries, found.ranked, found.not_judged), (1, 3, 1));
        assert_eq!((found.relevant, found.relevant_ranked), (3, 1));
    }
    let graded = Rules { least_grade: 2, ..rules(&["recall@10", "ndcg"]) };
    let found = files.evaluate(run, qrels, &graded).unwrap();
    assert_eq!(found.figures.queries[1].1[0], 0.0, "only b is relevant from grade 2 on");
    assert!(found.figures.queries[1].1[1] > 0.0, "gains stay the grades");

    for (run, qrels, rules, part) in [
        ("x Q0 a 1 1 t\n", "q 0 a 1\n", rules(&["map"]), "none of the 1 queries of the run"),
        (
            "q Q0 a 1 1 t\n",
            "q 0 a 0\n",
            Rules { without_relevant: Skip, ..rules(&["map"]) },
            "all queries are left out",
        ),
        ("q Q0 a 1 1 t\n", "q 0 a 1\n", rules(&[]), "at least one metric"),
        ("q Q0 a 1 1 t\n", "q 0 a 1\n", Rules { least_grade: 0, ..rules(&["map"]) }, "from grade 1"),
        ("q Q0 a 1 nan t\n", "q 0 a 1\n", rules(&["map"]), "line 1: expected a finite number"),
        ("q Q0 a 1 1 t\nq Q0 a 2 1 t\n", "q 0 a 1\n", rules(&["map"]), "the document a twice"),
        ("", "q 0 a 1\n", rules(&["map"]), "run.txt: expected lines of a run"),
        ("q Q0 a 1 1 t\n", "", rules(&["map"]), "qrels.txt: expected judgements"),
    ] {
        let error = files.evaluate(run, qrels, &rules).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn metrics_have_names() {
    for (name, own) in [
        ("nDCG@10", "ndcg@10"),
        ("ndcg_cut_10", "ndcg@10"),
        ("map_cut_5", "map@5"),
        ("recip_rank", "mrr"),
        ("mrr_10", "mrr@10"),
        ("P_3", "precision@3"),
        ("recall_100", "recall@100"),
        ("success@1", "success@1"),
        ("map", "map"),
    ] {
        assert_eq!(name.parse::<Metric>().unwrap().to_string(), own);
    }
    for wrong in [
        "",
        "ndcg@0",
        "ndcg@",
        "recall",
        "recall_",
        "bpref",
        "map@x",
        "precision@-1",
        "mrr@99999999999999999999",
    ] {
        assert!(wrong.parse::<Metric>().unwrap_err().contains("expected ndcg"), "{wrong}");
    }
    let ranked = Ranked::of_flags(&[false, true]);
    assert_eq!(
        [Metric::Mrr(None), Metric::Recall(1), Metric::Success(2)].map(|m| ranked.value(m)),
        [0.5, 0.0, 1.0]
    );
}

#[test]
fn hits_follow_the_order_of_the_file() {
    let files = Files::new();
    let count = |text: &str, mode| {
        let path = files.write("retrieved.jsonl", text);
        let cache = tempfile::tempdir().unwrap();
        let questions = Questions::open(&path, cache.path()).unwrap();
        hits::count(&questions, mode, &|| false).map_err(|e| e.to_string())
    };
    let text = r#"{"id": "a", "question": "q", "answers": ["Rome"], "ctxs": [{"text": "x", "score": 1}, {"text": "in ROME", "score": 9}]}
{"question": "q", "answers": ["19\\d\\d"], "ctxs": [{"text": "1987", "title": "Rome"}, {"text": "19\\d\\d"}, {"text": ""}]}
{"question": "q", "answers": [], "ctxs": [{"text": "Rome"}]}
{"question": "q", "answers": ["", "z"], "ctxs": [{"text": "Rome"}]}
{"question": "q", "answers": ["Rome"], "ctxs": []}
"#;
    let found = count(text, AnswerMode::Words).unwrap();
    let first: Vec<(&str, Option<usize>)> =
        found.first.iter().map(|(id, rank)| (id.as_str(), *rank)).collect();
    assert_eq!(first, [("a", Some(2)), ("1", Some(2)), ("2", None), ("3", Some(1)), ("4", None)]);
    assert_eq!((found.depth, found.fewer, found.without_answers, found.with_empty_answers), (3, 4, 1, 1));
    assert_eq!(found.counts(), [1, 3, 3]);
    assert_eq!(found.figures(&[1, 2]).means(), [0.2, 0.6]);
    let patterns = count(text, AnswerMode::Regex).unwrap();
    assert_eq!((patterns.first[1].1, patterns.with_empty_answers), (Some(1), 1));

    let error = count(&text.replace("19\\\\d", "(19"), AnswerMode::Regex).unwrap_err();
    assert!(error.contains("retrieved.jsonl, line 2") && error.contains("regular expression"), "{error}");
    let error = count("{\"question\": \"q\", \"answers\": [\"a\"]}\n", AnswerMode::Words).unwrap_err();
    assert!(error.contains("no question has passages"), "{error}");
}
