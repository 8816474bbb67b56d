//! Vectors that other programs pickled: Fusion-in-Decoder's `(list of ids, array)`, DPR's `[(id, vector), ...]`.
//!
//! Only the skeleton of the pickle is run; numbers stay in the file and are read where they lie.

use std::path::Path;

use super::machine::{Machine, Step};
use super::{ArrayRef, Content, Global, Id, Pickle, PickleError, Value, skeleton};
use crate::weights::file::{DataFile, Dtype};
use crate::weights::{Result, WeightsError};

/// Bounds the memory of a pickle that is made of one-byte operations. DPR's form has a dozen values a vector.
pub(super) const MAX_VALUES: usize = 1 << 28;
/// Bytes read at a time.
const CHUNK: usize = 4 << 20;

/// A pickle of vectors, open for reading.
#[derive(Debug)]
pub struct PickledVectors {
    file: DataFile,
    ids: Vec<Box<str>>,
    dimension: usize,
    dtype: Dtype,
    /// Where the rows lie: one place for each, or that of the first of a matrix.
    starts: Vec<u64>,
}

impl PickledVectors {
    /// Opens a pickle. Nothing of it is run as Python would: what is not a list, a tuple, a text, a number or an array is
    /// refused by name.
    ///
    /// # Errors
    /// A file that cannot be read, is no such pickle, or contradicts itself.
    pub fn open(path: &Path) -> Result<PickledVectors> {
        let file = DataFile::open(path)?;
        let bytes = skeleton::read(&file.file).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                WeightsError::invalid(path, "the pickle ends too early; the file was cut short, get it again")
            }
            std::io::ErrorKind::InvalidData => {
                WeightsError::invalid(path, format!("expected a pickle of ids and vectors, found {e}"))
            }
            _ => WeightsError::io(path, "read", e),
        })?;
        let pickle = Pickle::load_content(&bytes, Content::Arrays).map_err(|e| match e {
            PickleError::Refused { global, position } => {
                WeightsError::Refused { path: path.to_owned(), global, position }
            }
            PickleError::Invalid { what, .. } => {
                WeightsError::invalid(path, format!("expected a pickle of ids and vectors, found {what}"))
            }
        })?;
        let (ids, dimension, dtype, starts) =
            form(&pickle).map_err(|what| WeightsError::invalid(path, what))?;
        Ok(PickledVectors { file, ids, dimension, dtype, starts })
    }

    /// How many vectors there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Numbers of a vector.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The format of the numbers.
    pub fn dtype(&self) -> &Dtype {
        &self.dtype
    }

    /// The id of a vector.
    pub fn id(&self, row: usize) -> &str {
        &self.ids[row]
    }

    /// Reads the rows from `start` on; `out` holds whole rows.
    ///
    /// # Errors
    /// Rows that are not there, a file that cannot be read.
    pub fn rows(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let path = &self.file.path;
        let count = out.len() / self.dimension;
        if !out.len().is_multiple_of(self.dimension)
            || start.checked_add(count).is_none_or(|end| end > self.len())
        {
            let what = format!("has {} vectors, {count} from {start} on were asked for", self.len());
            return Err(WeightsError::invalid(path, what));
        }
        let width = self.dtype.size().unwrap_or(4);
        let row = self.dimension * width;
        let mut bytes = Vec::new();
        // A matrix in pieces, single vectors one by one.
        let step = if self.starts.len() == 1 { (CHUNK / row).max(1) } else { 1 };
        for (k, part) in out.chunks_mut(step * self.dimension).enumerate() {
            let first = start + k * step;
            let at = if self.starts.len() == 1 {
                self.starts[0] + first as u64 * row as u64
            } else {
                self.starts[first]
            };
            bytes.resize(part.len() * width, 0);
            self.file.read_at(at, &mut bytes)?;
            self.dtype.decode(&bytes, part).map_err(|what| WeightsError::invalid(path, what))?;
        }
        Ok(())
    }
}

