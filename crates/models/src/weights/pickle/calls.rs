//! What a pickle may name and call, and what comes of it: dicts and tensors.

use super::machine::{Machine, Step};
use super::{Content, Global, Id, PickleError, STORAGES, StorageRef, TensorRef, Value};
use crate::weights::file::Dtype;

impl<'a> Machine<'a> {
    pub fn refuse<T>(&self, global: String) -> Step<T> {
        Err(PickleError::Refused { global, position: self.start })
    }

    pub fn global(&self, module: &str, name: &str) -> Step<Global> {
        if self.content == Content::Arrays {
            return self.array_global(module, name);
        }
        match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Ok(Global::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Ok(Global::RebuildParameter),
            ("collections", "OrderedDict") => Ok(Global::OrderedDict),
            ("torch", name) => match STORAGES.iter().position(|(class, _)| *class == name) {
                Some(i) => Ok(Global::Storage(i)),
                None => self.refuse(format!("torch.{name}")),
            },
            _ => self.refuse(format!("{module}.{name}")),
        }
    }

    /// Calls one of the known globals.
    pub fn reduce(&mut self) -> Step<()> {
        let (args, callee) = (self.pop()?, self.pop()?);
        let Value::Tuple(args) = &self.values[args] else {
            return self.invalid("a call whose arguments are no tuple");
        };
        // The largest thing that each of the calls below copies.
        let copied = args.iter().take(8).map(|&id| self.values[id].elements()).max().unwrap_or(0);
        let args: Vec<Id> = args.iter().take(8).copied().collect();
        self.copy(copied)?;
        let args: Vec<&Value> = args.iter().map(|&id| &self.values[id]).collect();
        let result = match &self.values[callee] {
            Value::Global(Global::OrderedDict) => match args.as_slice() {
                [] => Value::Dict(Vec::new()),
                [Value::List(items)] => {
                    let mut pairs = Vec::new();
                    for &item in items {
                        let (Value::Tuple(pair) | Value::List(pair)) = &self.values[item] else {
                            return self.invalid(format!("an OrderedDict of {}", self.values[item].kind()));
                        };
                        let [key, value] = pair[..] else {
                            return self.invalid(format!("a pair of {} values", pair.len()));
                        };
                        pairs.push((key, value));
                    }
                    Value::Dict(pairs)
                }
                _ => return self.invalid("an OrderedDict of something else than pairs"),
            },
            Value::Global(Global::RebuildTensor) => match args.as_slice() {
                [
                    Value::Storage(storage),
                    Value::Int(offset),
                    Value::Tuple(shape),
                    Value::Tuple(strides),
                    ..,
                ] if (5..=7).contains(&args.len()) => {
                    let (offset, shape) = (self.count(*offset, "offset")?, self.counts(shape, "shape")?);
                    let strides = self.counts(strides, "strides")?;
                    if shape.len() != strides.len() {
                        return self.invalid(format!("shape {shape:?} with strides {strides:?}"));
                    }
                    Value::Tensor(TensorRef { storage: storage.clone(), offset, shape, strides })
                }
                _ => {
                    return self.invalid(
                        "a tensor built from other arguments than storage, offset, shape, strides, ...",
                    );
                }
            },
            Value::Global(Global::RebuildParameter) => match args.as_slice() {
                [Value::Tensor(tensor), ..] if args.len() == 3 => Value::Tensor(tensor.clone()),
                _ => return self.invalid("a parameter built from something else than a tensor"),
            },
            Value::Global(Global::Storage(i)) => {
                return self.invalid(format!("a call of torch.{}", STORAGES[*i].0));
            }
            Value::Global(global @ (Global::Reconstruct | Global::FromBuffer | Global::NumpyDtype)) => {
                self.array_call(*global, &args)?
            }
            other => return self.invalid(format!("a call of {}", other.kind())),
        };
        self.push(result)
    }

    pub fn count(&self, value: i64, what: &str) -> Step<usize> {
        usize::try_from(value).or_else(|_| self.invalid(format!("{what} {value}; expected 0 or more")))
    }

    pub fn counts(&self, ids: &[Id], what: &str) -> Step<Vec<usize>> {
        // Torch itself stops at 64 axes.
        if ids.len() > 64 {
            return self.invalid(format!("{what} of {} axes; expected at most 64", ids.len()));
        }
        ids.iter()
            .map(|&id| match self.values[id] {
                Value::Int(value) => self.count(value, what),
                ref other => self.invalid(format!("{what} of {}; expected integers", other.kind())),
            })
            .collect()
    }

    /// Reads torch's persistent id: `("storage", class, key, device, elements)`; old archives add a view, or None.
    pub fn storage(&self, id: Id) -> Step<StorageRef<'a>> {
        let Value::Tuple(parts) = &self.values[id] else {
            return self.invalid("a persistent id that is no tuple");
        };
        let parts: Vec<&Value> = parts.iter().take(7).map(|&id| &self.values[id]).collect();
        match parts[..] {
            [
                Value::Str("storage"),
                Value::Global(Global::Storage(class)),
                Value::Str(key),
                Value::Str(_),
                Value::Int(numel),
            ]
            | [
                Value::Str("storage"),
                Value::Global(Global::Storage(class)),
                Value::Str(key),
                Value::Str(_),
                Value::Int(numel),
                Value::None,
            ] => {
                let dtype = Dtype::from_safetensors(STORAGES[*class].1);
                Ok(StorageRef { key, dtype, numel: self.count(*numel, "size of a storage")? })
            }
            _ => self.invalid("a persistent id other than (\"storage\", class, key, device, size)"),
        }
    }
}
