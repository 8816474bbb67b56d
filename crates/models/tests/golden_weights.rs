//! Stored models of other libraries: what we read is what the safetensors crate reads, and a checkpoint with FiD's key
//! names becomes the same model as its Hugging Face folder.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::path::PathBuf;

use golden_folder::golden_folder;
use safetensors::SafeTensors;
use tercio_models::folder::ModelFolder;
use tercio_models::weights::WeightsReader;
use tercio_models::weights::fid_layout::{CROSS_ATTENTION_BIAS, normalize, to_fid};

/// Cases of the reader, in a fixed order.
fn cases(with: &str) -> Vec<PathBuf> {
    let golden = golden_folder();
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&golden)
        .unwrap_or_else(|e| panic!("{}: {e}", golden.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|case| {
            case.file_name().unwrap().to_str().unwrap().starts_with("fid_reader") && case.join(with).is_dir()
        })
        .collect();
    cases.sort();
    assert!(!cases.is_empty(), "no reader case with {with} in {}", golden.display());
    cases
}

fn open(folder: PathBuf) -> WeightsReader {
    ModelFolder::open(folder.to_str().unwrap()).unwrap().weights().unwrap()
}

fn json(path: PathBuf) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn golden_safetensors_are_read_as_the_crate_reads_them() {
    for case in cases("model") {
        let bytes = std::fs::read(case.join("model/model.safetensors")).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        let mut ours = open(case.join("model"));
        let mut names = theirs.names();
        names.sort_unstable();
        assert_eq!(ours.names().collect::<Vec<_>>(), names);
        for name in names {
            let view = theirs.tensor(name).unwrap();
            assert_eq!(view.dtype(), safetensors::Dtype::F32);
            let expected: Vec<u32> =
                view.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            assert_eq!(ours.shape(name).unwrap(), view.shape());
            assert!(bits(&ours.read(name).unwrap()) == expected, "{name}");
        }
        // A folder that Hugging Face wrote has an output layer of its own exactly where it is not tied.
        let head = ours.contains("lm_head.weight");
        let layout = normalize(&mut ours).unwrap();
        assert_eq!((layout.tied, layout.fid, layout.cross_attention_bias), (!head, false, false));
    }
}

#[test]
fn golden_fid_layout_is_the_same_model_with_one_more_table() {
    for case in cases("model_fid_layout") {
        let mut fid = open(case.join("model_fid_layout"));
        let expected = json(case.join("expected.json"));
        let mut keys: Vec<&str> = expected["legacy"]["state_dict_keys"]
            .as_array()
            .unwrap()
            .iter()
            .map(|k| k.as_str().unwrap())
            .collect();
        keys.sort_unstable();
        assert_eq!(fid.names().collect::<Vec<_>>(), keys);

        let mut plain = open(case.join("model"));
        let plain_layout = normalize(&mut plain).unwrap();
        let layout = normalize(&mut fid).unwrap();
        assert_eq!((layout.tied, layout.fid, layout.cross_attention_bias), (plain_layout.tied, true, true));

        let mut names: Vec<&str> = plain.names().collect();
        names.push(CROSS_ATTENTION_BIAS);
        names.sort_unstable();
        assert_eq!(fid.names().collect::<Vec<_>>(), names);
        // The numbers are those of `model`, or those after the trajectory, of which there are [sum, sum of squares]:
        // of all parameters one or the other.
        let (mut as_before, mut as_after) = (true, true);
        for name in plain.names() {
            assert_eq!(fid.shape(name).unwrap(), plain.shape(name).unwrap());
            assert!(keys.contains(&to_fid(name).as_str()), "{name}");
            let values = fid.read(name).unwrap();
            as_before &= bits(&values) == bits(&plain.read(name).unwrap());
            let after = &expected["trajectory"]["parameters_after"][name];
            let (sum, squares) =
                values.iter().fold((0.0, 0.0), |(s, q), &v| (s + f64::from(v), q + f64::from(v).powi(2)));
            let close =
                |found: f64, i: usize| (found - after[i].as_f64().unwrap()).abs() <= 1e-6 * squares.max(1.0);
            as_after &= close(sum, 0) && close(squares, 1);
        }
        assert!(as_before || as_after, "{}: the numbers are neither", case.display());
        let config = json(case.join("model_fid_layout/config.json"));
        let size = |key: &str| config[key].as_u64().unwrap() as usize;
        let table = [size("relative_attention_num_buckets"), size("num_heads")];
        assert_eq!(fid.shape(CROSS_ATTENTION_BIAS).unwrap(), table);
        assert!(fid.read(CROSS_ATTENTION_BIAS).unwrap().iter().all(|v| v.is_finite()));
    }
}
