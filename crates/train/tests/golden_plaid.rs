//! Late interaction's search against values of PyLate: exact MaxSim of all queries with all documents, and the index, which must find as
//! much of the exact best ten as PLAID does with as many bits. Texts, scores and levels come from the folder that TERCIO_GOLDEN names.

mod golden_support;

use golden_support::{Case, cases_with, list};
use serde_json::Value;
use tercio_data::multi_vectors::TokensInMemory;
use tercio_engine::{Cpu, Device};
use tercio_models::colbert::ColbertHeaders;
use tercio_models::embedding_model::TextKind;
use tercio_models::folder::ModelFolder;
use tercio_search::Hit;
use tercio_search::manifest::Collection;
use tercio_search::max_sim::MaxSim;
use tercio_search::plaid::{PlaidIndex, PlaidOptions, PlaidSearch};
use tercio_train::colbert::{ColbertEncoder, ColbertModel, TokenPooling};

const GO_ON: fn() -> bool = || false;

/// Vectors of the tokens of texts, as PyLate's `encode` is told to make them.
fn encoded(device: &Cpu, case: &Case, texts: &[String], kind: TextKind) -> (usize, Vec<Vec<f32>>) {
    let folder = ModelFolder::open(&case.dir.join("model").to_string_lossy()).unwrap();
    let headers = ColbertHeaders::read(&folder, None).unwrap();
    let model = ColbertModel::read(headers, None, |_| (), None, 0, device).unwrap();
    let tokens = model.tokens().unwrap();
    let loaded = &model.loaded;
    let encoder = ColbertEncoder {
        device,
        model: &loaded.model,
        parameters: &loaded.parameters,
        tokenizer: &model.tokenizer,
        tokens: &tokens,
        kind,
        pooling: TokenPooling::NONE,
        batch_tokens: 4096,
        batch_texts: 32,
        window: 1024,
    };
    let rows = device.run(|| encoder.rows(texts, &GO_ON)).unwrap().unwrap();
    let dimension = loaded.model.dimension();
    let mut rest = &rows.values[..];
    let each = rows.lengths.iter().map(|length| {
        let (own, others) = rest.split_at(*length as usize * dimension);
        rest = others;
        own.to_vec()
    });
    (dimension, each.collect())
}

fn texts(value: &Value) -> Vec<String> {
    list(value).iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

#[test]
fn golden_exact_scores_are_pylates_and_the_index_finds_as_much_as_plaid() {
    for case in cases_with("retrieval_documents") {
        let device = Cpu::new(2).unwrap();
        let documents = case.input["retrieval_documents"].as_object().unwrap();
        let ids: Vec<&String> = documents.keys().collect();
        let document_texts: Vec<String> =
            documents.values().map(|text| text.as_str().unwrap().to_owned()).collect();
        let (dimension, vectors) = encoded(&device, &case, &document_texts, TextKind::Passage);
        // The matrix of scores has the documents in the order of their numbers, not of their names.
        let number =
            |id: &str| id.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().unwrap();
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&i| number(ids[i]));
        let mut all = TokensInMemory::new(dimension);
        order.iter().for_each(|&i| all.push(ids[i], &vectors[i]).unwrap());
        let asked = encoded(&device, &case, &texts(&case.input["retrieval_queries"]), TextKind::Question).1;
        let queries: Vec<&[f32]> = asked.iter().map(Vec::as_slice).collect();

        let exact = MaxSim::load(&device, &all, &GO_ON).unwrap();
        let every = exact.search(&device, &queries, ids.len(), &GO_ON).unwrap();
        let want = case.tensor("retrieval_exact_scores");
        for (q, found) in every.iter().enumerate() {
            assert_eq!(found.len(), ids.len());
            for Hit { row, score } in found {
                let want = want[q * ids.len() + *row as usize];
                assert!(
                    (f64::from(*score) - want).abs() < 2e-5 * want.abs(),
                    "query {q}, row {row}: {score} {want}"
                );
            }
        }
        let retrieval = &case.expected["retrieval"];
        let best: Vec<Vec<String>> = list(&retrieval["exact_top10"]).iter().map(texts).collect();
        let id = |hit: &Hit| ids[order[hit.row as usize]].clone();
        for (q, (found, want)) in every.iter().zip(&best).enumerate() {
            let gap = retrieval["exact_gap_10_11"][q].as_f64().unwrap();
            let (mut found, mut want): (Vec<String>, _) =
                (found[..want.len()].iter().map(id).collect(), want.clone());
            found.sort();
            want.sort();
            assert!(found == want || gap < 1e-5, "query {q}: {found:?} {want:?}");
        }

        for (name, level) in retrieval["plaid"].as_object().unwrap() {
            let bits: usize = name.trim_start_matches("nbits").parse().unwrap();
            let dir = tempfile::tempdir().unwrap();
            let collection =
                Collection { path: "/golden".into(), fingerprint: None, count: ids.len() as u64 };
            let options = PlaidOptions { bits, ..PlaidOptions::default() };
            PlaidIndex::build(&device, &all, collection, dir.path(), &options, &GO_ON, &mut |_| {}).unwrap();
            let index = PlaidIndex::open(dir.path()).unwrap();
            // Lists are looked into, and fewer are scored than there are: 100 of 200.
            let how = PlaidSearch { depth: 10, candidates: 100, ..PlaidSearch::default() };
            let found = index.search(&device, &queries, how, &GO_ON).unwrap();
            let both = |(found, want): (&Vec<Hit>, &Vec<String>)| {
                found.iter().filter(|hit| want.contains(&id(hit))).count() as f64 / want.len() as f64
            };
            let recall = found.iter().zip(&best).map(both).sum::<f64>() / best.len() as f64;
            let level = level["recall_at_10"].as_f64().unwrap();
            println!("{bits} bits: recall@10 {recall:.3}, PLAID's {level:.3}");
            assert!(recall >= level, "{bits} bits: recall@10 {recall}, PLAID has {level}");
        }
    }
}
