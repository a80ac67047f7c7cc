//! The arrays of a call: imported together, compared, and then given to the kernels, where possible
//! without a copy.

use std::sync::mpsc::Receiver;

use bytes::Bytes;
use kyklos::{Attention, BiasKind, BiasTensor, Error, Result, Saved, Tensor};
use pyo3::prelude::*;

use crate::call::{Bias, Call};
use crate::tensors::arrays::{Elements, Loan};
use crate::tensors::axes::{Argument, Form, check_bias, check_rows, check_states};
use crate::tensors::kind::Kind;
use crate::tensors::place::Place;
use crate::tensors::torch;

/// What a call reads.
pub(crate) struct Inputs {
    /// The options, with the bias.
    pub(crate) attention: Attention,
    /// q, k and v.
    pub(crate) states: [Tensor; 3],
}

/// What a backward pass reads.
pub(crate) struct BackwardInputs {
    pub(crate) attention: Attention,
    pub(crate) saved: Saved,
    pub(crate) d_o: Tensor,
    pub(crate) d_lse: Option<Tensor>,
}

/// How long a call has the memory of its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BiasUse {
    /// Until it returns.
    Borrowed,
    /// Longer: a copy.
    Kept,
    /// It has none, or one that an earlier call has read.
    Without,
}

/// Imports arrays of one call.
struct Importer<'a> {
    call: &'a Call,
    place: &'a Place,
    loan: Loan,
}

impl Importer<'_> {
    fn argument(&self, name: &'static str, form: Form, array: &Bound<'_, PyAny>) -> Result<Argument> {
        // Only these are read on a GPU.
        let place = Some(self.place).filter(|_| !matches!(form, Form::KeyBias));
        if matches!(form, Form::Bias | Form::KeyBias)
            && let Some(copy) = torch::rows_on_host(self.place.device(), array, matches!(form, Form::Bias))?
        {
            let elements = Elements::import(name, &copy, &self.loan, None)?;
            return Argument::new(name, form, elements, self.call.heads_first);
        }
        Argument::new(name, form, Elements::import(name, array, &self.loan, place)?, self.call.heads_first)
    }

    fn states(&self, [q, k, v]: [&Bound<'_, PyAny>; 3]) -> Result<[Argument; 3]> {
        let argument = |name, array| self.argument(name, Form::States, array);
        let states = [argument("q", q)?, argument("k", k)?, argument("v", v)?];
        check_states(states.each_ref())?;
        Ok(states)
    }

    fn tensor(&self, argument: &Argument, name: &str) -> Result<Tensor> {
        argument.elements.tensor(name, self.call.heads_first, self.place)
    }

    /// The call's bias, compared with `q` and not read.
    fn bias(&self, py: Python<'_>, q: &Argument) -> Result<Option<(Argument, Form)>> {
        let Some(Bias { array, form }) = &self.call.bias else { return Ok(None) };
        let bias = self.argument(form.bias_name(), *form, array.bind(py))?;
        check_bias(q, &bias, *form)?;
        Ok(Some((bias, *form)))
    }

    /// The options with `bias`, which is read here, in the form of the kernels or by them.
    fn with_bias(&self, bias: Option<(Argument, Form)>, kept: BiasUse) -> Result<Attention> {
        let attention = self.call.attention.clone();
        let Some((bias, form)) = bias else { return Ok(attention) };
        let mut elements = bias.elements;
        if elements.is_on_device() {
            let rows = elements.tensor("bias", self.call.heads_first, self.place)?;
            // Refused before it is copied.
            attention.clone().bias_tensor(&rows)?;
            return attention.bias_tensor(&rows.copied()?);
        }
        if kept == BiasUse::Kept {
            elements = elements.copied(form.bias_name())?;
        }
        if self.call.heads_first && matches!(form, Form::Bias) {
            elements = elements.with_middle_axes_exchanged();
        }
        let rows = elements.rows(form.bias_name())?;
        Ok(Described::of(&elements, form)?.added_to(attention, rows))
    }
}

/// A bias without its elements.
struct Described {
    tensor: BiasTensor,
    rows: u32,
    keys: u32,
}

impl Described {
    /// Of a bias whose axes are in the order of the kernels.
    fn of(elements: &Elements, form: Form) -> Result<Self> {
        let extent = |value: usize| {
            u32::try_from(value).map_err(|_| {
                Error::request(format!("an extent of {value}"), format!("use at most {}", u32::MAX))
            })
        };
        let [batch, rows, heads, keys] = match (form, &elements.shape[..]) {
            (_, [batch, rows, heads, keys]) => [*batch, *rows, *heads, *keys],
            (_, [batch, heads, keys]) => [*batch, 1, *heads, *keys],
            (_, [batch, keys]) => [*batch, 1, 1, *keys],
            (form, shape) => unreachable!("{form:?} has been compared, and not {shape:?}"),
        };
        let kind = match elements.kind {
            Kind::Bool => BiasKind::Mask,
            Kind::Number(_) => BiasKind::Additive,
        };
        let shared_rows = matches!(form, Form::KeyBias);
        let tensor = BiasTensor { kind, batch: extent(batch)?, heads: extent(heads)?, shared_rows };
        Ok(Self { tensor, rows: extent(rows)?, keys: extent(keys)? })
    }

