//! A pickle machine that can build tensors (or numpy's arrays) and nothing else.
//!
//! A Python pickle is a program; the real machine may import and call anything. This one knows the operations that
//! `torch.save` emits for a dict of tensors and the few globals in [`Global`]; anything else is refused before it could
//! mean something. Values live in one flat list and refer to each other by index, so deep nesting cannot exhaust the
//! stack, and one operation adds at most one value, so memory is bounded by the length of the pickle.

use super::file::Dtype;

mod calls;
mod machine;
mod numpy;
mod skeleton;
#[cfg(test)]
mod tests;

use machine::Machine;

pub use numpy::PickledVectors;

/// No dict of tensors comes near this many bytes of pickle.
pub(super) const MAX_PICKLE: u64 = 16 << 20;

/// Bounds the memory of a pickle that is made of one-byte operations.
const MAX_VALUES: usize = 1 << 20;

/// Why a pickle was not read, and at which byte of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// It names an object that is not needed for tensors.
    Refused { global: String, position: usize },
    /// It is cut off, damaged, or says something that a dict of tensors never says.
    Invalid { what: String, position: usize },
}

/// What a pickle may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// A dict of tensors.
    Tensors,
    /// Lists of ids and numpy's arrays.
    Arrays,
}

impl Content {
    /// Bounds the memory of a pickle that is made of one-byte operations.
    fn most_values(self) -> usize {
        match self {
            Content::Tensors => MAX_VALUES,
            Content::Arrays => numpy::MAX_VALUES,
        }
    }
    fn name(self) -> &'static str {
        match self {
            Content::Tensors => "dict of tensors",
            Content::Arrays => "list of ids and vectors",
        }
    }
}

/// The Python objects that may be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Global {
    /// `numpy.core.multiarray._reconstruct`
    Reconstruct,
    /// `numpy.core.numeric._frombuffer`
    FromBuffer,
    NdArray,
    NumpyDtype,
    RebuildTensor,
    RebuildParameter,
    OrderedDict,
    /// `torch.FloatStorage` and so on; index into [`STORAGES`].
    Storage(usize),
}

/// Class names of `torch` storages, and safetensors' name of the format.
const STORAGES: [(&str, &str); 10] = [
    ("FloatStorage", "F32"),
    ("DoubleStorage", "F64"),
    ("HalfStorage", "F16"),
    ("BFloat16Storage", "BF16"),
    ("LongStorage", "I64"),
    ("IntStorage", "I32"),
    ("ShortStorage", "I16"),
    ("CharStorage", "I8"),
    ("ByteStorage", "U8"),
    ("BoolStorage", "BOOL"),
];

/// Index of a value.
type Id = usize;

/// A value of the machine. Text stays in the pickle.
#[derive(Debug, Clone)]
enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, little-endian two's complement.
    Long(&'a [u8]),
    Float,
    Str(&'a str),
    Bytes(&'a [u8]),
    /// A numpy format; `None` for those that are no float.
    Format(Option<Dtype>),
    /// An array, once its state is set.
    Array(Option<ArrayRef<'a>>),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(StorageRef<'a>),
    Tensor(TensorRef<'a>),
}

/// A storage that the archive holds under `key`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StorageRef<'a> {
    pub key: &'a str,
    pub dtype: Dtype,
    /// Elements.
    pub numel: usize,
}

/// A numpy array: its numbers, row-major, are named by `bytes`. Nothing is checked against them yet.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ArrayRef<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

/// A view of a storage. Nothing is checked against the storage's size yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorRef<'a> {
    pub storage: StorageRef<'a>,
    /// Elements before the first.
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// What one pickle builds, and how many bytes it took.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    top: Id,
    pub consumed: usize,
}

impl<'a> Pickle<'a> {
    /// Runs the pickle at the start of `bytes`.
    pub fn load(bytes: &'a [u8]) -> Result<Self, PickleError> {
        Self::load_content(bytes, Content::Tensors)
    }

    fn load_content(bytes: &'a [u8], content: Content) -> Result<Self, PickleError> {
        let mut machine = Machine::new(bytes, content);
        let top = machine.run()?;
        Ok(Self { values: machine.values, top, consumed: machine.at })
    }

    /// The whole pickle as an integer of 64 bits.
    pub fn as_int(&self) -> Option<i64> {
        match self.values[self.top] {
            Value::Int(i) => Some(i),
            _ => None,
        }
    }

    /// The whole pickle as a longer integer, little-endian.
    pub fn as_long(&self) -> Option<&'a [u8]> {
        match self.values[self.top] {
            Value::Long(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The whole pickle as a list of strings.
    pub fn as_strings(&self) -> Option<Vec<&'a str>> {
        let Value::List(items) = &self.values[self.top] else {
            return None;
        };
        items.iter().map(|&id| if let Value::Str(s) = self.values[id] { Some(s) } else { None }).collect()
    }

    /// A boolean under `name`, where the whole pickle is a dict.
    pub fn dict_bool(&self, name: &str) -> Option<bool> {
        let Value::Dict(pairs) = &self.values[self.top] else {
            return None;
        };
        pairs.iter().find_map(|&(key, value)| match (&self.values[key], &self.values[value]) {
            (Value::Str(key), Value::Bool(value)) if *key == name => Some(*value),
            _ => None,
        })
    }

    /// The whole pickle as a dict of tensors, in file order.
    ///
    /// # Errors
    /// A sentence on what is not a tensor.
    pub fn tensors(&self) -> Result<Vec<(&'a str, &TensorRef<'a>)>, String> {
        let Value::Dict(pairs) = &self.values[self.top] else {
            return Err(format!("expected a dict of tensors, found {}", self.values[self.top].kind()));
        };
        let mut tensors = Vec::with_capacity(pairs.len());
        for &(key, value) in pairs {
            match (&self.values[key], &self.values[value]) {
                (Value::Str(name), Value::Tensor(tensor)) => tensors.push((*name, tensor)),
                (Value::Str(name), Value::Dict(_)) => {
                    return Err(format!(
                        "expected a flat dict of tensors, found a dict inside it under `{name}`; \
                         save that part alone"
                    ));
                }
                (Value::Str(name), other) => {
                    return Err(format!("expected a tensor under `{name}`, found {}", other.kind()));
                }
                (other, _) => {
                    return Err(format!("expected names of tensors, found {} as a key", other.kind()));
                }
            }
        }
        Ok(tensors)
    }
}

impl Value<'_> {
    /// What a call copies of it.
    fn elements(&self) -> usize {
        match self {
            Value::Tuple(items) | Value::List(items) => items.len(),
            Value::Tensor(tensor) => tensor.shape.len(),
            Value::Array(Some(array)) => array.shape.len(),
            _ => 0,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Long(_) => "an integer",
            Value::Float => "a float",
            Value::Str(_) => "a string",
            Value::Bytes(_) => "bytes",
            Value::Format(_) => "a number format",
            Value::Array(_) => "an array",
            Value::Tuple(_) => "a tuple",
            Value::List(_) => "a list",
            Value::Dict(_) => "a dict",
            Value::Global(_) => "a class or function",
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
        }
    }
}