/// Ids, dimension, format and places of the rows.
fn form(pickle: &Pickle<'_>) -> std::result::Result<(Vec<Box<str>>, usize, Dtype, Vec<u64>), String> {
    let values = &pickle.values;
    match &values[pickle.top] {
        Value::Tuple(pair) | Value::List(pair) if is_matrix_form(values, pair) => {
            let [ids, array] = pair[..] else { return Err("expected ids and an array".into()) };
            let (Value::List(ids), Value::Array(Some(array))) = (&values[ids], &values[array]) else {
                return Err("expected ids and an array".into());
            };
            let ids = ids.iter().map(|&id| id_of(&values[id])).collect::<std::result::Result<Vec<_>, _>>()?;
            let [rows, dimension] = array.shape[..] else {
                return Err(format!("expected an array of 2 axes, found the shape {:?}", array.shape));
            };
            if rows != ids.len() {
                return Err(format!("expected as many rows as the {} ids, found {rows}", ids.len()));
            }
            let start = place(array)?;
            Ok((ids, checked(dimension)?, array.dtype.clone(), vec![start]))
        }
        Value::List(pairs) => {
            let (mut ids, mut starts) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
            let mut first: Option<&ArrayRef> = None;
            for (k, &pair) in pairs.iter().enumerate() {
                // DPR's newer files have more behind the vector.
                let (Value::Tuple(pair) | Value::List(pair)) = &values[pair] else {
                    return Err(format!(
                        "expected (id, vector) as element {k}, found {}",
                        values[pair].kind()
                    ));
                };
                let [id, array, ..] = pair[..] else {
                    return Err(format!("expected (id, vector) as element {k}, found {} values", pair.len()));
                };
                let Value::Array(Some(array)) = &values[array] else {
                    return Err(format!("expected a vector in element {k}, found {}", values[array].kind()));
                };
                let first = *first.get_or_insert(array);
                if (&array.shape, &array.dtype) != (&first.shape, &first.dtype) {
                    return Err(format!(
                        "element {k} has the shape {:?}, the first {:?}",
                        array.shape, first.shape
                    ));
                }
                ids.push(id_of(&values[id])?);
                starts.push(place(array)?);
            }
            let first = first.ok_or("expected vectors, found an empty list")?;
            match first.shape[..] {
                [dimension] | [1, dimension] => Ok((ids, checked(dimension)?, first.dtype.clone(), starts)),
                _ => Err(format!("expected vectors, found arrays of the shape {:?}", first.shape)),
            }
        }
        other => Err(format!("expected (ids, array) or a list of (id, vector), found {}", other.kind())),
    }
}