    fn added_to(self, attention: Attention, rows: Bytes) -> Attention {
        attention.bias(self.tensor, rows).bias_axes(self.rows, self.keys)
    }
}

/// A bias in host memory by itself, heads before rows: the tensor, its rows in the form of the
/// kernels, and its rows and keys.
pub(crate) fn bias_of(array: &Bound<'_, PyAny>, form: Form) -> Result<(BiasTensor, Bytes, [u32; 2])> {
    let (loan, _) = Loan::new();
    let name = form.bias_name();
    let mut elements = Argument::new(name, form, Elements::import(name, array, &loan, None)?, true)?.elements;
    if matches!(form, Form::Bias) {
        elements = elements.with_middle_axes_exchanged();
    }
    let Described { tensor, rows, keys } = Described::of(&elements, form)?;
    Ok((tensor, elements.copied(name)?.rows(name)?, [rows, keys]))
}

/// The options of a call as far as its plan needs them: the elements of a bias are not read.
pub(crate) fn for_plan(py: Python<'_>, call: &Call) -> Result<Attention> {
    let attention = call.attention.clone();
    let Some(Bias { array, form }) = &call.bias else { return Ok(attention) };
    let (loan, _) = Loan::new();
    let name = form.bias_name();
    let elements = Elements::import(name, array.bind(py), &loan, None)?;
    let mut elements = Argument::new(name, *form, elements, call.heads_first)?.elements;
    if call.heads_first && matches!(form, Form::Bias) {
        elements = elements.with_middle_axes_exchanged();
    }
    Ok(Described::of(&elements, *form)?.added_to(attention, Bytes::new()))
}

/// Imports q, k, v and the bias of a call; and what ends when nothing of them is in use.
pub(crate) fn import(
    call: &Call,
    place: &Place,
    arrays: [&Bound<'_, PyAny>; 3],
    of_bias: BiasUse,
) -> Result<(Inputs, Receiver<()>)> {
    let (loan, returned) = Loan::new();
    let importer = Importer { call, place, loan };
    let states = importer.states(arrays)?;
    let bias = match of_bias {
        BiasUse::Without => None,
        _ => importer.bias(arrays[0].py(), &states[0])?,
    };
    let [q, k, v] = &states;
    let states = [importer.tensor(q, "q")?, importer.tensor(k, "k")?, importer.tensor(v, "v")?];
    Ok((Inputs { attention: importer.with_bias(bias, of_bias)?, states }, returned))
}

/// Imports q, k, v, o, lse, d_o and d_lse, and the bias; and what ends when nothing of them is in
/// use.
pub(crate) fn import_backward(
    call: &Call,
    place: &Place,
    arrays: [&Bound<'_, PyAny>; 6],
    d_lse: Option<&Bound<'_, PyAny>>,
) -> Result<(BackwardInputs, Receiver<()>)> {
    let (loan, returned) = Loan::new();
    let importer = Importer { call, place, loan };
    let [q, k, v, o, lse, d_o] = arrays;
    let states = importer.states([q, k, v])?;
    let [q, k, v] = &states;
    let o = importer.argument("o", Form::States, o)?;
    let lse = importer.argument("lse", Form::Numbers, lse)?;
    let d_o = importer.argument("d_o", Form::States, d_o)?;
    let d_lse = d_lse.map(|d_lse| importer.argument("d_lse", Form::Numbers, d_lse)).transpose()?;
    check_rows(q, &o, Some(&lse))?;
    check_rows(q, &d_o, d_lse.as_ref())?;
    let bias = importer.bias(arrays[0].py(), q)?;
    let numbers = |lse: Argument, name| lse.elements.numbers(name, call.heads_first, place);
    let saved = Saved {
        q: importer.tensor(q, "q")?,
        k: importer.tensor(k, "k")?,
        v: importer.tensor(v, "v")?,
        o: importer.tensor(&o, "o")?,
        lse: numbers(lse, "lse")?,
    };
    let d_o = importer.tensor(&d_o, "d_o")?;
    let d_lse = d_lse.map(|d_lse| numbers(d_lse, "d_lse")).transpose()?;
    let attention = importer.with_bias(bias, BiasUse::Borrowed)?;
    Ok((BackwardInputs { attention, saved, d_o, d_lse }, returned))
}
