//! Pickles that must be read, and hostile ones that must not.

use proptest::prelude::*;

use super::*;

/// `{"w": tensor}` as torch writes it: a view of 2 x 3 elements of storage "0".
fn tensor_pickle(offset: u8, shape: &[u8], strides: &[i32]) -> Vec<u8> {
    let mut p =
        b"\x80\x02}q\x00X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
            .to_vec();
    p.extend(b"ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ");
    p.extend([b'K', offset, b'(']);
    p.extend(shape.iter().flat_map(|&n| [b'K', n]));
    p.extend(b"t(");
    for stride in strides {
        p.push(b'J');
        p.extend(stride.to_le_bytes());
    }
    p.extend(b"t\x89ccollections\nOrderedDict\n)RtRs.");
    p
}

fn refused(bytes: &[u8]) -> String {
    match Pickle::load(bytes) {
        Err(PickleError::Refused { global, .. }) => global,
        other => panic!("expected a refusal, found {other:?}"),
    }
}

fn invalid(bytes: &[u8]) -> String {
    match Pickle::load(bytes) {
        Err(PickleError::Invalid { what, .. }) => what,
        other => panic!("expected an error, found {other:?}"),
    }
}

#[test]
fn a_dict_of_tensors_is_read() {
    let bytes = tensor_pickle(1, &[2, 3], &[3, 1]);
    let pickle = Pickle::load(&bytes).unwrap();
    let storage = StorageRef { key: "0", dtype: Dtype::F32, numel: 6 };
    let expected = TensorRef { storage, offset: 1, shape: vec![2, 3], strides: vec![3, 1] };
    assert_eq!(pickle.tensors().unwrap(), [("w", &expected)]);
    assert_eq!(pickle.consumed, bytes.len());
}

#[test]
fn code_is_refused_by_name() {
    assert_eq!(refused(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "os.system");
    assert_eq!(refused(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R."), "builtins.eval");
    assert_eq!(refused(b"(ios\nsystem\n."), "os.system");
    assert_eq!(refused(b"ctorch\nload\n."), "torch.load");
    // A dotted name reaches attributes of a harmless class in the real machine.
    assert_eq!(
        refused(b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93."),
        "collections.OrderedDict.__init__"
    );
}

#[test]
fn only_known_globals_are_called() {
    assert!(invalid(b"ctorch\nFloatStorage\n)R.").contains("a call of torch.FloatStorage"));
    assert!(invalid(b"K\x01)R.").contains("a call of an integer"));
    assert!(invalid(b"ccollections\nOrderedDict\n)\x81.").contains("0x81"));
    assert!(invalid(b"ccollections\nOrderedDict\n}b.").contains("the state of a class or function"));
    assert!(invalid(b"\x82\x01.").contains("0x82"));
}

#[test]
fn hostile_numbers_are_errors() {
    assert!(invalid(&tensor_pickle(0, &[2, 3], &[-3, 1])).contains("strides -3"));
    assert!(invalid(&tensor_pickle(0, &[2, 3], &[1])).contains("with strides"));
    assert!(invalid(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffx.").contains("cut off"));
    assert!(invalid(b"j\x05\x00\x00\x00.").contains("never stored"));
    assert!(invalid(b"\x80\x09.").contains("protocol 9"));
    assert!(invalid(b"(K\x01d.").contains("key without its value"));
    assert!(invalid(b"X\x01\x00\x00\x00\xff.").contains("UTF-8"));
    assert!(invalid(b"t.").contains("mark"));
    assert!(invalid(b".").contains("never put"));
}

#[test]
fn deep_nesting_and_floods_end_in_an_error() {
    let mut nested = vec![b']'; 300_000];
    nested.extend(vec![b'a'; 299_999]);
    nested.push(b'.');
    assert_eq!(
        Pickle::load(&nested).unwrap().tensors().unwrap_err(),
        "expected a dict of tensors, found a list"
    );
    let mut tuples = vec![b')'];
    tuples.extend(vec![0x85; 300_000]);
    tuples.push(b'.');
    Pickle::load(&tuples).unwrap();
    assert!(invalid(&vec![b'N'; MAX_VALUES + 1]).contains("more than"));
    assert!(invalid(&vec![b'('; MAX_VALUES + 1]).contains("more than"));
}

#[test]
fn a_long_list_cannot_be_copied_again_and_again() {
    // 2,000 pairs, of which an OrderedDict is made 2,000 times.
    let mut bytes = b"ccollections\nOrderedDict\nq\x000](".to_vec();
    bytes.extend(b"NN\x86".repeat(2000));
    bytes.extend(b"e\x85q\x01");
    bytes.extend(b"h\x00h\x01R0".repeat(2000));
    assert!(invalid(&bytes).contains("calls that copy more than"));
    let mut memos = b"N".to_vec();
    memos.extend(vec![0x94; MAX_VALUES + 1]);
    assert!(invalid(&memos).contains("stored values"));
}

#[test]
fn a_list_that_holds_itself_is_harmless() {
    assert!(Pickle::load(b"]q\x00h\x00a.").unwrap().as_strings().is_none());
}

#[test]
fn other_contents_are_named() {
    let error = |bytes: &[u8]| Pickle::load(bytes).unwrap().tensors().unwrap_err();
    assert!(error(b"}X\x05\x00\x00\x00modelccollections\nOrderedDict\n)Rs.").contains("under `model`"));
    assert!(error(b"}X\x04\x00\x00\x00stepK\x05s.").contains("`step`, found an integer"));
    assert!(error(b"}K\x01K\x05s.").contains("as a key"));
}

#[test]
fn every_prefix_is_an_error() {
    let bytes = tensor_pickle(0, &[2, 3], &[3, 1]);
    for n in 0..bytes.len() {
        assert!(Pickle::load(&bytes[..n]).is_err(), "{n}");
    }
}

proptest! {
    #[test]
    fn damage_never_panics(position in 0usize..200, value: u8) {
        let mut bytes = tensor_pickle(0, &[2, 3], &[3, 1]);
        let n = bytes.len();
        bytes[position % n] = value;
        if let Ok(pickle) = Pickle::load(&bytes) {
            let _ = pickle.tensors();
        }
    }

    #[test]
    fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Pickle::load(&bytes);
    }
}