/// Whether a pair is ids and one array, and not two pairs of DPR's form.
fn is_matrix_form(values: &[Value<'_>], pair: &[Id]) -> bool {
    matches!(pair, [ids, array] if matches!((&values[*ids], &values[*array]), (Value::List(_), Value::Array(_))))
}

fn checked(dimension: usize) -> std::result::Result<usize, String> {
    match dimension {
        1..=65536 => Ok(dimension),
        _ => Err(format!("expected vectors of 1 to 65536 numbers, found {dimension}")),
    }
}

fn id_of(value: &Value<'_>) -> std::result::Result<Box<str>, String> {
    match value {
        Value::Str(id) => Ok((*id).into()),
        Value::Int(id) => Ok(id.to_string().into()),
        other => Err(format!("expected an id, found {}", other.kind())),
    }
}

/// Where an array's numbers begin in the file; their bytes are as many as the shape says.
fn place(array: &ArrayRef<'_>) -> std::result::Result<u64, String> {
    let word = |k: usize| array.bytes.get(k * 8..k * 8 + 8)?.try_into().ok().map(u64::from_le_bytes);
    let (Some(start), Some(length), 16) = (word(0), word(1), array.bytes.len()) else {
        return Err("expected the numbers of an array as bytes, found another form".into());
    };
    let size = array.dtype.size().ok_or("expected floats")?;
    let expected = array.shape.iter().try_fold(size as u64, |n, &axis| n.checked_mul(axis as u64));
    if expected != Some(length) {
        return Err(format!("an array of the shape {:?} has {length} bytes", array.shape));
    }
    Ok(start)
}

impl<'a> Machine<'a> {
    /// numpy 1 says `numpy.core`, numpy 2 `numpy._core`.
    pub(super) fn array_global(&self, module: &str, name: &str) -> Step<Global> {
        match (module, name) {
            ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => Ok(Global::Reconstruct),
            ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer") => Ok(Global::FromBuffer),
            ("numpy", "ndarray") => Ok(Global::NdArray),
            ("numpy", "dtype") => Ok(Global::NumpyDtype),
            ("_codecs", "encode") => {
                self.invalid("arrays of pickle protocol 2 or older; write the file again with protocol 4")
            }
            _ => self.refuse(format!("{module}.{name}")),
        }
    }

    pub(super) fn array_call(&self, global: Global, args: &[&Value<'a>]) -> Step<Value<'a>> {
        match (global, args) {
            // The empty array of which the state is set next.
            (Global::Reconstruct, [Value::Global(Global::NdArray), Value::Tuple(_), Value::Bytes(_)]) => {
                Ok(Value::Array(None))
            }
            (Global::NumpyDtype, [Value::Str(name), ..]) if args.len() <= 3 => {
                Ok(Value::Format(match *name {
                    "f2" => Some(Dtype::F16),
                    "f4" => Some(Dtype::F32),
                    "f8" => Some(Dtype::F64),
                    _ => None,
                }))
            }
            (Global::FromBuffer, [Value::Bytes(bytes), format, Value::Tuple(shape), Value::Str(order)]) => {
                let dtype = self.float(format)?;
                let shape = self.counts(shape, "shape")?;
                if *order != "C" {
                    return self.invalid("an array whose columns come first; save it row by row");
                }
                Ok(Value::Array(Some(ArrayRef { dtype, shape, bytes })))
            }
            _ => self.invalid("an array built from other arguments than numpy gives"),
        }
    }

    /// Sets the state of an array or of a number format.
    pub(super) fn build_array(&mut self, target: Id, state: Id) -> Step<()> {
        let Value::Tuple(state) = &self.values[state] else {
            return self.invalid(format!("a state that is {}", self.values[state].kind()));
        };
        let state: Vec<&Value> = state.iter().take(6).map(|&id| &self.values[id]).collect();
        match (&self.values[target], &state[..]) {
            (Value::Format(_), [_, Value::Str(order), ..]) => match *order {
                // Little-endian, as this machine is, or of one byte.
                "<" | "=" | "|" => Ok(()),
                other => self.invalid(format!("numbers in the byte order {other:?}; expected little-endian")),
            },
            (
                Value::Array(_),
                [Value::Int(_), Value::Tuple(shape), format, Value::Bool(by_columns), Value::Bytes(bytes)],
            ) => {
                let dtype = self.float(format)?;
                let shape = self.counts(shape, "shape")?;
                if *by_columns && shape.len() > 1 {
                    return self.invalid("an array whose columns come first; save it row by row");
                }
                let array = ArrayRef { dtype, shape, bytes };
                self.values[target] = Value::Array(Some(array));
                Ok(())
            }
            (other, _) => self.invalid(format!("a state of {}", other.kind())),
        }
    }

    fn float(&self, format: &Value<'a>) -> Step<Dtype> {
        match format {
            Value::Format(Some(dtype)) => Ok(dtype.clone()),
            Value::Format(None) => self.invalid("an array of other numbers than floats"),
            other => self.invalid(format!("an array whose format is {}", other.kind())),
        }
    }
}
