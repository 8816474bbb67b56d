//! ColBERT against values that PyLate computed: vectors of queries and documents, scores, pooled vectors, score functions on made
//! vectors; PyLate's folder in and out.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use golden_folder::golden_folder;
use safetensors::SafeTensors;
use serde_json::Value;
use tercio_engine::{Arena, Cpu, Device, Layout, MaxSimShape, Reference, Span, Tape, Tensor};
use tercio_models::colbert::{LoadedColbert, TokenRows, pooling};
use tercio_models::folder::ModelFolder;

struct Case {
    folder: PathBuf,
    input: Value,
    expected: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

fn case() -> Case {
    let folder = golden_folder().join("colbert");
    let json = |name: &str| serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let values = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect();
    let tensors = tensors.tensors();
    let tensors = tensors.iter().map(|(n, v)| (n.clone(), (v.shape().to_vec(), values(v.data())))).collect();
    Case { input: json("input.json"), expected: json("expected.json"), tensors, folder }
}

fn rows(value: &Value) -> Vec<Vec<u32>> {
    let row = |v: &Value| v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(row).collect()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{what}[{i}]: expected {e}, found {f}");
    }
}

/// Texts packed: all tokens of queries with expansion (`whole`), else those that are attended to; of documents those that no skip list
/// has get a vector.
struct Packed {
    ids: Vec<u32>,
    spans: Vec<Span>,
    keys: Vec<Span>,
    kept: Vec<u32>,
    /// Where the kept rows of each text lie among all kept ones.
    vectors: Vec<Span>,
}

fn pack(tokens: &Value, whole: bool, skipped: &[u32]) -> Packed {
    let mut p = Packed { ids: vec![], spans: vec![], keys: vec![], kept: vec![], vectors: vec![] };
    for (ids, mask) in rows(&tokens["input_ids"]).into_iter().zip(rows(&tokens["attention_mask"])) {
        let (start, first) = (p.ids.len() as u32, p.kept.len() as u32);
        let real = mask.iter().filter(|&&m| m == 1).count();
        assert!(mask[..real].iter().all(|&m| m == 1), "the real tokens are the first ones");
        p.ids.extend(&ids[..if whole { ids.len() } else { real }]);
        p.spans.push(Span { start, end: p.ids.len() as u32 });
        p.keys.push(Span { start, end: start + real as u32 });
        let kept = (start..p.ids.len() as u32).filter(|&i| !skipped.contains(&p.ids[i as usize]));
        p.kept.extend(kept);
        p.vectors.push(Span { start: first, end: p.kept.len() as u32 });
    }
    p
}

fn embed<D: Device>(device: &D, loaded: &LoadedColbert<D>, p: &Packed) -> Vec<f64> {
    device.run(|| {
        let mut tape = Tape::inference(device, &loaded.parameters);
        let texts = TokenRows { ids: &p.ids, spans: &p.spans, keys: &p.keys, kept: &p.kept };
        let vectors = loaded.model.embed(&mut tape, texts, false);
        device.read_f64(vectors.tensor.view())
    })
}

/// Scores of all pairs of queries and documents.
fn scores<D: Device>(device: &D, width: usize, q: (&[f64], &[Span]), d: (&[f64], &[Span])) -> Vec<f64> {
    let shape = MaxSimShape::all(q.1.to_vec(), d.1.to_vec());
    max_sim(device, width, q.0, d.0, shape)
}

fn max_sim<D: Device>(device: &D, width: usize, q: &[f64], d: &[f64], shape: MaxSimShape) -> Vec<f64> {
    device.run(|| {
        let parameters = Arena::zeros(device, &Layout::default());
        let mut tape = Tape::inference(device, &parameters);
        let mut tensor = |x: &[f64]| {
            let values: Vec<f32> = x.iter().map(|&v| v as f32).collect();
            tape.input(Tensor::from_values(device, x.len() / width, width, &values))
        };
        let (q, d) = (tensor(q), tensor(d));
        let scores = tape.max_sim(&q, &d, &Rc::new(shape));
        device.read_f64(scores.tensor.view())
    })
}

impl Case {
    fn open<D: Device>(&self, device: &D) -> LoadedColbert<D> {
        let folder = ModelFolder::open(self.folder.join("model").to_str().unwrap()).unwrap();
        LoadedColbert::open(&folder, device).unwrap()
    }
    fn tensor(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }
    fn skipped(&self) -> Vec<u32> {
        let ids = self.expected["tokens"]["skiplist_ids"].as_array().unwrap();
        ids.iter().map(|n| n.as_u64().unwrap() as u32).collect()
    }
    fn packed(&self, name: &str) -> Packed {
        let skipped = if name == "documents" { self.skipped() } else { Vec::new() };
        pack(&self.expected["tokens"][name], name == "queries_expansion", &skipped)
    }
}

fn vectors_and_scores<D: Device>(device: &D) {
    let case = case();
    let loaded = case.open(device);
    let width = loaded.model.dimension();
    let mut all = BTreeMap::new();
    for name in ["queries_expansion", "queries_no_expansion", "documents"] {
        let packed = case.packed(name);
        let vectors = embed(device, &loaded, &packed);
        for (i, span) in packed.vectors.iter().enumerate() {
            let own = &vectors[span.start as usize * width..span.end as usize * width];
            let stored = format!("{name}/{i}");
            assert_eq!(case.tensors[&stored].0, [span.len(), width], "{stored}");
            assert_close(own, case.tensor(&stored), &format!("{stored} on {}", device.name()));
        }
        all.insert(name, (vectors, packed.vectors));
    }
    let (documents, spans) = &all["documents"];
    for (queries, stored) in
        [("queries_expansion", "scores_exact"), ("queries_no_expansion", "scores_exact_no_expansion")]
    {
        let (vectors, query_spans) = &all[queries];
        let found = scores(device, width, (vectors, query_spans), (documents, spans));
        assert_close(&found, case.tensor(stored), stored);
    }
}

#[test]
fn golden_colbert_vectors_and_scores() {
    vectors_and_scores(&Cpu::new(2).unwrap());
    vectors_and_scores(&Reference);
}

#[test]
fn golden_colbert_pooled_vectors() {
    let case = case();
    let number = |name: &str| case.input[name].as_u64().unwrap() as usize;
    let (factor, keep) = (number("pool_factor"), number("protected_tokens"));
    let count = case.input["documents"].as_array().unwrap().len();
    for i in 0..count {
        let width = case.tensors[&format!("documents/{i}")].0[1];
        let vectors: Vec<f32> = case.tensor(&format!("documents/{i}")).iter().map(|&v| v as f32).collect();
        let pooled = pooling::pool(&vectors, width, factor, keep, false);
        let name = format!("documents_pooled{factor}/{i}");
        // Rows of one document in any order.
        let sorted = |x: &[f64]| {
            let mut rows: Vec<Vec<f64>> = x.chunks(width).map(<[f64]>::to_vec).collect();
            rows.sort_by(|a, b| a[0].total_cmp(&b[0]));
            rows.concat()
        };
        let pooled: Vec<f64> = pooled.iter().map(|&v| f64::from(v)).collect();
        assert_close(&sorted(&pooled), &sorted(case.tensor(&name)), &name);
    }
}

/// PyLate's score functions on made vectors, whose masks multiply: a masked token of a document counts as a product of 0.
fn made_vectors<D: Device>(device: &D) {
    let case = case();
    let shape = |name: &str| case.tensors[&format!("synthetic/{name}")].0.clone();
    let (q, d) = (shape("Q"), shape("D"));
    let width = q[2];
    let tensor = |name: &str| case.tensor(&format!("synthetic/{name}"));
    let spans = |count: usize, len: usize| -> Vec<Span> {
        (0..count as u32).map(|i| Span { start: i * len as u32, end: (i + 1) * len as u32 }).collect()
    };
    let (queries, documents) = (spans(q[0], q[1]), spans(d[0], d[1]));
    let found = scores(device, width, (tensor("Q"), &queries), (tensor("D"), &documents));
    assert_close(&found, tensor("colbert_scores"), "colbert_scores");
    let pairwise = MaxSimShape {
        pairs: (0..q[0] as u32).map(|i| (i, i)).collect(),
        ..MaxSimShape::all(queries.clone(), documents.clone())
    };
    let found = max_sim(device, width, tensor("Q"), tensor("D"), pairwise);
    assert_close(&found, tensor("colbert_scores_pairwise"), "colbert_scores_pairwise");

    // The rows that a mask leaves, and where each text's are.
    let left = |values: &str, mask: &str, len: usize| {
        let (mut kept, mut spans, mut floors) = (Vec::new(), Vec::new(), Vec::new());
        for (rows, mask) in tensor(values).chunks(len * width).zip(tensor(mask).chunks(len)) {
            let start = (kept.len() / width) as u32;
            let real = rows.chunks(width).zip(mask).filter(|(_, m)| **m == 1.0);
            kept.extend(real.flat_map(|(row, _)| row.to_vec()));
            spans.push(Span { start, end: (kept.len() / width) as u32 });
            floors.push(mask.contains(&0.0));
        }
        (kept, spans, floors)
    };
    let (kept_q, spans_q, _) = left("Q", "qmask", q[1]);
    let (kept_d, spans_d, floors) = left("D", "dmask", d[1]);
    assert!(floors.contains(&true));
    let masked = MaxSimShape { floors: floors.clone(), ..MaxSimShape::all(spans_q.clone(), spans_d.clone()) };
    let found = max_sim(device, width, &kept_q, &kept_d, masked.clone());
    assert_close(&found, tensor("colbert_scores_masked"), "colbert_scores_masked");
    let whole = MaxSimShape { floors, ..MaxSimShape::all(queries, spans_d) };
    let found = max_sim(device, width, tensor("Q"), &kept_d, whole);
    assert_close(&found, tensor("colbert_scores_docmask"), "colbert_scores_docmask");
    // Without the floor no masked score is greater, for a maximum over fewer numbers is not.
    let exact = max_sim(device, width, &kept_q, &kept_d, MaxSimShape { floors: vec![], ..masked });
    assert!(exact.iter().zip(tensor("colbert_scores_masked")).all(|(e, f)| *e <= f + 1e-5));
}

#[test]
fn golden_colbert_score_functions() {
    made_vectors(&Cpu::new(1).unwrap());
    made_vectors(&Reference);
}

#[test]
fn golden_colbert_folder_in_and_out() {
    let (case, device) = (case(), Cpu::new(1).unwrap());
    let loaded = case.open(&device);
    let folder = tempfile::tempdir().unwrap();
    loaded.save(folder.path(), &device).unwrap();
    let again =
        LoadedColbert::open(&ModelFolder::open(folder.path().to_str().unwrap()).unwrap(), &device).unwrap();
    assert_eq!(again.model.config, loaded.model.config);
    let packed = case.packed("queries_expansion");
    assert_eq!(embed(&device, &again, &packed), embed(&device, &loaded, &packed));
    // Fields and modules are those of PyLate's own folder.
    for name in ["modules.json", "1_Dense/config.json", "config_sentence_transformers.json"] {
        let read = |folder: &std::path::Path| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
        };
        assert_eq!(read(folder.path()), read(&case.folder.join("model")), "{name}");
    }
}
